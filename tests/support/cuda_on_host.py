"""libpdx_cuda.so's interface with the CPU as its device, compiled and put in its place."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pdxfer.cuda.library as loader

ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wconversion", "-Werror")


@functools.cache
def _folder():
    """Kept alive, and with it the file, until the process ends."""
    return tempfile.TemporaryDirectory(prefix="pdxfer-cuda-on-host-")


@functools.cache
def compiled():
    """Path of the library."""
    path = Path(_folder().name) / loader.LIBRARY_NAME
    native = ROOT / "native"
    command = [
        *os.environ.get("CXX", "c++").split(),
        *[
            "-std=c++20",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Wconversion",
            "-Werror",
        ],
        *(f"-I{native / part / 'include'}" for part in ("cuda", "pdx_core")),
        str(native / "tests/cuda_on_host.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, timeout=120)
    return path


class HostDevice:
    """The library in place of the real one, as long as `monkeypatch` lasts."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(loader, "_loaded", None)
        monkeypatch.setattr(loader, "_find", compiled)
        self.handle = ctypes.CDLL(str(compiled()))

    def __getitem__(self, name):
        return ctypes.c_int.in_dll(self.handle, f"test_{name}").value

    def __setitem__(self, name, value):
        ctypes.c_int.in_dll(self.handle, f"test_{name}").value = value

    def restore(self):
        """What the library returns is as it was when it was loaded."""
        self["abi_version"] = loader.ABI_VERSION
        self["device_count"] = self["event_reached"] = 1
        self["device_count_result"] = self["result"] = 0

"""`pdxfer doctor`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdxfer import __version__, limits, memory
from pdxfer.daemon.log import in_red
from pdxfer.errors import PdxferError
from pdxfer.fabric.lanes import LANES, LaneSettings, Reach, offered
from pdxfer.fabric.ucx_listener import listener_warning

if TYPE_CHECKING:
    import argparse

_F_SEAL_FUTURE_WRITE: Final = 16  # Linux 5.1; the fcntl module has no name for it
_DESCRIPTORS_ENOUGH: Final = 16_384
_PTRACE: Final = {
    "0": "any process of this user",
    "1": "only a parent, or a process that allowed it",
    "2": "only with CAP_SYS_PTRACE",
    "3": "nobody",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    good: bool
    text: str
    needed_by: tuple[str, ...] = ()
    """Lanes that cannot serve without it; empty where it is only information."""


Check = Callable[[], Finding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--lane",
        action="append",
        choices=offered(),
        help="a lane that has to work; may be repeated; default: every lane",
    )
    parser.add_argument(
        "--ucx", help="auto, wheel, system or a directory; default: PDXFER_UCX, else auto"
    )


def run(options: argparse.Namespace) -> int:
    """Print the findings; 0 when every lane asked for works, 1 when one does not."""
    wanted = tuple(options.lane or offered())
    findings = [check() for check in CHECKS]
    findings += [lane_works(lane, options.ucx) for lane in reversed(offered())]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        needed = any(lane in wanted for lane in finding.needed_by)
        mark = "ok  " if finding.good else ("BAD " if needed else "note")
        print(f"{mark} {finding.name.ljust(width)}  {finding.text}")
    lacking = {lane for finding in findings if not finding.good for lane in finding.needed_by}
    print()
    for lanes, can in (
        ([lane for lane in offered() if lane in lacking], "cannot"),
        ([lane for lane in offered() if lane not in lacking], "can"),
    ):
        if lanes:
            print(f"lanes that {can} serve here: {', '.join(lanes)}")
    warning = listener_warning([lane for lane in wanted if lane not in lacking])
    if warning:
        print(in_red(warning, terminal=sys.stdout.isatty()))
    return 1 if lacking.intersection(wanted) else 0


def _python() -> Finding:
    text = f"pdxfer {__version__}, CPython {platform.python_version()}, Linux {platform.release()}"
    return Finding("versions", sys.version_info >= (3, 11), text)


def _core() -> Finding:
    return _imports("native core", "pdxfer._core", offered())


def _uvloop() -> Finding:
    return _imports("uvloop", "uvloop", offered())


def _imports(name: str, module: str, needed_by: tuple[str, ...]) -> Finding:
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return Finding(name, False, f"{module} cannot be imported: {error}", needed_by)
    return Finding(name, True, str(getattr(loaded, "__version__", "loads")), needed_by)


def _curve() -> Finding:
    import zmq

    text = f"libzmq {zmq.zmq_version()}, " + (
        "with CURVE" if zmq.has("curve") else "without CURVE: addresses beyond loopback need it"
    )
    return Finding("zeromq", zmq.has("curve"), text)


def _seals() -> Finding:
    try:
        with memory.allocate(1 << 16) as shared, memory.map_sealed(shared.fd, 1 << 16):
            pass
        descriptor = os.memfd_create("pdxfer-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        finally:
            os.close(descriptor)
    except (OSError, PdxferError) as error:
        return Finding("sealed memory", False, f"memfd with seals: {error}", offered())
    return Finding("sealed memory", True, "memfd, SHRINK|GROW|SEAL and FUTURE_WRITE")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"{soft >> 10} KiB"
    return Finding(
        "locked memory", True, f"{shown} (RDMA pins every pool; {', '.join(offered())} pin nothing)"
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    text = (
        f"{soft}, which daemons raise to {most}; each connection to a UCX port holds one, also an "
        "idle one of a stranger"
    )
    enough = hard == resource.RLIM_INFINITY or hard >= _DESCRIPTORS_ENOUGH
    return Finding("descriptors", enough, text + ("" if enough else ": raise LimitNOFILE"))


def _ptrace_scope() -> Finding:
    file = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not file.exists():
        return Finding("ptrace scope", True, "not restricted by this kernel")
    value = file.read_text(encoding="ascii").strip()
    return Finding("ptrace scope", True, f"{value}: {_PTRACE.get(value, 'unknown')}")


def _cross_memory() -> Finding:
    """Write one byte into a sibling, which is what the cma lane does between two daemons."""
    target = subprocess.Popen(
        [sys.executable, "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address = int(target.stdout.readline()) if target.stdout else 0
        writer = subprocess.run(
            [sys.executable, "-c", _WRITER, str(target.pid), str(address)],
            capture_output=True,
            text=True,
            timeout=limits.CHILD_STOP_TIMEOUT_S,
            check=False,
        )
        why = writer.stdout.strip()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        why = str(error)
    finally:
        target.kill()
        target.communicate()
    near = tuple(name for name in offered() if LANES[name].reach is Reach.HOST)
    if why:
        return Finding("process_vm_writev", False, f"between two processes: {why}", near)
    return Finding("process_vm_writev", True, "between two processes of this user", near)


_TARGET = """
import ctypes, sys
cell = ctypes.c_char(0)
print(ctypes.addressof(cell), flush=True)
sys.stdin.read()
"""
_WRITER = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
cell = ctypes.c_char(1)
here, there = Part(ctypes.addressof(cell), 1), Part(int(sys.argv[2]), 1)
library = ctypes.CDLL(None, use_errno=True)
done = library.process_vm_writev(int(sys.argv[1]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("" if done == 1 else os.strerror(ctypes.get_errno()))
"""


def lane_works(lane: str, ucx: str | None) -> Finding:
    """Make the lane's engine, as an agent would."""
    row = LANES[lane]
    try:
        fabric = row.make(LaneSettings(ucx=ucx or ""))
    except ImportError as error:
        return Finding(f"lane {lane}", False, f"native module: {error}", (lane,))
    except PdxferError as error:
        return Finding(f"lane {lane}", False, str(error), (lane,))
    try:
        of_library = f", {row.library} {fabric.version}" if row.library else ""
        return Finding(f"lane {lane}", True, f"{row.purpose}{of_library}", (lane,))
    finally:
        fabric.close(limits.ENGINE_CLOSE_DEADLINE_S)


CHECKS: Final[tuple[Check, ...]] = (
    _python,
    _core,
    _uvloop,
    _curve,
    _seals,
    _locked_memory,
    _descriptors,
    _ptrace_scope,
    _cross_memory,
)

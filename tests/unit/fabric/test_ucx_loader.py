"""Which UCX is chosen and in which order it is loaded; an explicit choice is never replaced."""

from __future__ import annotations

import ctypes
import os
import types

import pytest

from pdxfer.errors import ConfigError, ResourceError
from pdxfer.fabric import ucx_loader


class Loader:
    """The loader with its view of the machine replaced."""

    def __init__(self, monkeypatch, tmp_path):
        self.opened: list[str] = []
        self.missing: set[str] = set()
        self.wheel = None
        self.bound_to = "/usr/lib/libucp.so.0"
        self.extension = types.SimpleNamespace(runtime=lambda: ("1.22.0", self.bound_to))
        monkeypatch.setattr(ucx_loader, "_loaded", None)
        monkeypatch.setattr(ucx_loader, "_handles", [])
        monkeypatch.setattr(ucx_loader, "_wheel_directory", lambda: self.wheel)
        monkeypatch.setattr(ucx_loader, "_import_extension", lambda: self.extension)
        monkeypatch.setattr(ctypes, "CDLL", self.open)
        monkeypatch.delenv(ucx_loader.CHOICE_VARIABLE, raising=False)
        self.tmp_path = tmp_path

    def open(self, path, mode):
        assert mode == ctypes.RTLD_LOCAL
        if path in self.missing:
            raise OSError(f"{path}: cannot open shared object file")
        self.opened.append(path)
        return object()

    def directory(self, name):
        """A directory that looks like one with UCX."""
        made = self.tmp_path / name
        made.mkdir()
        for library in ("libucs.so.0", "libuct.so.0", "libucp.so.0"):
            (made / library).touch()
        self.bound_to = str(made / "libucp.so.0.0.0")
        return made


@pytest.fixture
def loader(monkeypatch, tmp_path):
    return Loader(monkeypatch, tmp_path)


def test_auto_takes_the_wheel_in_the_order_its_libraries_need(loader):
    loader.wheel = loader.directory("wheel")
    found = ucx_loader.load_ucx()
    assert [os.path.basename(path) for path in loader.opened] == [
        "libucs.so.0",
        "libuct.so.0",
        "libucp.so.0",
    ]
    assert all(path.startswith(str(loader.wheel)) for path in loader.opened)
    assert (found.choice, found.source, found.version) == ("auto", "wheel", "1.22.0")
    assert found.path == loader.bound_to


def test_auto_takes_the_system_where_there_is_no_wheel(loader):
    assert ucx_loader.load_ucx().source == "system"
    assert loader.opened == ["libucs.so.0", "libuct.so.0", "libucp.so.0"]


def test_the_variable_chooses_and_an_argument_wins(loader, monkeypatch):
    loader.wheel = loader.directory("wheel")
    monkeypatch.setenv(ucx_loader.CHOICE_VARIABLE, "wheel")
    loader.bound_to = "/usr/lib/libucp.so.0"
    assert ucx_loader.load_ucx("system").source == "system"


def test_a_directory_or_its_lib_is_taken(loader):
    root = loader.tmp_path / "root"
    root.mkdir()
    inside = loader.directory("root/lib")
    assert ucx_loader.load_ucx(str(root)).source == str(root)
    assert loader.opened[0] == str(inside / "libucs.so.0")


def test_an_unknown_choice_is_refused_by_name(loader):
    with pytest.raises(ConfigError, match="PDXFER_UCX=whel: neither auto, wheel, system nor"):
        ucx_loader.load_ucx("whel")
    assert loader.opened == []


def test_a_wheel_that_was_asked_for_and_is_missing_is_refused(loader):
    with pytest.raises(ConfigError, match=r"pip install 'pdxfer\[ucx\]'"):
        ucx_loader.load_ucx("wheel")


@pytest.mark.parametrize(("choice", "error"), [("auto", ResourceError), ("system", ConfigError)])
def test_a_library_that_does_not_load_is_named(loader, choice, error):
    loader.missing.add("libuct.so.0")
    with pytest.raises(error, match=r"libuct\.so\.0 cannot be loaded"):
        ucx_loader.load_ucx(choice)
    available, why = ucx_loader.ucx_available(choice)
    assert not available
    assert "libuct.so.0" in why


def test_another_ucx_in_the_process_is_found_out(loader):
    loader.wheel = loader.directory("wheel")
    loader.bound_to = "/opt/ucx/lib/libucp.so.0"
    with pytest.raises(ConfigError, match=r"UCX 1\.22\.0 from /opt/ucx/lib/libucp\.so\.0 was in"):
        ucx_loader.load_ucx("wheel")


def test_one_process_has_one_ucx(loader):
    loader.wheel = loader.directory("wheel")
    first = ucx_loader.load_ucx()
    assert ucx_loader.load_ucx("wheel") is first
    assert ucx_loader.load_ucx() is first
    with pytest.raises(ConfigError, match="one process has one UCX"):
        ucx_loader.load_ucx("system")
    assert len(loader.opened) == 3


def test_ucx_does_not_log_to_stdout(loader, monkeypatch):
    monkeypatch.delenv("UCX_LOG_FILE", raising=False)
    ucx_loader.load_ucx()
    assert os.environ["UCX_LOG_FILE"] == "stderr"
    monkeypatch.setattr(ucx_loader, "_loaded", None)
    monkeypatch.setenv("UCX_LOG_FILE", "/tmp/ucx.log")
    ucx_loader.load_ucx()
    assert os.environ["UCX_LOG_FILE"] == "/tmp/ucx.log"


def test_available_says_what_is_loaded(loader):
    assert ucx_loader.ucx_available() == (True, "UCX 1.22.0 from /usr/lib/libucp.so.0")

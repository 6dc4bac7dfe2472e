"""Which UCX this process uses: found, loaded and reported before `pdxfer._ucx` is imported.

`PDXFER_UCX` (or an argument) chooses: `wheel` (package `libucx-cu12` or `libucx-cu13`), `system`
(the loader's own path), a directory, or `auto`: the wheel where it is installed, else the system's.
The libraries are loaded by full path and privately; the extension then binds to them by their
SONAME. A choice that was explicit is met or refused, never replaced by another.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pdxfer.errors import ConfigError, PdxferError, ResourceError

CHOICE_VARIABLE = "PDXFER_UCX"

# In this order: each one needs those before it. libucm comes in through libucs; loaded first it
# would miss symbols of libucs.
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")


@dataclass(frozen=True, slots=True)
class UcxRuntime:
    """The UCX that is loaded."""

    choice: str
    """What was asked for: `auto`, `wheel`, `system` or a directory."""
    source: str
    """What was found: `wheel`, `system` or the directory."""
    version: str
    """`major.minor.release`, asked of the library."""
    path: str
    """File that the library's code really comes from."""
    module: ModuleType
    """`pdxfer._ucx`, bound to it."""


_lock = threading.Lock()
_loaded: UcxRuntime | None = None
_handles: list[ctypes.CDLL] = []


def load_ucx(choice: str | None = None) -> UcxRuntime:
    """Load UCX and `pdxfer._ucx`, once per process.

    Args:
        choice: As `PDXFER_UCX`; None or empty: that variable, else `auto`.

    Returns:
        What is loaded, the same object each time.

    Raises:
        ConfigError: the choice is unknown, its directory has no UCX, or another UCX is in this
            process already. ResourceError: no UCX can be loaded. Nothing is bound after either.
    """
    global _loaded
    wanted = choice or os.environ.get(CHOICE_VARIABLE, "") or "auto"
    with _lock:
        if _loaded is None:
            _loaded = _load(wanted)
        elif wanted not in ("auto", _loaded.choice, _loaded.source):
            raise ConfigError(
                f"{CHOICE_VARIABLE}={wanted}: this process has loaded UCX {_loaded.version} from "
                f"{_loaded.path} ({_loaded.choice}); one process has one UCX",
                fields={CHOICE_VARIABLE: wanted},
            )
        return _loaded


def ucx_available(choice: str | None = None) -> tuple[bool, str]:
    """Whether `load_ucx` works, and what is loaded or why not."""
    try:
        runtime = load_ucx(choice)
    except PdxferError as error:
        return False, str(error)
    return True, f"UCX {runtime.version} from {runtime.path}"


def _load(choice: str) -> UcxRuntime:
    # UCX writes its log to stdout otherwise, into the middle of whatever is printed there.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    source, directory = _find(choice)
    _preload(choice, directory)
    module = _import_extension()
    version, path = module.runtime()
    if directory is not None and Path(path).resolve().parent != directory.resolve():
        raise ConfigError(
            f"{CHOICE_VARIABLE}={choice}: UCX {version} from {path} was in this process before; "
            f"import pdxfer's UCX lane first, or use {CHOICE_VARIABLE}={Path(path).parent}",
            fields={CHOICE_VARIABLE: choice},
        )
    return UcxRuntime(choice=choice, source=source, version=version, path=path, module=module)


def _find(choice: str) -> tuple[str, Path | None]:
    """Name of the source and the directory with its libraries; None: the system's path."""
    if choice == "system":
        return "system", None
    if choice in ("wheel", "auto"):
        wheel = _wheel_directory()
        if wheel is not None:
            return "wheel", wheel
        if choice == "auto":
            return "system", None
        raise ConfigError(
            f"{CHOICE_VARIABLE}=wheel: no libucx wheel is installed; pip install 'pdxfer[ucx]', or "
            f"use {CHOICE_VARIABLE}=system",
            fields={CHOICE_VARIABLE: choice},
        )
    for directory in (Path(choice), Path(choice) / "lib"):
        if (directory / _LIBRARIES[-1]).exists():
            return choice, directory
    raise ConfigError(
        f"{CHOICE_VARIABLE}={choice}: neither auto, wheel, system nor a directory with "
        f"{_LIBRARIES[-1]}",
        fields={CHOICE_VARIABLE: choice},
    )


def _wheel_directory() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    for location in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(location) / "lib"
        if (directory / _LIBRARIES[-1]).exists():
            return directory
    return None


def _preload(choice: str, directory: Path | None) -> None:
    for name in _LIBRARIES:
        path = name if directory is None else str(directory / name)
        try:
            _handles.append(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL))
        except OSError as error:
            text = f"{CHOICE_VARIABLE}={choice}: {path} cannot be loaded: {error}"
            if choice == "auto":
                raise ResourceError(f"{text}; pip install 'pdxfer[ucx]' or install UCX") from error
            raise ConfigError(text, fields={CHOICE_VARIABLE: choice}) from error


def _import_extension() -> ModuleType:
    try:
        return importlib.import_module("pdxfer._ucx")
    except ImportError as error:
        raise ResourceError(
            f"pdxfer._ucx cannot be imported: {error}; this build of pdxfer has no UCX lanes"
        ) from error

"""libpdx_cuda.so: found, loaded when first asked for, its errors as ours.

The library is part of a build made where nvcc is. It holds its CUDA runtime and finds the driver by
itself, so it loads on any Linux machine; without a driver or a device that is new enough there is
no GPU, which is an answer, not a failure.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from ctypes import POINTER, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdxfer.errors import PdxferError, ResourceError

LIBRARY_NAME: Final = "libpdx_cuda.so"
ABI_VERSION: Final = 1

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_INSUFFICIENT_DRIVER: Final = 35
_NO_DEVICE: Final = 100


class CudaError(ResourceError):
    """A CUDA call failed, or work enqueued before it.

    On the wire it is its base class. After an error that breaks the context (an illegal address,
    say) every later call of this process on that device fails too.
    """

    def __init__(self, text: str, *, number: int, name: str) -> None:
        super().__init__(
            text, retryable=number == _OUT_OF_MEMORY, fields={"cuda_error": f"{name} ({number})"}
        )
        self.number = number
        """The `cudaError_t`."""


class OutlineStruct(ctypes.Structure):
    """`pdx_cuda_outline`."""

    _fields_ = (  # type: ignore[mutable-override]
        ("entries", c_void_p),
        ("spans", c_void_p),
        ("source_ids", c_void_p),
        ("destination_ids", c_void_p),
        ("spans_count", c_int64),
        ("rows", c_int64),
    )


class CopiesStruct(ctypes.Structure):
    """`pdx_cuda_copies`."""

    _fields_ = (  # type: ignore[mutable-override]
        ("runs", c_void_p),
        ("staging_offsets", c_void_p),
        ("count", c_int64),
        ("region_addresses", c_void_p),
        ("region_bytes", c_void_p),
        ("regions", c_int64),
        ("staging", c_void_p),
        ("staging_bytes", c_int64),
        ("first_byte", c_int64),
        ("longest_bytes", c_int64),
    )


_ARGUMENTS: Final = {
    "abi_version": (),
    "runtime_version": (),
    "driver_version": (POINTER(c_int),),
    "device_count": (POINTER(c_int),),
    "error_name": (c_int,),
    "error_text": (c_int,),
    "descriptors": (c_int, c_void_p, POINTER(OutlineStruct), c_void_p, c_void_p, c_void_p),
    "gather": (c_int, c_void_p, POINTER(CopiesStruct), c_void_p),
    "scatter": (c_int, c_void_p, POINTER(CopiesStruct), c_void_p),
    "allocate": (c_int, c_int64, POINTER(c_void_p)),
    "free": (c_int, c_void_p),
    "allocate_pinned": (c_int, c_int64, POINTER(c_void_p)),
    "free_pinned": (c_int, c_void_p),
    "copy": (c_int, c_void_p, c_void_p, c_void_p, c_int64),
    "fill": (c_int, c_void_p, c_void_p, c_int, c_int64),
    "stream_create": (c_int, POINTER(c_void_p)),
    "stream_destroy": (c_int, c_void_p),
    "stream_synchronize": (c_int, c_void_p),
    "stream_wait_event": (c_int, c_void_p, c_void_p),
    "event_create": (c_int, POINTER(c_void_p)),
    "event_destroy": (c_int, c_void_p),
    "event_record": (c_int, c_void_p, c_void_p),
    "event_query": (c_int, c_void_p, POINTER(c_int)),
}
_TEXTS: Final = ("error_name", "error_text")


@dataclass(frozen=True, slots=True)
class CudaLibrary:
    """The loaded library; any thread may call."""

    handle: ctypes.CDLL
    path: str

    def number(self, function: str, *arguments: object) -> int:
        """What a function returns: 0 or a `cudaError_t`, for the versions a number."""
        return int(getattr(self.handle, f"pdx_cuda_{function}")(*arguments))

    def call(self, function: str, *arguments: object) -> None:
        """Call a function that may fail.

        Raises: CudaError: of this call, or of earlier asynchronous work that it came out of.
        """
        number = self.number(function, *arguments)
        if number != _SUCCESS:
            name, text = self.describe(number)
            raise CudaError(
                f"CUDA {function}: {text} ({name}, {number}); errors of earlier work of this "
                "process on the device come out of later calls",
                number=number,
                name=name,
            )

    def describe(self, number: int) -> tuple[str, str]:
        """Name and text of a `cudaError_t`."""
        return self._text("error_name", number), self._text("error_text", number)

    def _text(self, function: str, number: int) -> str:
        text: bytes | None = getattr(self.handle, f"pdx_cuda_{function}")(number)
        return (text or b"unknown error").decode()


_lock = threading.Lock()
_loaded: CudaLibrary | None = None


def load_cuda() -> CudaLibrary:
    """The library, where it is part of this build and a GPU can be used.

    Loaded once per process. A machine that had no GPU is asked again at the next call.

    Raises:  ResourceError: no GPU, with the reason `cuda_available` gives.
    Threads: any; the first call may take seconds, in which the driver starts.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            library = _open()
            _check_device(library)
            _loaded = library
        return _loaded


def cuda_available() -> tuple[bool, str]:
    """Whether descriptors, gather and scatter run on a GPU here, and by what or why not.

    Never raises: a missing library, driver or device is a reason.
    """
    try:
        library = load_cuda()
        count, driver = c_int(), c_int()
        library.call("device_count", count)
        library.call("driver_version", driver)
    except PdxferError as error:
        return False, str(error)
    runtime = _version(library.number("runtime_version"))
    devices = "1 GPU" if count.value == 1 else f"{count.value} GPUs"
    return True, f"{devices}, driver for CUDA {_version(driver.value)}, built with CUDA {runtime}"


def _open() -> CudaLibrary:
    path = _find()
    if path is None:
        raise ResourceError(
            f"no GPU: this build of pdxfer has no {LIBRARY_NAME}; it is built where nvcc is "
            "(CMake option PDX_WITH_CUDA)"
        )
    try:
        handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        version = int(handle.pdx_cuda_abi_version())
        if version == ABI_VERSION:
            _declare(handle)
    except (OSError, AttributeError) as error:
        raise ResourceError(f"no GPU: {path} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise ResourceError(
            f"no GPU: {path} has interface {version}, this pdxfer needs {ABI_VERSION}; build both "
            "from the same sources",
            fields={"abi_version": f"library={version}, pdxfer={ABI_VERSION}"},
        )
    return CudaLibrary(handle, str(path))


def _find() -> Path | None:
    """Beside the native core, wherever the build put that, or beside the sources."""
    core = importlib.util.find_spec("pdxfer._core")
    places = [Path(core.origin).parent] if core is not None and core.origin else []
    places.append(Path(__file__).parent.parent)
    found = (place / LIBRARY_NAME for place in places)
    return next((path for path in found if path.exists()), None)


def _declare(handle: ctypes.CDLL) -> None:
    for name, arguments in _ARGUMENTS.items():
        function = getattr(handle, f"pdx_cuda_{name}")
        function.argtypes = arguments
        function.restype = c_char_p if name in _TEXTS else c_int


def _check_device(library: CudaLibrary) -> None:
    count = c_int()
    number = library.number("device_count", count)
    if number == _SUCCESS and count.value > 0:
        return
    name, text = library.describe(number)
    if number == _INSUFFICIENT_DRIVER:
        runtime = _version(library.number("runtime_version"))
        reason = f"no NVIDIA driver, or one older than CUDA {runtime} needs"
    elif number in (_SUCCESS, _NO_DEVICE):
        reason = "no CUDA device is visible"
    else:
        reason = text
    raise ResourceError(
        f"no GPU: {reason} ({name}, {number})", fields={"cuda_error": f"{name} ({number})"}
    )


def _version(number: int) -> str:
    """`major.minor` of a CUDA version number."""
    return f"{number // 1000}.{number % 1000 // 10}"

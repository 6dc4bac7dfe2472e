"""Device memory, pinned memory, streams and events: the little that staging needs.

A stream or event is passed as its handle, an int: a `cudaStream_t` of any CUDA runtime in the
process (`torch.cuda.current_stream().cuda_stream`), 0 the legacy default stream. Work on different
streams is ordered by events: record one after what comes first, let the other stream wait for it.
"""

from __future__ import annotations

from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING, Self

from pdxfer.cuda.library import load_cuda
from pdxfer.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


class _Owned:
    """A handle that is given back once; nobody else may use it afterwards."""

    _free: str

    def __init__(self, handle: int, device: int) -> None:
        self._handle: int | None = handle
        self.device = device
        """Ordinal."""

    def _open_handle(self) -> int:
        if self._handle is None:
            raise ConfigError(f"this {type(self).__name__} is closed")
        return self._handle

    def close(self) -> None:
        """Give it back; idempotent.

        Raises: CudaError: of earlier work. It counts as given back: the device is broken then.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            load_cuda().call(self._free, self.device, handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Memory(_Owned):
    """Memory that the device can reach."""

    _allocate: str

    def __init__(self, length_bytes: int, device: int = 0) -> None:
        if length_bytes < 1:
            raise ConfigError(f"length_bytes is {length_bytes}; it must be 1 or more")
        address = c_void_p()
        load_cuda().call(self._allocate, device, length_bytes, address)
        super().__init__(address.value or 0, device)
        self.length_bytes = length_bytes

    @property
    def address(self) -> int:
        """Address of its first byte, valid on the device and, where pinned, on the host."""
        return self._open_handle()

    def upload(self, array: NDArray[np.generic], *, offset_bytes: int = 0, stream: int = 0) -> None:
        """Enqueue a copy of a host array into this memory.

        The array may be changed once this returns, unless it lies in pinned memory.

        Raises: ConfigError: not C-contiguous, or beyond the end. CudaError.
        """
        at = self._place(array, offset_bytes)
        copy(at, array.ctypes.data, array.nbytes, device=self.device, stream=stream)

    def download(
        self, array: NDArray[np.generic], *, offset_bytes: int = 0, stream: int = 0
    ) -> None:
        """Fill a host array with bytes of this memory; waits for the stream.

        Raises: ConfigError: not C-contiguous, not writable, or beyond the end. CudaError.
        """
        if not array.flags.writeable:
            raise ConfigError("a read-only array cannot be filled")
        at = self._place(array, offset_bytes)
        copy(array.ctypes.data, at, array.nbytes, device=self.device, stream=stream)
        synchronize(stream, device=self.device)

    def fill(self, value: int, *, stream: int = 0) -> None:
        """Enqueue setting every byte to `value`."""
        load_cuda().call("fill", self.device, stream, self.address, value, self.length_bytes)

    def _place(self, array: NDArray[np.generic], offset_bytes: int) -> int:
        if not array.flags.c_contiguous:
            raise ConfigError("the array is not C-contiguous")
        if not 0 <= offset_bytes <= self.length_bytes - array.nbytes:
            raise ConfigError(
                f"{array.nbytes} bytes at offset {offset_bytes} leave {self.length_bytes} bytes"
            )
        return self.address + offset_bytes


class DeviceMemory(_Memory):
    """Bytes on a GPU, uninitialised.

    Threads: any. Ownership: its creator's; `close` waits for the work of the whole device.
    """

    _allocate = "allocate"
    _free = "free"


class PinnedMemory(_Memory):
    """Page-locked host memory, uninitialised.

    Copies to and from it are asynchronous; kernels reach it at the same address.
    """

    _allocate = "allocate_pinned"
    _free = "free_pinned"


class Stream(_Owned):
    """A stream of its own, ordered with others by events only."""

    _free = "stream_destroy"

    def __init__(self, device: int = 0) -> None:
        handle = c_void_p()
        load_cuda().call("stream_create", device, handle)
        super().__init__(handle.value or 0, device)

    @property
    def handle(self) -> int:
        """The `cudaStream_t`."""
        return self._open_handle()


class Event(_Owned):
    """A point in the work of a stream."""

    _free = "event_destroy"

    def __init__(self, device: int = 0) -> None:
        handle = c_void_p()
        load_cuda().call("event_create", device, handle)
        super().__init__(handle.value or 0, device)

    @property
    def handle(self) -> int:
        """The `cudaEvent_t`."""
        return self._open_handle()

    def record(self, stream: int = 0) -> None:
        """The event now means all work enqueued on `stream` so far."""
        load_cuda().call("event_record", self.device, self.handle, stream)

    def reached(self) -> bool:
        """Whether that work is done; never waits. True where nothing was recorded.

        Raises: CudaError: that work, or other work before it, failed.
        """
        return event_reached(self.handle, device=self.device)

    def block(self, stream: int) -> None:
        """What is enqueued on `stream` from now on waits for the event; the caller does not."""
        stream_wait(stream, self.handle, device=self.device)


def event_reached(event: int, *, device: int = 0) -> bool:
    """`Event.reached` for the handle of an event made elsewhere."""
    reached = c_int()
    load_cuda().call("event_query", device, event, reached)
    return reached.value == 1


def stream_wait(stream: int, event: int, *, device: int = 0) -> None:
    """`Event.block` for the handle of an event made elsewhere."""
    load_cuda().call("stream_wait_event", device, stream, event)


def synchronize(stream: int = 0, *, device: int = 0) -> None:
    """Wait until all work on a stream is done; without limit, so not on a progress thread.

    Raises: CudaError: that work failed.
    """
    load_cuda().call("stream_synchronize", device, stream)


def copy(
    destination: int, source: int, length_bytes: int, *, device: int = 0, stream: int = 0
) -> None:
    """Enqueue a copy between addresses, each on the host or on a device.

    Both belong to the copy until the stream has passed it; it returns earlier only where host
    memory is pinned.
    """
    load_cuda().call("copy", device, stream, destination, source, length_bytes)

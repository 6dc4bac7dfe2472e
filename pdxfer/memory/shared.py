"""Memfds that can never change in size, and their mappings.

A buffer is a memfd whose size can never change again (sealed SHRINK, GROW and SEAL), so nothing a
worker does later can make an access of the agent fault. All its pages are touched once at the
start: no page fault in the middle of a transfer, and no memory shortage found there.

A tensor is made with `torch.from_numpy(numpy.frombuffer(memory.buffer, ...))`: numpy keeps the
mapping exported, so closing it under a live tensor raises `BufferError`. (`torch.frombuffer` does
not, and leaves the tensor dangling.)
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdxfer import limits
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.memory.available import check_available
from pdxfer.memory.lengths import whole

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_REMEDY = (
    "a daemon maps only memory made by pdxfer.memory.allocate (pools make it themselves) or "
    "pdxfer.memory.tensors, or adopted by pdxfer.memory.adopt; any other memory, a GPU's too, "
    "needs the agent inside the worker: pdxfer.embedded"
)

_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A contiguous range of memory of this process that a layout's region lies in."""

    address: int
    """Address of the first byte of the range, in this process."""
    length_bytes: int
    owner: object
    """Keeps the memory alive as long as this object lives."""
    fd: int = -1
    """The memfd behind the range, valid while `owner` is open; -1 where there is none."""
    offset_bytes: int = 0
    """Where the range begins in the memfd."""


class SharedMemory:
    """A mapped memfd. Made by `allocate`, `map_sealed` and `adopt`.

    Ownership: this object owns its descriptor and its mapping. Arrays and tensors made from
    `buffer` keep the mapping alive, also when this object is gone.
    """

    def __init__(self, fd: int, buffer: mmap.mmap | memoryview) -> None:
        """Take over `fd` and its mapping `buffer`."""
        self.fd = fd
        """The memfd; -1 after `close`."""
        self.buffer = buffer
        """All bytes of the mapping, writable."""
        self.length_bytes = len(buffer)
        self.address = int(np.frombuffer(buffer, np.uint8).ctypes.data)
        """Address of the first byte of the memory, in this process."""
        self._close_fd = weakref.finalize(self, os.close, fd)

    def range(self, offset_bytes: int = 0, length_bytes: int | None = None) -> MemoryRange:
        """A part of this memory, as a layout's region.

        Raises: ConfigError when the part does not lie inside, or a number is no int.
        """
        offset_bytes = whole("offset_bytes", offset_bytes)
        if length_bytes is None:
            length = self.length_bytes - offset_bytes
        else:
            length = whole("length_bytes", length_bytes)
        if offset_bytes < 0 or length <= 0 or offset_bytes + length > self.length_bytes:
            raise ConfigError(
                f"range offset_bytes={offset_bytes} length_bytes={length} is not inside the "
                f"{self.length_bytes} bytes of this memory"
            )
        return MemoryRange(self.address + offset_bytes, length, self, self.fd, offset_bytes)

    def close(self) -> None:
        """Unmap and close. Idempotent.

        Raises: BufferError while an array or tensor of this memory lives; nothing has changed then.
        """
        self._unmap()
        self._close_fd()
        self.fd = -1

    def _unmap(self) -> None:
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def allocate(length_bytes: int, *, progress: Progress | None = None) -> SharedMemory:
    """Make shared memory of exactly `length_bytes` zero bytes, every page of it present.

    The mapping is not inherited by `fork`: a child that touches it faults, instead of making each
    write of the parent a copy that the agent does not see.

    Args:
        length_bytes: at least 1.
        progress: called after each slice of `limits.PREFAULT_SLICE_BYTES`, on this thread.

    Raises:
        ConfigError: `length_bytes` is no int, or not positive.
        ResourceError: there is not that much memory; found before a page is touched, unless others
            take it meanwhile. Nothing is left behind.
    """
    length_bytes = whole("length_bytes", length_bytes)
    if length_bytes <= 0:
        raise ConfigError(f"length_bytes={length_bytes}: shared memory needs at least 1 byte")
    check_available(length_bytes)
    fd = os.memfd_create("pdxfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length_bytes)
        buffer = map_present(fd, length_bytes, progress=progress)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise ResourceError(
                f"length_bytes={length_bytes}: cannot allocate shared memory: {error.strerror}"
            ) from error
        raise
    return SharedMemory(fd, buffer)


def map_sealed(fd: int, length_bytes: int) -> SharedMemory:
    """Map memory that another process made with `allocate`: the agent's side.

    `fd` stays the caller's; the result has a duplicate.

    Args:
        fd: a descriptor that came from a worker; nothing about it is believed.
        length_bytes: how much of it to map, from its first byte.

    Raises:
        ConfigError: not a memfd, not sealed against resizing, smaller than `length_bytes`, with
            less memory behind it than that, or not writable; a length that is no int. Nothing is
            mapped.
    """
    length_bytes = whole("length_bytes", length_bytes)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ConfigError(f"the cache is not in a memfd ({error.strerror}): {_REMEDY}") from error
    if seals & SEALS != SEALS:
        raise ConfigError(
            f"the cache's memfd has seals={seals:#x}, needs at least {SEALS:#x} "
            f"(SEAL|SHRINK|GROW): {_REMEDY}"
        )
    status = os.fstat(fd)
    if not 0 < length_bytes <= status.st_size:
        raise ConfigError(
            f"the cache's memfd has {status.st_size} bytes, the layout needs {length_bytes}: "
            f"{_REMEDY}"
        )
    present_bytes = status.st_blocks * _BLOCK_BYTES
    if present_bytes < length_bytes:
        # Registering it would have the kernel find the rest, as much as the worker likes to ask.
        raise ConfigError(
            f"the cache's memfd is sparse: {present_bytes} bytes of it are present, the layout "
            f"needs {length_bytes}: {_REMEDY}",
            fields={"present_bytes": str(present_bytes), "needed_bytes": str(length_bytes)},
        )
    try:
        buffer = _map(fd, length_bytes)
    except OSError as error:
        raise ConfigError(
            f"the cache's memfd cannot be mapped writable ({error.strerror}): {_REMEDY}"
        ) from error
    return SharedMemory(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), buffer)


def map_present(
    fd: int, length_bytes: int, offset_bytes: int = 0, *, progress: Progress | None = None
) -> mmap.mmap:
    """A writable mapping of a part of `fd`, every page of it present, not inherited by `fork`.

    Raises: OSError, as the system says it.
    """
    buffer = _map(fd, length_bytes, offset_bytes)
    _prefault(buffer, progress)
    return buffer


def _map(fd: int, length_bytes: int, offset_bytes: int = 0) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    buffer = mmap.mmap(fd, length_bytes, mmap.MAP_SHARED, access, offset=offset_bytes)
    buffer.madvise(mmap.MADV_DONTFORK)
    return buffer


def _prefault(buffer: mmap.mmap, progress: Progress | None) -> None:
    """Touch every page; in slices, since a pool of 100 GiB takes a minute."""
    total = len(buffer)
    for start in range(0, total, limits.PREFAULT_SLICE_BYTES):
        length = min(limits.PREFAULT_SLICE_BYTES, total - start)
        try:
            buffer.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel. The memory is fresh, so writing zeros changes nothing.
            np.frombuffer(buffer, np.uint8)[start : start + length : mmap.PAGESIZE] = 0
        if progress is not None:
            progress(start + length, total)

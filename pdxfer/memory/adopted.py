"""A sealed memfd put under memory that exists: an engine's own tensor, shared later."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

from pdxfer import limits
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.memory.available import check_available
from pdxfer.memory.lengths import whole
from pdxfer.memory.mappings import Mapping, flags_of, mappings
from pdxfer.memory.shared import SEALS, SharedMemory

_PLAIN: Final = frozenset(
    ("rd", "wr", "mr", "mw", "me", "ac", "nr", "sd", "hg", "nh", "mg", "sr", "rr", "dd")
)
"""Flags of a mapping that say nothing about who else has it: access, accounting, huge pages, KSM,
read-ahead, core dumps. Any other is refused: the kernel may know of a user that we do not."""
_TELLING: Final = {
    "lo": "locked (adopt it first, then lock it)",
    "lf": "locked on fault (adopt it first, then lock it)",
    "ht": "made of huge pages of hugetlbfs",
    "dc": "kept out of forked children, as what a device has registered is (adopt it before)",
}
_MAP_POPULATE: Final = 0x8000
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_FAILED: Final = ctypes.c_void_p(-1).value
_REMEDY: Final = (
    "adopt takes whole pages of one private anonymous mapping, such as that of a tensor of more "
    "than 32 MiB; else make the memory with pdxfer.memory.allocate or pdxfer.memory.tensors, or "
    "run the agent inside this process (pdxfer.embedded)"
)


class _AdoptedMemory(SharedMemory):
    """Memory under which a memfd was put.

    Whoever made the memory unmaps it; this object never does.
    """

    def __init__(self, fd: int, address: int, length_bytes: int, owner: object) -> None:
        there = (ctypes.c_ubyte * length_bytes).from_address(address)
        super().__init__(fd, memoryview(there).cast("B"))
        self.owner = owner

    def close(self) -> None:
        """Close the memfd. The memory stays where it is, with its contents. Idempotent."""
        super().close()


def adopt(address: int, length_bytes: int, *, owner: object = None) -> SharedMemory:
    """Put a sealed memfd under memory that exists, so that a daemon can map it too.

    Address and contents stay; every pointer and tensor of this memory goes on as before. What
    another thread writes meanwhile may be lost: call it right after the memory was made, before
    any other thread, child or device has it. (That a device has registered it is not always to be
    seen, and is then not refused.) While it runs the contents are there twice.

    A child forked before keeps its own copy. One forked later does not inherit these pages: where
    it touches them it faults. An allocator that keeps notes in front of what it gives, as malloc
    does, reads them when a child frees that memory, so let such a child end without freeing it, or
    leave the first page out: make the tensor a page larger and adopt what is behind.

    Args:
        address: of the first byte; the start of a page.
        length_bytes: whole pages.
        owner: kept alive as long as the result and ranges of it; the tensor, for example.

    Returns:
        The memory, whose `close` closes the memfd only: the mapping is its maker's, who may free it
        as ever, once nothing moves into it any more.

    Raises:
        ConfigError: not whole pages, a part that is not mapped, several mappings, one that is
            shared, of a file, the heap, a stack, not readable and writable, locked or registered.
        ResourceError: there is not that much memory. After either nothing has changed.
    """
    address, length_bytes = whole("address", address), whole("length_bytes", length_bytes)
    _check_pages(address, length_bytes)
    _check_mapping(address, length_bytes)
    check_available(length_bytes)
    fd = os.memfd_create("pdxfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _fill(fd, address, length_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        _put_under(fd, address, length_bytes)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise _failed(address, length_bytes, error) from error
        raise
    return _AdoptedMemory(fd, address, length_bytes, owner)


def _failed(address: int, length_bytes: int, error: OSError) -> ConfigError | ResourceError:
    where = f"address={address:#x} length_bytes={length_bytes}"
    if error.errno == errno.EFAULT:
        return ConfigError(f"{where}: a page of it cannot be read: {_REMEDY}")
    return ResourceError(f"{where}: cannot put shared memory there: {error.strerror}")


def _check_pages(address: int, length_bytes: int) -> None:
    page = mmap.PAGESIZE
    if address <= 0 or address % page:
        raise ConfigError(
            f"address={address:#x} is not the start of a page of {page} bytes: only whole pages "
            f"can be adopted. The next one starts at {address + -address % page:#x}: make the "
            "memory a page larger than needed and use what is behind that",
            fields={"address": f"{address:#x}", "page_bytes": str(page)},
        )
    if length_bytes <= 0 or length_bytes % page:
        raise ConfigError(
            f"length_bytes={length_bytes} is no whole number of pages of {page} bytes, at least "
            "one: round it up, where the rest of the last page belongs to the same memory",
            fields={"length_bytes": str(length_bytes), "page_bytes": str(page)},
        )


def _check_mapping(address: int, length_bytes: int) -> None:
    """Refuses, by name, what is not one private anonymous mapping of this process alone."""
    end = address + length_bytes
    mapping = next(mappings(address), None)
    if mapping is None or mapping.first > address:
        raise _refused(address, length_bytes, f"nothing is mapped at {address:#x}")
    if why := _why_not(mapping):
        raise _refused(address, length_bytes, why)
    if mapping.end < end:
        raise _refused(
            address,
            length_bytes,
            f"the mapping that it begins in ends at {mapping.end:#x}, {end - mapping.end} bytes "
            "short; behind it comes nothing, or another mapping",
        )
    if why := _why_not_plain(flags_of(address)):
        raise _refused(address, length_bytes, why)


def _why_not_plain(flags: frozenset[str]) -> str:
    """What the kernel marks a mapping as that others may rely on; empty: nothing."""
    for flag, what in _TELLING.items():
        if flag in flags:
            return f"it is {what}"
    strange = sorted(flags - _PLAIN)
    return f"the kernel marks it {' '.join(strange)} (VmFlags)" if strange else ""


def _why_not(mapping: Mapping) -> str:
    """What is wrong with one mapping's kind; empty: nothing."""
    name = mapping.name or "no name"
    if mapping.mode[3] != "p":
        return f"it is a shared mapping ({name}) already"
    if mapping.inode:
        return f"it is a mapping of the file {name}"
    if mapping.name and not mapping.name.startswith("[anon:"):
        return f"it lies in {name}, which others of this process use and which is given out again"
    if mapping.mode[:3] != "rw-":
        return f"its access is {mapping.mode[:3]}, not rw-"
    return ""


def _refused(address: int, length_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"address={address:#x} length_bytes={length_bytes}: {why}: {_REMEDY}",
        fields={"address": f"{address:#x}", "length_bytes": str(length_bytes)},
    )


def _fill(fd: int, address: int, length_bytes: int) -> None:
    """Copy the contents: the kernel reads them, so that a page that is not there is an error."""
    os.ftruncate(fd, length_bytes)
    contents = memoryview((ctypes.c_ubyte * length_bytes).from_address(address)).cast("B")
    done = 0
    while done < length_bytes:
        done += os.pwrite(fd, contents[done : done + limits.PREFAULT_SLICE_BYTES], done)


def _put_under(fd: int, address: int, length_bytes: int) -> None:
    """Map the memfd elsewhere, whole and ready; then move that mapping to `address` at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.mmap, libc.mremap):
        function.restype = ctypes.c_void_p
    size, word, pointer = ctypes.c_size_t(length_bytes), ctypes.c_int, ctypes.c_void_p
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_POPULATE
    mapped = libc.mmap(None, size, word(access), word(kind), word(fd), ctypes.c_long(0))
    if mapped == _FAILED:
        raise _os_error()
    elsewhere = pointer(mapped)
    if libc.madvise(elsewhere, size, word(mmap.MADV_DONTFORK)) == 0:
        how = word(_MREMAP_MAYMOVE | _MREMAP_FIXED)
        if libc.mremap(elsewhere, size, size, how, pointer(address)) == address:
            return
    error = _os_error()
    libc.munmap(elsewhere, size)
    raise error


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))

"""What the kernel has mapped into this process, as /proc tells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps."""

    first: int
    """Address of its first byte."""
    end: int
    """Address behind its last byte."""
    mode: str
    """Four letters: `rwx` or `-` each, then `p` (private) or `s` (shared)."""
    inode: int
    """Inode of the file behind the mapping; 0 where there is no file."""
    name: str
    """Path of the file, or a word of the kernel in brackets; empty: anonymous."""


def mappings(address: int) -> Iterator[Mapping]:
    """The mappings that end behind `address`, in order. It may change while it is read."""
    with _MAPS.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            found = _parsed(line)
            if found.end > address:
                yield found


def flags_of(address: int) -> frozenset[str]:
    """The kernel's two-letter flags (`VmFlags`, proc(5)) of the mapping that an address lies in.

    Empty: nothing is mapped there.
    """
    inside = False
    with _SMAPS.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.split()
            if inside and words[0] == "VmFlags:":
                return frozenset(words[1:])
            if not words[0].endswith(":"):
                mapping = _parsed(line)
                inside = mapping.first <= address < mapping.end
    return frozenset()


def unreadable_at(address: int, length_bytes: int) -> int | None:
    """The first address of a range that this process may not read now; None: it may read all.

    For the text of an error: what the kernel maps may change at any time.
    """
    end = address + length_bytes
    for mapping in mappings(address):
        if mapping.first > address or not mapping.mode.startswith("r"):
            return address
        address = mapping.end
        if address >= end:
            return None
    return address


def _parsed(line: str) -> Mapping:
    span, mode, _, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
    first, _, end = span.partition("-")
    return Mapping(int(first, 16), int(end, 16), mode, int(inode), name[0] if name else "")

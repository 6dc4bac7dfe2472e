"""Entries of unified memory: their padding, and where in a shared buffer live ones begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ROW_ALIGN_BYTES: Final = 16
"""Bytes of which every row of a unified entry is a multiple."""
ENTRY_ALIGN_BYTES: Final = 32
"""Bytes of which every unified entry is a multiple, by padding."""


def entry_bytes(row_bytes: int) -> int:
    """Bytes of a unified entry whose rows have `row_bytes` together: padded to a multiple of 32."""
    return -(-row_bytes // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES


def unified_reserved_bytes(entries: Iterable[tuple[int, int]]) -> int:
    """Bytes at the low end of a shared buffer that no live slot uses.

    Args:    entries: the bytes of an entry and the page size of each group that shares the buffer;
             the page size of a state group is 1.
    """
    return max(entry * page_size for entry, page_size in entries)


def first_free_slot(reserved_bytes: int, entry: int) -> int:
    """The lowest slot that lies above the reserved bytes, where entries have `entry` bytes."""
    return -(-reserved_bytes // entry)

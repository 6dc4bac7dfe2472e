"""Entries of unified memory: their padding, and where in a shared buffer live ones begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ROW_ALIGN_BYTES: Final = 16
"""Every row of a unified entry is a multiple of it."""
ENTRY_ALIGN_BYTES: Final = 32
"""A unified entry is padded to a multiple of it."""


def entry_bytes(row_bytes: int) -> int:
    """Bytes of a unified entry whose rows have `row_bytes` together: padded to 32."""
    return -(-row_bytes // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES


def unified_reserved_bytes(entries: Iterable[tuple[int, int]]) -> int:
    """Bytes at the low end of a shared buffer that no live slot uses.

    Args:    entries: (entry bytes, page size) of each group; 1 is the page size of a state group.
    """
    return max(entry * page_size for entry, page_size in entries)


def first_free_slot(reserved_bytes: int, entry: int) -> int:
    """The lowest slot of a group with entries of `entry` bytes above the reserved ones."""
    return -(-reserved_bytes // entry)

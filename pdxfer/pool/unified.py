"""All layers of a token together, in one raw buffer: SGLang's unified memory since 0.5.22."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout import unified_entries
from pdxfer.layout.builders.draft import fuse_draft
from pdxfer.layout.builders.entries import first_free_slot, unified_reserved_bytes
from pdxfer.pool.kv import KVPool
from pdxfer.pool.refusals import value_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.pool.kv import KVOptions


class UnifiedPool(KVPool):
    """One entry a token: `[K_0|V_0|K_1|V_1|...|draft lanes|pad]`.

    K of layer l is a strided view `[slots, head_num, head_dim]` of the buffer. One region. Ids are
    physical slots; a pool that shares its buffer with others lies in it from byte 0, and who hands
    out slots keeps them apart (`reserved_pages` is the floor).
    """

    kv_cache_layout = "page_major"
    requires_physical_write_loc = True

    @value_errors()
    def __init__(self, *, buffer_bytes: int | None = None, **options: Unpack[KVOptions]) -> None:
        """Make the pool; the arguments are those of `KVPool`.

        Args:    buffer_bytes: of the whole buffer, where several pools share `memory`.
        """
        self._buffer_bytes = buffer_bytes
        super().__init__(**options)

    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        return unified_entries(length_bytes=self._buffer_bytes, **shape)

    def _join_draft(self, target: KVLayout, draft: KVLayout) -> KVLayout:
        return fuse_draft(target, draft)


def share_buffer(
    buffer_bytes: int, entries: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Pages and reserved pages of each pool that lies in one buffer, from its byte 0.

    Args:    entries: by group: bytes of an entry and page size (1 for states).
    Raises:  ConfigError: a buffer with no room for a page above the reserved bytes.
    """
    reserved = unified_reserved_bytes(entries.values())
    shares = {}
    for group, (entry, page_size) in entries.items():
        pages = buffer_bytes // entry // page_size
        floor = -(-first_free_slot(reserved, entry) // page_size)
        if pages <= floor:
            raise ConfigError(
                f"buffer_bytes={buffer_bytes} has {pages} pages for group {group}, of which "
                f"{floor} are reserved"
            )
        shares[group] = (pages, floor)
    return shares

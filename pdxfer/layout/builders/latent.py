"""Builder of layouts of multi-head latent attention, in every order of axes that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout.builders import table
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import latent_shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout


@named
def mla(  # noqa: PLR0913 the shape of a pool
    *,
    layers: Iterable[int],
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    arrangement: str = "token_major",
    reserved_pages: int | None = None,
    group: str = "full",
    model: str = "",
    length_bytes: int | None = None,
) -> KVLayout:
    """Multi-head latent attention: parts `latent` and `rope` in one row, one head on every rank.

    Args:
        layers: global ids of the layers that are here, such as `range(32)`.
        kv_lora_rank: elements of the latent part of a row.
        qk_rope_head_dim: elements of the rope part of a row.
        page_size: tokens of a page.
        pages: pages of the pool, the reserved ones included.
        dtype: name of an element's type, as for `token_major`.
        arrangement: the order of axes: `token_major` (one tensor `[slots, row]` a layer) unless
            given, `page_major`, `unified_entries`, or one of a host pool or of vLLM's blocks;
            `docs/layouts.md` lists them.
        reserved_pages: page ids below this number never travel; None, the default, means 1, and 0
            in the order of a host pool.
        group: name of the group of pages; `full` unless given.
        model: `name@revision`, compared where both sides give it; empty unless given.
        length_bytes: bytes of the whole buffer of `unified_entries`, where several groups share it
            (see `combine`).

    Raises:  ConfigError: a value that no pool has, an arrangement that latent attention does not
             have, an unknown or a missing argument.
    """
    row = table.row_of(arrangement, latent=True)
    shape = latent_shape(
        layers=layers,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        pages=pages,
        dtype=dtype,
        reserved_pages=row.reserved_pages if reserved_pages is None else reserved_pages,
        group=group,
        model=model,
    )
    return row.layout(shape, latent=True, length_bytes=length_bytes)

"""Builder of layouts of keys without values: those of an index beside the main cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout.builders import table
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import kv_shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout


@named
def k_only(  # noqa: PLR0913 the shape of a pool
    *,
    layers: Iterable[int],
    heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    part: str = "index_k",
    heads_total: int | None = None,
    head_first: int = 0,
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> KVLayout:
    """Keys without values, one tensor `[slots, heads, head_dim]` a layer: those of an index.

    An index of one head that every attention TP rank keeps is replicated: its `heads_total` is 1.

    Args:
        layers: global ids of the layers that have an index.
        heads: heads that are here.
        head_dim: elements of a head.
        page_size: tokens of a page.
        pages: pages of the pool, the reserved ones included.
        dtype: name of an element's type, as for `token_major`.
        part: name of the part; `index_k` unless given.
        heads_total: heads of the whole model; None, the default, means `heads`.
        head_first: global number of the first head that is here; 0 unless given.
        reserved_pages: page ids below this number never travel; 1 unless given.
        group: name of the group of pages; `full` unless given.
        model: `name@revision`, compared where both sides give it; empty unless given.

    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    both = kv_shape(
        layers=layers,
        kv_heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        pages=pages,
        dtype=dtype,
        total_kv_heads=heads_total,
        head_first=head_first,
        reserved_pages=reserved_pages,
        group=group,
        model=model,
    )
    return table.ROWS["token_major"].layout(both.renamed({"k": part}))

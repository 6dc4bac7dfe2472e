"""Layouts of keys without values: those of an index beside the main cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import token_major
from pdxfer.layout.builders.parts import select_parts

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
    """One tensor a layer, `[slots, heads, head_dim]`, without values: the keys of an index.

    An index of one head that every attention TP rank keeps is replicated (`heads_total` 1).

    Raises:  ConfigError: a value that no pool has.
    """
    both = token_major(
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
    return select_parts(both, {"k": part})

"""Builders of layouts of keys and values, one for each common order of axes.

All sizes are of one rank: `layers` are global ids (a pipeline stage has fewer), `kv_heads` are the
heads that are here, from global head `head_first` on, of `total_kv_heads`. `pages` counts the
reserved ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from pdxfer.layout.builders import table
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import KVShape, kv_shape

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout


@named
def arranged(
    arrangement: str,
    /,
    *,
    head_groups: int = 1,
    length_bytes: int | None = None,
    **shape: Unpack[KVShape],
) -> KVLayout:
    """Keys and values in any order of axes that has a name, such as `page_head` or `BLHNC`.

    The builders that are called like an order (`token_major`, `page_head`, ...) are this one with
    the name given.

    Args:
        arrangement: a name from `pdxfer.layout.builders.table`; `docs/layouts.md` lists them.
        head_groups: into how many groups `page_unified` divides the heads; 1 unless given.
        length_bytes: bytes of the whole buffer of `unified_entries`, where several groups share it
            (see `combine`); None, the default: as many as its own pages need.
        shape: the arguments of `token_major`. Host orders have `reserved_pages` 0 unless given.

    Raises:  ConfigError: an unknown name, a value that no pool has, an argument that is unknown or
             missing or that this order does not take.
    """
    row = table.row_of(arrangement)
    reserved = shape.get("reserved_pages", row.reserved_pages)
    held: KVShape = {**shape, "reserved_pages": reserved}
    return row.layout(kv_shape(**held), head_groups=head_groups, length_bytes=length_bytes)


@named
def token_major(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values with one tensor `[slots, heads, head_dim]` for each layer and part (NHD).

    Its regions are K of every layer, then V of every layer; an `item_len` is one page of a layer.

    Args:
        layers: global ids of the layers that are here, such as `range(32)`.
        kv_heads: KV heads that are here.
        head_dim: elements of a head of K.
        page_size: tokens of a page.
        pages: pages of the pool, the reserved ones included.
        dtype: name of an element's type: `bfloat16`, `float16`, `float32`, `float8_e4m3fn`,
            `float8_e4m3fnuz`, `float8_e5m2`, `uint8`.
        v_head_dim: elements of a head of V; None, the default, means `head_dim`.
        total_kv_heads: KV heads of the whole model; None, the default, means `kv_heads`.
        head_first: global number of the first head that is here; 0 unless given.
        reserved_pages: page ids below this number never travel; 1 unless given.
        group: name of the group of pages; `full` unless given.
        model: `name@revision`, compared where both sides give it; empty unless given.

    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("token_major", **shape)


@named
def head_major(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values with one tensor `[pages, heads, page_size, head_dim]` a layer and part (HND).

    Its regions are K of every layer, then V of every layer; an `item_len` is one page of a layer.

    Args:    shape: the arguments of `token_major`.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("head_major", **shape)


@named
def page_major(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values with one envelope for each page, all of them in one region.

    An envelope holds the rows of K of the first layer, then those of V, then the next layer; the
    `item_len` is its bytes. `unified_memory` is true and `relayout` is `never`: envelopes move
    whole unless both sides allow that the planner converts.

    Args:    shape: the arguments of `token_major`.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("page_major", **shape)


@named
def unified_entries(*, length_bytes: int | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values with one entry for each token: K and V of every layer, then padding.

    All entries are in one region. A row must be a multiple of 16 bytes; an entry is padded to a
    multiple of 32. `unified_memory` is true and `relayout` is `never`.

    Args:    length_bytes: bytes of the whole buffer, where several groups share it (see `combine`).
             shape: the arguments of `token_major`.
    Raises:  ConfigError: a row that is no multiple of 16 bytes, a value that no pool has, an
             unknown or a missing argument.
    """
    return arranged("unified_entries", length_bytes=length_bytes, **shape)


@named
def layer_first(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values of a host pool with one tensor `[slots, heads, width]` a part and layer.

    Args:    shape: the arguments of `token_major`; `reserved_pages` is 0 unless given.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("layer_first", **shape)


@named
def page_first(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values of a host pool with one tensor `[slots, layers, heads, width]` a part.

    Args:    shape: the arguments of `token_major`; `reserved_pages` is 0 unless given.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("page_first", **shape)


@named
def page_first_direct(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values of a host pool: one tensor `[pages, layers, page_size, heads, width]` a part.

    Args:    shape: the arguments of `token_major`; `reserved_pages` is 0 unless given.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("page_first_direct", **shape)


@named
def page_head(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values of a host pool: one tensor `[pages, heads, page_size, layers, width]` a part.

    Args:    shape: the arguments of `token_major`; `reserved_pages` is 0 unless given.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return arranged("page_head", **shape)


@named
def page_unified(*, head_groups: int = 1, **shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values of a host pool with one envelope for each page, cut into groups of heads.

    One region holds everything: `[pages, head groups, layers, K and V, page_size, heads of the
    group, width]`.

    Args:    head_groups: how many groups there are; must divide the heads that are here.
             shape: the arguments of `token_major`; `reserved_pages` is 0 unless given.
    Raises:  ConfigError: heads that cannot be grouped so, a value that no pool has, an unknown or
             a missing argument.
    """
    return arranged("page_unified", head_groups=head_groups, **shape)

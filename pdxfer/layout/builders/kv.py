"""Builders of the layouts that engines use, from their shapes.

All sizes are of one rank: `layers` are global ids (a pipeline stage has fewer), `kv_heads` the
heads that are here, from global head `head_first` on, of `total_kv_heads`. `pages` counts the
reserved ones. In byte orders H is heads, D head_dim, ps page_size; all are row-major.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, positive
from pdxfer.layout.builders.entries import ROW_ALIGN_BYTES, entry_bytes
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import KVShape, Part, Shape, kv_shape
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.groups import Group
from pdxfer.layout.planes import RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planes import Plane

ARRANGEMENTS: Final = ("token_major", "page_major", "unified_entries")


@named
def token_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One tensor a layer and part, `[slots, H, D]` (NHD).

    Regions, in order: K of every layer, then V of every layer; `item_len` is one page of a layer.

    Args:
        layers: global ids of the layers that are here, such as `range(32)`.
        kv_heads: KV heads that are here.
        head_dim: elements of a head of K.
        page_size: tokens of a page.
        pages: of the pool, the reserved ones included.
        dtype: of an element, by name: `bfloat16`, `float16`, `float32`, `float8_e4m3fn`,
            `float8_e4m3fnuz`, `float8_e5m2`, `uint8`.
        v_head_dim: elements of a head of V; None, the default: `head_dim`.
        total_kv_heads: of the whole model; None, the default: `kv_heads`.
        head_first: global number of the first head that is here; 0 unless given.
        reserved_pages: ids below it never travel; 1 unless given.
        group: name of the group of pages; `full` unless given.
        model: `name@revision`, compared where both sides give it; empty unless given.

    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    return _tensor_per_layer(kv_shape(**shape), head_major=False)


@named
def head_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One tensor a layer and part, `[pages, H, ps, D]` (HND); otherwise as `token_major`."""
    return _tensor_per_layer(kv_shape(**shape), head_major=True)


@named
def page_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One envelope a page: `[K_0: ps rows][V_0: ps rows][K_1: ps rows]...`, in one region.

    `unified_memory` is true and `relayout` is `never`; `item_len` is the bytes of a page.

    Args:    shape: those of `token_major`.
    Raises:  ConfigError: a value that no pool has.
    """
    return _page_envelopes(kv_shape(**shape))


@named
def unified_entries(*, length_bytes: int | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """One entry a token: `[K_0|V_0|K_1|V_1|...|pad]`, in one region.

    Rows must be multiples of 16 bytes; the entry is padded to 32. `unified_memory` is true and
    `relayout` is `never`.

    Args:    length_bytes: of the whole buffer, where several groups share it (see `combine`).
             shape: those of `token_major`.
    Raises:  ConfigError: a row that is no multiple of 16 bytes, or a value that no pool has.
    """
    return _token_entries(kv_shape(**shape), length_bytes)


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
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
    length_bytes: int | None = None,
) -> KVLayout:
    """Multi-head latent attention: parts `latent` and `rope` of one row, one replicated head.

    Args:    kv_lora_rank, qk_rope_head_dim: elements of latent and rope.
             arrangement: `token_major` (one tensor `[slots, latent + rope]` a layer), `page_major`
             or `unified_entries` (one region; rows of a layer together).
             length_bytes: as in `unified_entries`. The others: those of `token_major`.
    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    positive(page_size=page_size, pages=pages)
    if arrangement not in ARRANGEMENTS:
        raise ConfigError(f"arrangement is {arrangement!r}; it must be one of {ARRANGEMENTS}")
    shape = Shape(
        layers=layer_ids(layers),
        parts=mla_parts(kv_lora_rank, qk_rope_head_dim, dtype),
        group=Group(group, page_size, pages, reserved_pages),
        dtype=dtype,
        model=model,
    )
    if arrangement == "page_major":
        return _page_envelopes(shape, one_row=True)
    if arrangement == "unified_entries":
        return _token_entries(shape, length_bytes, one_row=True)
    row = sum(part.row_bytes for part in shape.parts)
    planes = []
    for region, layer in enumerate(shape.layers):
        base = 0
        for part in shape.parts:
            planes.append(
                shape.plane(
                    part,
                    layer,
                    region=region,
                    base=base,
                    page_stride=page_size * row,
                    row_stride=row,
                )
            )
            base += part.row_bytes
    regions = [RegionSpec(pages * page_size * row, page_size * row) for _ in shape.layers]
    return shape.layout(planes, regions, unified=False)


def mla_parts(kv_lora_rank: int, qk_rope_head_dim: int, dtype: str) -> tuple[Part, Part]:
    """Latent and rope of a layer: one head, the same on every rank.

    Raises:  ConfigError: a width below 1 or an unknown dtype.
    """
    positive(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    size = item_bytes(dtype)
    return (
        Part("latent", 1, 1, 0, kv_lora_rank * size),
        Part("rope", 1, 1, 0, qk_rope_head_dim * size),
    )


def _tensor_per_layer(shape: Shape, *, head_major: bool) -> KVLayout:
    planes: list[Plane] = []
    regions: list[RegionSpec] = []
    page_size, pages = shape.group.page_size, shape.group.pages
    for part in shape.parts:
        page = page_size * part.row_bytes
        for layer in shape.layers:
            planes.append(
                shape.plane(
                    part,
                    layer,
                    region=len(regions),
                    base=0,
                    page_stride=page,
                    row_stride=part.cell_bytes if head_major else part.row_bytes,
                    head_stride=page_size * part.cell_bytes if head_major else part.cell_bytes,
                )
            )
            regions.append(RegionSpec(pages * page, page))
    return shape.layout(planes, regions, unified=False)


def _page_envelopes(shape: Shape, *, one_row: bool = False) -> KVLayout:
    """Layer after layer inside a page; `one_row`: the parts of a layer share each row."""
    page_size, pages = shape.group.page_size, shape.group.pages
    layer_row = sum(part.row_bytes for part in shape.parts)
    page = page_size * layer_row * len(shape.layers)
    planes = []
    for number, layer in enumerate(shape.layers):
        base = number * page_size * layer_row
        for part in shape.parts:
            row = layer_row if one_row else part.row_bytes
            planes.append(
                shape.plane(part, layer, region=0, base=base, page_stride=page, row_stride=row)
            )
            base += part.row_bytes * (1 if one_row else page_size)
    return shape.layout(planes, [RegionSpec(pages * page, page)], unified=True)


def _token_entries(shape: Shape, length_bytes: int | None, *, one_row: bool = False) -> KVLayout:
    """Layer after layer inside a token's entry; `one_row`: parts of a layer are one row."""
    page_size, pages = shape.group.page_size, shape.group.pages
    layer_row = sum(part.row_bytes for part in shape.parts)
    rows = (
        {"+".join(p.name for p in shape.parts): layer_row}
        if one_row
        else {part.name: part.row_bytes for part in shape.parts}
    )
    for name, size in rows.items():
        if size % ROW_ALIGN_BYTES:
            raise ConfigError(
                f"a row of {name} has {size} bytes; unified entries need multiples of "
                f"{ROW_ALIGN_BYTES}: use page_major or token_major",
                fields={f"row_bytes of {name}": str(size)},
            )
    entry = entry_bytes(layer_row * len(shape.layers))
    planes = []
    for number, layer in enumerate(shape.layers):
        base = number * layer_row
        for part in shape.parts:
            planes.append(
                shape.plane(
                    part,
                    layer,
                    region=0,
                    base=base,
                    page_stride=page_size * entry,
                    row_stride=entry,
                )
            )
            base += part.row_bytes
    length = pages * page_size * entry if length_bytes is None else length_bytes
    return shape.layout(planes, [RegionSpec(length, page_size * entry)], unified=True)

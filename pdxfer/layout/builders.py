"""Builders of the layouts that engines use, from their shapes.

All sizes are of one rank: `layers` are global ids (a pipeline stage has fewer), `kv_heads` the
heads that are here, from global head `head_first` on, of `total_kv_heads`. `pages` counts the
reserved ones. In byte orders H is heads, D head_dim, ps page_size; all are row-major.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.groups import Group
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

ROW_ALIGN_BYTES: Final = 16
"""Every row of a unified entry is a multiple of it."""
ENTRY_ALIGN_BYTES: Final = 32
"""A unified entry is padded to a multiple of it."""
ARRANGEMENTS: Final = ("token_major", "page_major", "unified_entries")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of one layer: `heads` vectors of `cell_bytes` in every row."""

    name: str
    heads: int
    heads_total: int
    head_first: int
    cell_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.heads * self.cell_bytes


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all builders share."""

    layers: tuple[int, ...]
    parts: tuple[_Part, ...]
    group: Group
    dtype: str
    model: str

    def plane(
        self,
        part: _Part,
        layer: int,
        *,
        region: int,
        base: int,
        page_stride: int,
        row_stride: int,
        head_stride: int | None = None,
    ) -> Plane:
        return Plane(
            group=self.group.name,
            part=part.name,
            layer=layer,
            region=region,
            base=base,
            page_stride=page_stride,
            row_stride=row_stride,
            head_stride=part.cell_bytes if head_stride is None else head_stride,
            head_first=part.head_first,
            heads=part.heads,
            heads_total=part.heads_total,
            cell_bytes=part.cell_bytes,
            rows=self.group.page_size,
            dtype=self.dtype,
        )

    def layout(
        self, planes: Iterable[Plane], regions: Iterable[RegionSpec], *, unified: bool
    ) -> KVLayout:
        return KVLayout(
            groups=(self.group,),
            planes=tuple(planes),
            regions=tuple(regions),
            dtype=self.dtype,
            model=self.model,
            unified_memory=unified,
            relayout="never" if unified else "allow",
        )


def _layer_ids(layers: Iterable[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        raise ConfigError(f"layers is {layers}; it must be the global ids, such as range({layers})")
    ids = tuple(int(layer) for layer in layers)
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise ConfigError(f"layers are {ids[:8]}; distinct ids from 0 are needed")
    return ids


def _positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name} is {value!r}; it must be 1 or more", fields={name: str(value)}
            )


class KVShape(TypedDict):
    """The arguments of the builders of K and V."""

    layers: Iterable[int]
    """Global ids; a pipeline stage gives its own."""
    kv_heads: int
    """Heads that are here."""
    head_dim: int
    v_head_dim: NotRequired[int | None]
    """None: `head_dim`."""
    page_size: int
    """Tokens of a page."""
    pages: int
    """The reserved ones included."""
    dtype: str
    total_kv_heads: NotRequired[int | None]
    """Of the whole model; None: `kv_heads`."""
    head_first: NotRequired[int]
    """Global number of the first head that is here; 0."""
    reserved_pages: NotRequired[int]
    """Ids below it never travel; 1."""
    group: NotRequired[str]
    """`full`."""
    model: NotRequired[str]
    """`name@revision`; empty: not compared."""


def _kv_shape(  # noqa: PLR0913 one per field of KVShape
    *,
    layers: Iterable[int],
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    v_head_dim: int | None = None,
    total_kv_heads: int | None = None,
    head_first: int = 0,
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> _Shape:
    width = head_dim if v_head_dim is None else v_head_dim
    total = kv_heads if total_kv_heads is None else total_kv_heads
    _positive(
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=width,
        total_kv_heads=total,
        page_size=page_size,
        pages=pages,
    )
    if head_first < 0 or head_first + kv_heads > total:
        raise ConfigError(
            f"heads {head_first} to {head_first + kv_heads - 1} are not of total_kv_heads={total}; "
            "give total_kv_heads of the whole model",
            fields={"head_first": str(head_first), "total_kv_heads": str(total)},
        )
    size = item_bytes(dtype)
    return _Shape(
        layers=_layer_ids(layers),
        parts=(
            _Part("k", kv_heads, total, head_first, head_dim * size),
            _Part("v", kv_heads, total, head_first, width * size),
        ),
        group=Group(group, page_size, pages, reserved_pages),
        dtype=dtype,
        model=model,
    )


def token_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One tensor a layer and part, `[slots, H, D]` (NHD).

    Regions, in order: K of every layer, then V of every layer; `item_len` is one page of a layer.

    Args:    shape: see `KVShape`.
    Raises:  ConfigError: a value that no pool has.
    """
    return _tensor_per_layer(_kv_shape(**shape), head_major=False)


def head_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One tensor a layer and part, `[pages, H, ps, D]` (HND); otherwise as `token_major`."""
    return _tensor_per_layer(_kv_shape(**shape), head_major=True)


def page_major(**shape: Unpack[KVShape]) -> KVLayout:
    """One envelope a page: `[K_0: ps rows][V_0: ps rows][K_1: ps rows]...`, in one region.

    `unified_memory` is true and `relayout` is `never`; `item_len` is the bytes of a page.

    Args:    shape: see `KVShape`.
    Raises:  ConfigError: a value that no pool has.
    """
    return _page_envelopes(_kv_shape(**shape))


def unified_entries(*, length_bytes: int | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """One entry a token: `[K_0|V_0|K_1|V_1|...|pad]`, in one region.

    Rows must be multiples of 16 bytes; the entry is padded to 32. `unified_memory` is true and
    `relayout` is `never`.

    Args:    length_bytes: of the whole buffer, where several groups share it (see `combine`).
             shape: see `KVShape`.
    Raises:  ConfigError: a row that is no multiple of 16 bytes, or a value that no pool has.
    """
    return _token_entries(_kv_shape(**shape), length_bytes)


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

    Args:    arrangement: `token_major` (one tensor `[slots, latent + rope]` a layer), `page_major`
             or `unified_entries` (one region; rows of a layer together).
    """
    _positive(
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        pages=pages,
    )
    if arrangement not in ARRANGEMENTS:
        raise ConfigError(f"arrangement is {arrangement!r}; it must be one of {ARRANGEMENTS}")
    size = item_bytes(dtype)
    shape = _Shape(
        layers=_layer_ids(layers),
        parts=(
            _Part("latent", 1, 1, 0, kv_lora_rank * size),
            _Part("rope", 1, 1, 0, qk_rope_head_dim * size),
        ),
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


def _tensor_per_layer(shape: _Shape, *, head_major: bool) -> KVLayout:
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


def _page_envelopes(shape: _Shape, *, one_row: bool = False) -> KVLayout:
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


def _token_entries(shape: _Shape, length_bytes: int | None, *, one_row: bool = False) -> KVLayout:
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

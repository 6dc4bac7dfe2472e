"""Layouts made out of layouts: parts kept, renamed, added to a group, fused into its entries.

With them a pool of several tensors a layer stays one layout of one group: keys of an index beside
the main pool, block scales beside quantised rows, lanes of a draft model behind the target's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders import entry_bytes, token_major
from pdxfer.layout.groups import Group
from pdxfer.layout.keywords import named
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import RegionSpec
from pdxfer.layout.shapes import positive
from pdxfer.layout.tiles import as_tile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdxfer.layout.shapes import KVShape

SCALE_BLOCK: Final = 32
"""Elements that share one scale byte (UE8M0) of an MXFP8 row."""
INTERLEAVED_PAGE_SIZE: Final = 128
"""The page size whose scales kernels read interleaved."""
MXFP8_TILE: Final = "mxfp8_interleaved_32"
"""Scales of a page and head, `[32, page_size / 32, blocks]`: token o is at
`(o % 32) * (page_size / 32) + o / 32`."""
DRAFT: Final = "draft."
"""Begins the part names of a draft model's lanes."""


def select_parts(layout: KVLayout, names: Mapping[str, str]) -> KVLayout:
    """The parts of `layout` that are keys of `names`, under the names they map to.

    Regions without a plane left are dropped; the order of the others stays.

    Raises:  ConfigError: a part that the layout lacks.
    """
    missing = names.keys() - {plane.part for plane in layout.planes}
    if missing:
        raise ConfigError(f"the layout has no part {min(missing)!r}")
    planes = [plane for plane in layout.planes if plane.part in names]
    number = {old: new for new, old in enumerate(sorted({plane.region for plane in planes}))}
    return dataclasses.replace(
        layout,
        planes=tuple(
            dataclasses.replace(plane, part=names[plane.part], region=number[plane.region])
            for plane in planes
        ),
        regions=tuple(layout.regions[old] for old in number),
    )


def join_parts(*layouts: KVLayout) -> KVLayout:
    """One layout of one group whose parts lie in several: the same page ids stand for all of them.

    Args:    layouts: each of one group, the same in all; no part of a layer in two of them.
    Returns: its regions are theirs in order; dtype, model, `unified_memory` and `relayout` are the
             first one's, but `never` where one says so.
    Raises:  ConfigError: groups that differ, a part twice.
    """
    first = layouts[0]
    planes, regions = list(first.planes), list(first.regions)
    for layout in layouts[1:]:
        if layout.groups != first.groups or len(layout.groups) != 1:
            raise ConfigError(
                f"parts of groups {layout.groups} cannot join group {first.groups}; name, page "
                "size, pages and reserved pages must be equal"
            )
        twice = {plane.key for plane in planes} & {plane.key for plane in layout.planes}
        if twice:
            raise ConfigError(f"part {min(twice)[1]} of layer {min(twice)[2]} is there twice")
        planes += (
            dataclasses.replace(plane, region=plane.region + len(regions))
            for plane in layout.planes
        )
        regions += layout.regions
    strict = any(layout.relayout == "never" for layout in layouts)
    return dataclasses.replace(
        first,
        planes=tuple(planes),
        regions=tuple(regions),
        relayout="never" if strict else "allow",
    )


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


@named
def mxfp8(*, interleaved: bool | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """MXFP8 rows as `token_major`, and one scale byte for each 32 elements of a head.

    Regions: K, V, then `k_scale` and `v_scale` of every layer. Flat scales are token rows
    `[slots, H, D / 32]`; interleaved ones opaque tiles a page and head.

    Args:    interleaved: None: where `page_size` is 128, as kernels read them.
             shape: those of `token_major`; `dtype` is of the rows.
    Raises:  ConfigError: a head dim that 32 does not divide, tiles of another page size, or a value
             that no pool has.
    """
    widths = {"head_dim": shape["head_dim"], "v_head_dim": shape.get("v_head_dim")}
    for name, width in widths.items():
        if width is None:
            continue
        positive(**{name: width})
        if width % SCALE_BLOCK:
            raise ConfigError(
                f"MXFP8 KV cache requires {name} divisible by {SCALE_BLOCK}, got {width}.",
                fields={name: str(width)},
            )
    rows = token_major(**shape)
    v_width = widths["v_head_dim"]
    scale_shape: KVShape = {**shape, "dtype": "uint8", "head_dim": shape["head_dim"] // SCALE_BLOCK}
    scale_shape["v_head_dim"] = None if v_width is None else v_width // SCALE_BLOCK
    scales = select_parts(token_major(**scale_shape), {"k": "k_scale", "v": "v_scale"})
    if interleaved or (interleaved is None and shape["page_size"] == INTERLEAVED_PAGE_SIZE):
        scales = _as_tiles(scales)
    return join_parts(rows, scales)


def _as_tiles(scales: KVLayout) -> KVLayout:
    """Flat scales as one tile a page and head, in the same regions."""
    page_size = scales.groups[0].page_size
    if page_size % SCALE_BLOCK:
        raise ConfigError(
            f"page_size={page_size}: interleaved scales need a multiple of {SCALE_BLOCK}",
            fields={"page_size": str(page_size)},
        )
    planes = tuple(as_tile(plane, page_size, MXFP8_TILE) for plane in scales.planes)
    return dataclasses.replace(scales, planes=planes)


def fuse_draft(target: KVLayout, draft: KVLayout) -> KVLayout:
    """`unified_entries` with the lanes of a draft model behind the target's, in the same entry.

    Args:    target, draft: `unified_entries` of the same group; layers of the draft are other ids.
    Returns: parts `draft.k`, `draft.v`; the entry is padded to 32 bytes again.
    Raises:  ConfigError: groups that differ, a layer that both have, no unified entries.
    """
    for name, layout in (("target", target), ("draft", draft)):
        if len(layout.regions) != 1 or {p.page_stride for p in layout.planes} != {
            layout.groups[0].page_size * layout.planes[0].row_stride
        }:
            raise ConfigError(f"the {name} layout has no unified entries")
    if target.groups != draft.groups:
        raise ConfigError(f"draft lanes of group {draft.groups} cannot join {target.groups}")
    both = set(target.layers) & set(draft.layers)
    if both:
        raise ConfigError(f"layer {min(both)} is the target's and the draft's")
    group = target.groups[0]
    used, more = (
        max(p.base + p.heads * p.head_stride for p in layout.planes) for layout in (target, draft)
    )
    entry = entry_bytes(used + more)
    page = group.page_size * entry
    planes = [*target.planes]
    planes += (
        dataclasses.replace(plane, part=DRAFT + plane.part, base=used + plane.base)
        for plane in draft.planes
    )
    length = target.regions[0].length_bytes
    if length == group.pages * target.regions[0].item_len:
        length = group.pages * page
    return dataclasses.replace(
        target,
        planes=tuple(dataclasses.replace(p, row_stride=entry, page_stride=page) for p in planes),
        regions=(RegionSpec(length, page),),
    )


def beside_draft(target: KVLayout, draft: KVLayout) -> KVLayout:
    """`target` with the regions of a draft model after its own, as parts `draft.k`, `draft.v`."""
    names = {plane.part: DRAFT + plane.part for plane in draft.planes}
    return join_parts(target, select_parts(draft, names))


def only_group(layout: KVLayout) -> Group:
    """The group of a layout that has one.

    Raises:  ConfigError: it has several.
    """
    if len(layout.groups) != 1:
        raise ConfigError(
            f"the layout has {len(layout.groups)} groups ({', '.join(layout.group_by_name)}); one "
            "is needed"
        )
    return layout.groups[0]

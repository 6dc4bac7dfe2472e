"""Layouts of a target model with those of its draft model: fused into entries, or beside them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.entries import entry_bytes
from pdxfer.layout.builders.parts import join_parts, select_parts
from pdxfer.layout.planes import RegionSpec

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout

DRAFT: Final = "draft."
"""What the names of the parts of a draft model begin with."""


def fuse_draft(target: KVLayout, draft: KVLayout) -> KVLayout:
    """Unified entries that hold the rows of a target model and, behind them, those of its draft.

    Args:    target, draft: layouts that `unified_entries` made, of the same group; the layers of
             the draft have other ids than those of the target.
    Returns: the layout of the target with the parts `draft.k` and `draft.v` besides; an entry is
             padded to a multiple of 32 bytes again.
    Raises:  ConfigError: groups that differ, a layer that both have, layouts of another kind.
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
    """The layout of a target model, and that of its draft as parts `draft.k` and `draft.v`."""
    names = {plane.part: DRAFT + plane.part for plane in draft.planes}
    return join_parts(target, select_parts(draft, names))

"""Layouts of several groups, made out of layouts of one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout.kv_layout import KVLayout

if TYPE_CHECKING:
    from pdxfer.layout.planes import Plane, RegionSpec


def combine(*layouts: KVLayout, one_region: bool = False) -> KVLayout:
    """One layout that holds the groups of several, in the order given.

    Args:    layouts: layouts whose groups have distinct names. one_region: whether all of them
             share one buffer instead of having memory of their own; every layout then has one
             region, of the same length, which starts at byte 0 of the buffer, and the allocator of
             the groups sees to it that their live pages lie apart.
    Returns: a layout with the regions of all in order (or the one shared); its `unified_memory` is
             true where it is in all of them, its `relayout` is `never` where one of them says so,
             its model is the one that any of them names.
    Raises:  ConfigError: no layout, a group twice, two models, regions that cannot be shared.
    """
    if not layouts:
        raise ConfigError("combine needs at least one layout")
    models = sorted({layout.model for layout in layouts if layout.model})
    if len(models) > 1:
        raise ConfigError(f"combine got layouts of two models: {models[0]} and {models[1]}")
    regions: tuple[RegionSpec, ...]
    if one_region:
        regions = (_shared_region(layouts),)
        planes = tuple(plane for layout in layouts for plane in layout.planes)
    else:
        planes, regions = _side_by_side(layouts)
    return KVLayout(
        groups=tuple(group for layout in layouts for group in layout.groups),
        planes=planes,
        regions=regions,
        dtype=layouts[0].dtype,
        model=models[0] if models else "",
        unified_memory=all(layout.unified_memory for layout in layouts),
        relayout="never" if any(x.relayout == "never" for x in layouts) else "allow",
    )


def _shared_region(layouts: tuple[KVLayout, ...]) -> RegionSpec:
    for layout in layouts:
        if len(layout.regions) != 1:
            raise ConfigError(f"one_region: a layout has {len(layout.regions)} regions, not one")
    lengths = sorted({layout.regions[0].length_bytes for layout in layouts})
    if len(lengths) > 1:
        raise ConfigError(
            f"one_region: buffers of {lengths[0]} and {lengths[1]} bytes; give every builder the "
            "length_bytes of the shared one"
        )
    return layouts[0].regions[0]


def _side_by_side(
    layouts: tuple[KVLayout, ...],
) -> tuple[tuple[Plane, ...], tuple[RegionSpec, ...]]:
    planes: list[Plane] = []
    regions: list[RegionSpec] = []
    for layout in layouts:
        first = len(regions)
        planes += (
            dataclasses.replace(plane, region=plane.region + first) for plane in layout.planes
        )
        regions += layout.regions
    return tuple(planes), tuple(regions)

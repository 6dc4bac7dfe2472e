"""Layouts made out of layouts: parts kept, renamed, added to a group.

With them a pool of several tensors a layer stays one layout of one group: keys of an index beside
the main pool, block scales beside quantised rows, lanes of a draft model behind the target's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout.groups import Group
from pdxfer.layout.kv_layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Mapping


def select_parts(layout: KVLayout, names: Mapping[str, str]) -> KVLayout:
    """A layout of some parts of another one, under other names.

    Regions in which no plane is left are dropped; the others keep their order.

    Args:    names: the new name of each part that stays, by its name in `layout`.
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
    """One layout of one group whose parts come from several: one page id stands for all of them.

    Args:    layouts: layouts of one and the same group; no part of a layer is in two of them.
    Returns: a layout with the regions of all in order; its dtype, model and `unified_memory` are
             those of the first, its `relayout` is `never` where one of them says so.
    Raises:  ConfigError: groups that differ, or a part of a layer that is in two of them.
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


def only_group(layout: KVLayout) -> Group:
    """The group of a layout that has exactly one.

    Raises:  ConfigError: the layout has several; the text names them.
    """
    if len(layout.groups) != 1:
        raise ConfigError(
            f"the layout has {len(layout.groups)} groups ({', '.join(layout.group_by_name)}); one "
            "is needed"
        )
    return layout.groups[0]

"""What every layout must hold, checked once when it is made."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.errors import ConfigError
from pdxfer.layout import groups as group_kinds
from pdxfer.layout import planes as row_kinds
from pdxfer.layout.dtypes import item_bytes

if TYPE_CHECKING:
    from pdxfer.layout.byte_map import ByteMap
    from pdxfer.layout.groups import Group
    from pdxfer.layout.planes import Plane

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MODEL_CHARACTERS_MAX: Final = 512
_INT_END: Final = 1 << 63
RELAYOUT: Final = ("allow", "never")


def check_layout(layout: ByteMap) -> None:
    """Refuse a layout whose map is not sound.

    Raises:  ConfigError: a value that breaks a rule; the text names both.
    """
    _check_counts(layout)
    item_bytes(layout.dtype)
    if layout.relayout not in RELAYOUT:
        raise ConfigError(f"relayout is {layout.relayout!r}; it must be one of {RELAYOUT}")
    if not isinstance(layout.model, str):
        raise ConfigError(f"model is {layout.model!r}; it must be a name, as in name@revision")
    if len(layout.model) > _MODEL_CHARACTERS_MAX:
        raise ConfigError(f"model has over {_MODEL_CHARACTERS_MAX} characters")
    by_name: dict[str, Group] = {}
    for group in layout.groups:
        _check_group(group)
        if group.name in by_name:
            raise ConfigError(f"group {group.name} appears twice")
        by_name[group.name] = group
    for at, region in enumerate(layout.regions):
        _check_number(region.length_bytes, f"regions[{at}].length_bytes", 1)
        _check_number(region.item_len, f"regions[{at}].item_len", 1)
    for plane in layout.planes:
        _check_plane(plane, by_name, layout)
    _check_heads(layout)


def _check_counts(layout: ByteMap) -> None:
    for name, count, limit in (
        ("groups", len(layout.groups), limits.GROUPS_MAX),
        ("planes", len(layout.planes), limits.PLANES_MAX),
        ("regions", len(layout.regions), limits.REGIONS_MAX),
    ):
        if not 1 <= count <= limit:
            raise ConfigError(f"the layout has {count} {name}; 1 to {limit} are allowed")


def _check_number(value: int, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be an int")
    if not least <= value < _INT_END:
        raise ConfigError(f"{name} is {value}; {least} <= {name} < 2**63 must hold")


def _check_name(value: str, name: str) -> None:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise ConfigError(
            f"{name} is {repr(value)[:80]}; 1 to 64 letters, digits, dots, dashes, underscores"
        )


def _check_group(group: Group) -> None:
    _check_name(group.name, "group name")
    where = f"group {group.name}"
    if group.kind not in (group_kinds.TOKEN, group_kinds.STATE):
        raise ConfigError(f"kind of {where} is {group.kind!r}; it must be token or state")
    _check_number(group.page_size, f"page_size of {where}", 1)
    _check_number(group.pages, f"pages of {where}", 1)
    _check_number(group.reserved_pages, f"reserved_pages of {where}", 0)
    if group.reserved_pages > group.pages:
        raise ConfigError(
            f"{where} has {group.pages} pages and reserves {group.reserved_pages} of them"
        )
    if group.kind == group_kinds.STATE and group.page_size != 1:
        raise ConfigError(f"{where} holds states; its page_size is {group.page_size}, must be 1")


def _check_plane(plane: Plane, groups: dict[str, Group], layout: ByteMap) -> None:
    _check_name(plane.part, "part")
    where = f"plane {plane.group}/{plane.part}/{plane.layer}"
    group = groups.get(plane.group)
    if group is None:
        raise ConfigError(f"{where} is of no group of the layout")
    for name, least in (
        ("layer", 0), ("region", 0), ("base", 0), ("page_stride", 0), ("row_stride", 0),
        ("head_stride", 0), ("head_first", 0), ("heads", 1), ("heads_total", 1),
        ("cell_bytes", 1), ("rows", 1),
    ):  # fmt: skip
        _check_number(getattr(plane, name), f"{name} of {where}", least)
    item_bytes(plane.dtype)
    if plane.head_end > plane.heads_total:
        raise ConfigError(
            f"{where} holds heads {plane.head_first} to {plane.head_end - 1} "
            f"of {plane.heads_total} (total_kv_heads)"
        )
    _check_rows(plane, group, where)
    _check_extent(plane, group, layout, where)


def _check_rows(plane: Plane, group: Group, where: str) -> None:
    allowed = {
        group_kinds.TOKEN: (row_kinds.TOKEN, row_kinds.TILE),
        group_kinds.STATE: (row_kinds.WHOLE,),
    }[group.kind]
    if plane.row_kind not in allowed:
        raise ConfigError(
            f"row_kind of {where} is {plane.row_kind!r}; a {group.kind} group has {allowed}"
        )
    if (plane.row_kind == row_kinds.TILE) != bool(plane.tile):
        raise ConfigError(f"{where} is a tile without a name, or has a tile name and is none")
    if plane.tile:
        _check_name(plane.tile, f"tile of {where}")
    rows = {row_kinds.TOKEN: group.page_size, row_kinds.TILE: 1}.get(plane.row_kind, plane.rows)
    if plane.rows != rows:
        raise ConfigError(f"{where} has {plane.rows} rows; {rows} are needed")


def _check_extent(plane: Plane, group: Group, layout: ByteMap, where: str) -> None:
    """Refuse cells outside of the region, and cells of the plane that share a byte."""
    axes = sorted(
        (stride, count)
        for stride, count in (
            (plane.page_stride, group.pages),
            (plane.row_stride, plane.rows),
            (plane.head_stride, plane.heads),
        )
        if count > 1
    )
    extent = plane.cell_bytes
    for stride, count in axes:
        if stride < extent:
            raise ConfigError(
                f"cells of {where} overlap: a stride of {stride} bytes steps over {extent}"
            )
        extent += stride * (count - 1)
    if plane.region >= len(layout.regions):
        raise ConfigError(
            f"{where} is in region {plane.region}; there are {len(layout.regions)} regions"
        )
    length = layout.regions[plane.region].length_bytes
    if plane.base + extent > length:
        raise ConfigError(
            f"{where} ends at byte {plane.base + extent} of region {plane.region}, "
            f"which has {length}"
        )


def _check_heads(layout: ByteMap) -> None:
    """Refuse head ranges of one (group, part, layer) that overlap or have different totals."""
    for (group, part, layer), planes in layout.planes_by_key.items():
        where = f"group {group}, part {part}, layer {layer}"
        for before, after in itertools.pairwise(planes):
            if before.head_end > after.head_first:
                raise ConfigError(f"{where}: two planes hold head {after.head_first}")
        if len({(p.heads_total, p.cell_bytes, p.row_kind, p.tile, p.dtype) for p in planes}) > 1:
            raise ConfigError(f"{where}: its planes differ in more than place and heads")

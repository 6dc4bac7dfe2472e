"""The wire form of a layout: plain values, a plane as one list.

{groups: [{name, kind, page_size, pages, reserved_pages}], planes: [[group index, part, layer,
 region, base, page_stride, row_stride, head_stride, head_first, heads, heads_total, cell_bytes,
 rows, dtype, row_kind, tile]], regions: [[length_bytes, item_len]], dtype, model,
 unified_memory, relayout}
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypedDict

from pdxfer import limits
from pdxfer.errors import ConfigError, RemoteProtocolError
from pdxfer.layout.groups import Group
from pdxfer.layout.planes import Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdxfer.layout.byte_map import ByteMap

_PLANE_FIELDS: Final = (
    ("part", str),
    ("layer", int),
    ("region", int),
    ("base", int),
    ("page_stride", int),
    ("row_stride", int),
    ("head_stride", int),
    ("head_first", int),
    ("heads", int),
    ("heads_total", int),
    ("cell_bytes", int),
    ("rows", int),
    ("dtype", str),
    ("row_kind", str),
    ("tile", str),
)


class LayoutFields(TypedDict):
    """The arguments of a `KVLayout`."""

    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    regions: tuple[RegionSpec, ...]
    dtype: str
    model: str
    unified_memory: bool
    relayout: str


def to_wire(layout: ByteMap) -> dict[str, object]:
    """`layout` as plain values."""
    index = {group.name: number for number, group in enumerate(layout.groups)}
    return {
        "groups": [
            {
                "name": group.name,
                "kind": group.kind,
                "page_size": group.page_size,
                "pages": group.pages,
                "reserved_pages": group.reserved_pages,
            }
            for group in layout.groups
        ],
        "planes": [
            [index[plane.group], *(getattr(plane, name) for name, _ in _PLANE_FIELDS)]
            for plane in layout.planes
        ],
        "regions": [[region.length_bytes, region.item_len] for region in layout.regions],
        "dtype": layout.dtype,
        "model": layout.model,
        "unified_memory": layout.unified_memory,
        "relayout": layout.relayout,
    }


def parse(obj: object) -> LayoutFields:
    """The typed fields of a layout that came from a peer; values are not judged yet."""
    groups = tuple(
        _parse_group(item, f"layout.groups[{at}]")
        for at, item in enumerate(_list(obj, "groups", limits.GROUPS_MAX))
    )
    planes = tuple(
        _parse_plane(item, f"layout.planes[{at}]", groups)
        for at, item in enumerate(_list(obj, "planes", limits.PLANES_MAX))
    )
    regions = tuple(
        _parse_region(item, f"layout.regions[{at}]")
        for at, item in enumerate(_list(obj, "regions", limits.REGIONS_MAX))
    )
    return LayoutFields(
        groups=groups,
        planes=planes,
        regions=regions,
        dtype=_string(_field(obj, "dtype", "layout"), "layout.dtype"),
        model=_string(_field(obj, "model", "layout"), "layout.model"),
        unified_memory=_boolean(_field(obj, "unified_memory", "layout"), "layout.unified_memory"),
        relayout=_string(_field(obj, "relayout", "layout"), "layout.relayout"),
    )


@contextmanager
def as_remote_error() -> Iterator[None]:
    """What is a wrong argument here is a protocol error when a peer sent it."""
    try:
        yield
    except ConfigError as error:
        raise RemoteProtocolError(f"layout: {error}", fields=error.fields) from error


def _parse_group(item: object, where: str) -> Group:
    return Group(
        name=_string(_field(item, "name", where), f"{where}.name"),
        kind=_string(_field(item, "kind", where), f"{where}.kind"),
        page_size=_integer(_field(item, "page_size", where), f"{where}.page_size"),
        pages=_integer(_field(item, "pages", where), f"{where}.pages"),
        reserved_pages=_integer(_field(item, "reserved_pages", where), f"{where}.reserved_pages"),
    )


def _parse_plane(item: object, where: str, groups: tuple[Group, ...]) -> Plane:
    if not isinstance(item, list | tuple) or len(item) != len(_PLANE_FIELDS) + 1:
        raise RemoteProtocolError(f"{where} is no list of {len(_PLANE_FIELDS) + 1} values")
    group = _integer(item[0], f"{where}.group")
    if group >= len(groups):
        raise RemoteProtocolError(f"{where}.group is {group}; there are {len(groups)} groups")
    integers: dict[str, int] = {}
    strings: dict[str, str] = {}
    for value, (name, kind) in zip(item[1:], _PLANE_FIELDS, strict=True):
        if kind is int:
            integers[name] = _integer(value, f"{where}.{name}")
        else:
            strings[name] = _string(value, f"{where}.{name}")
    return Plane(
        group=groups[group].name,
        part=strings["part"],
        layer=integers["layer"],
        region=integers["region"],
        base=integers["base"],
        page_stride=integers["page_stride"],
        row_stride=integers["row_stride"],
        head_stride=integers["head_stride"],
        head_first=integers["head_first"],
        heads=integers["heads"],
        heads_total=integers["heads_total"],
        cell_bytes=integers["cell_bytes"],
        rows=integers["rows"],
        dtype=strings["dtype"],
        row_kind=strings["row_kind"],
        tile=strings["tile"],
    )


def _parse_region(item: object, where: str) -> RegionSpec:
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise RemoteProtocolError(f"{where} is no pair of length_bytes and item_len")
    return RegionSpec(
        length_bytes=_integer(item[0], f"{where}.length_bytes"),
        item_len=_integer(item[1], f"{where}.item_len"),
    )


def _field(obj: object, name: str, where: str) -> object:
    if not isinstance(obj, dict):
        raise RemoteProtocolError(f"{where} is no map")
    if name not in obj:
        raise RemoteProtocolError(f"{where}.{name} is missing")
    value: object = obj[name]
    return value


def _list(obj: object, name: str, limit: int) -> list[object]:
    value = _field(obj, name, "layout")
    if not isinstance(value, list | tuple):
        raise RemoteProtocolError(f"layout.{name} is no list")
    if len(value) > limit:
        raise RemoteProtocolError(f"layout.{name} has {len(value)} entries; at most {limit}")
    return list(value)


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise RemoteProtocolError(f"{where} is {_short(value)}; an int of 0 to 2**63-1 is needed")
    return value


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{where} is {_short(value)}; a string is needed")
    return value


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise RemoteProtocolError(f"{where} is {_short(value)}; a boolean is needed")
    return value


def _short(value: object) -> str:
    return repr(value)[:80]

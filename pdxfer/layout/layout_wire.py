"""The wire form of a layout: plain values, a plane as one list.

{groups: [{name, page_size, pages, reserved_pages, kind}], planes: [[group index, part, layer,
 region, base, page_stride, row_stride, head_stride, head_first, heads, heads_total, cell_bytes,
 rows, dtype, row_kind, tile]], regions: [[length_bytes, item_len]], dtype, model,
 unified_memory, relayout}
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict, TypeVar

from pdxfer import limits
from pdxfer.errors import ConfigError, RemoteProtocolError
from pdxfer.layout import records
from pdxfer.layout.groups import Group
from pdxfer.layout.planes import Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdxfer.layout.byte_map import ByteMap


Value = TypeVar("Value")


class LayoutFields(TypedDict):
    """The arguments that a `KVLayout` is made from."""

    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    regions: tuple[RegionSpec, ...]
    dtype: str
    model: str
    unified_memory: bool
    relayout: str


def to_wire(layout: ByteMap) -> dict[str, object]:
    """A layout as maps, lists, strings, ints and booleans."""
    index = {group.name: number for number, group in enumerate(layout.groups)}
    return {
        "groups": [records.as_map(group) for group in layout.groups],
        # a plane begins with its group, for which its number stands
        "planes": [[index[plane.group], *records.as_list(plane)[1:]] for plane in layout.planes],
        "regions": [records.as_list(region) for region in layout.regions],
        "dtype": layout.dtype,
        "model": layout.model,
        "unified_memory": layout.unified_memory,
        "relayout": layout.relayout,
    }


def parse(obj: object) -> LayoutFields:
    """The fields of a layout that came from a peer: their types are checked, their values not.

    Raises:  RemoteProtocolError: a missing field, a wrong type, or more than a limit allows.
    """
    groups = tuple(
        records.from_map(Group, item, f"layout.groups[{at}]")
        for at, item in enumerate(_list(obj, "groups", limits.GROUPS_MAX))
    )
    planes = tuple(
        _plane(item, f"layout.planes[{at}]", groups)
        for at, item in enumerate(_list(obj, "planes", limits.PLANES_MAX))
    )
    regions = tuple(
        records.from_list(RegionSpec, item, f"layout.regions[{at}]")
        for at, item in enumerate(_list(obj, "regions", limits.REGIONS_MAX))
    )
    return LayoutFields(
        groups=groups,
        planes=planes,
        regions=regions,
        dtype=_value(obj, "dtype", str),
        model=_value(obj, "model", str),
        unified_memory=_value(obj, "unified_memory", bool),
        relayout=_value(obj, "relayout", str),
    )


@contextmanager
def as_remote_error() -> Iterator[None]:
    """Raise wrong arguments inside of this context as protocol errors, since a peer sent them."""
    try:
        yield
    except ConfigError as error:
        raise RemoteProtocolError(f"layout: {error}", fields=error.fields) from error


def _plane(item: object, where: str, groups: tuple[Group, ...]) -> Plane:
    if not isinstance(item, list | tuple) or not item:
        raise RemoteProtocolError(f"{where} is no list of the values of a plane")
    number = records.checked(item[0], int, f"{where}.group")
    if number >= len(groups):
        raise RemoteProtocolError(f"{where}.group is {number}; there are {len(groups)} groups")
    return records.from_list(Plane, [groups[number].name, *item[1:]], where)


def _list(obj: object, name: str, limit: int) -> list[object]:
    value = records.value_of(obj, name, "layout")
    if not isinstance(value, list | tuple):
        raise RemoteProtocolError(f"layout.{name} is no list")
    if len(value) > limit:
        raise RemoteProtocolError(f"layout.{name} has {len(value)} entries; at most {limit}")
    return list(value)


def _value(obj: object, name: str, kind: type[Value]) -> Value:
    value: Value = records.checked(records.value_of(obj, name, "layout"), kind, f"layout.{name}")
    return value

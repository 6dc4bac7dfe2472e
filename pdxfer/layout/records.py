"""Records as plain values and back: the fields are those of the dataclass, none is copied by hand.

A record is a flat dataclass of ints, strings, booleans and floats. On the wire it is a list of its
values in the order of its fields, or a map by their names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_type_hints

from pdxfer.errors import RemoteProtocolError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)

_INT_END: Final = 1 << 63


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _INT_END


def _is_float(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else _is_int(value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What tells the values of one type from others, and what they are called."""

    matches: Callable[[object], bool]
    called: str

    def refused(self, value: object, where: str) -> RemoteProtocolError:
        """What to raise of a value that does not match."""
        return RemoteProtocolError(f"{where} is {repr(value)[:80]}; {self.called} is needed")


_KINDS: Final[dict[type, _Kind]] = {
    int: _Kind(_is_int, "an int of 0 to 2**63-1"),
    str: _Kind(lambda value: isinstance(value, str), "a string"),
    bool: _Kind(lambda value: isinstance(value, bool), "a boolean"),
    float: _Kind(_is_float, "a finite number"),
}


def as_list(record: DataclassInstance) -> list[object]:
    """The values of a record, in the order of its fields."""
    return [getattr(record, name) for name, _ in _fields(type(record))]


def as_map(record: DataclassInstance) -> dict[str, object]:
    """The values of a record by the names of its fields."""
    return {name: getattr(record, name) for name, _ in _fields(type(record))}


def from_list(kind: type[Record], item: object, where: str) -> Record:
    """The record that a peer sent as a list.

    Args:    where: what errors call the record.
    Raises:  RemoteProtocolError: no list of as many values, or a value of another type.
    """
    fields = _fields(kind)
    if not isinstance(item, list | tuple) or len(item) != len(fields):
        names = ", ".join(name for name, _ in fields)
        raise RemoteProtocolError(f"{where} is no list of {len(fields)} values ({names})")
    for (name, field), value in zip(fields, item, strict=True):
        if not field.matches(value):
            raise field.refused(value, f"{where}.{name}")
    return kind(*item)


def from_map(kind: type[Record], item: object, where: str) -> Record:
    """The record that a peer sent as a map; keys of a later version are left alone.

    Args:    where: what errors call the record.
    Raises:  RemoteProtocolError: no map, a field that is missing, or a value of another type.
    """
    values = [value_of(item, name, where) for name, _ in _fields(kind)]
    return from_list(kind, values, where)


def value_of(item: object, name: str, where: str) -> object:
    """The value of one key of a map that a peer sent.

    Raises:  RemoteProtocolError: no map, or no such key.
    """
    if not isinstance(item, Mapping):
        raise RemoteProtocolError(f"{where} is no map")
    if name not in item:
        raise RemoteProtocolError(f"{where}.{name} is missing")
    return item[name]


def checked(value: object, kind: type, where: str) -> Any:  # noqa: ANN401 a value of that type
    """The value, which must be of the type.

    Raises:  RemoteProtocolError: it is of another, or an int outside of 0 to 2**63-1.
    """
    field = _KINDS[kind]
    if not field.matches(value):
        raise field.refused(value, where)
    return value


@cache
def _fields(kind: type[DataclassInstance]) -> tuple[tuple[str, _Kind], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _KINDS[hints[field.name]]) for field in dataclasses.fields(kind))

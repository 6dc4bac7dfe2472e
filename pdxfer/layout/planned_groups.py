"""What a plan matches: pairs of planes, and the groups that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdxfer.layout import planes as row_kinds

if TYPE_CHECKING:
    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planes import Plane

_ROW_KINDS: Final = {row_kinds.TOKEN: 0, row_kinds.WHOLE: 1, row_kinds.TILE: 2}


@dataclass(frozen=True, slots=True)
class PlanePair:
    """A source and a destination plane, and the heads `[first, end)` that both have."""

    source: Plane
    destination: Plane
    first: int
    end: int

    def row(self, group_index: int) -> list[int]:
        """The numbers of this pair, in the order in which the native core takes them."""
        plane = self.destination
        sides = [
            value
            for side in (self.source, self.destination)
            for value in (
                side.region,
                side.base + (self.first - side.head_first) * side.head_stride,
                side.page_stride,
                side.row_stride,
                side.head_stride,
            )
        ]
        return [
            group_index,
            plane.layer,
            _ROW_KINDS[plane.row_kind],
            plane.rows,
            self.end - self.first,
            plane.cell_bytes,
            *sides,
        ]


@dataclass(slots=True)
class _Weights:
    """How many bytes each layer has, and all of them together."""

    by_layer: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, layer: int, length_bytes: int) -> None:
        self.by_layer[layer] = self.by_layer.get(layer, 0) + length_bytes
        self.total += length_bytes

    def of(self, layers: frozenset[int] | None) -> int:
        if layers is None:
            return self.total
        return sum(weight for layer, weight in self.by_layer.items() if layer in layers)


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One group of a plan: the pages of both sides, and the bytes of its rows and pages."""

    index: int
    source: Group
    destination: Group
    row_bytes: _Weights = field(default_factory=_Weights)
    """Bytes of one token, of the planes whose rows are tokens."""
    page_bytes: _Weights = field(default_factory=_Weights)
    """Bytes of one page, of the planes that move whole."""

    def weigh(self, pair: PlanePair) -> None:
        """Add the bytes that a pair of planes moves."""
        plane = pair.destination
        cells = (pair.end - pair.first) * plane.cell_bytes
        if plane.row_kind == row_kinds.TOKEN:
            self.row_bytes.add(plane.layer, cells)
        else:
            self.page_bytes.add(plane.layer, cells * plane.rows)

    def rounded_end(self, end: int, source_first: int, destination_first: int) -> int:
        """Where a range ends: at the page end where pages of both sides cover the same tokens."""
        size = self.source.page_size
        if size != self.destination.page_size or (source_first - destination_first) % size:
            return end
        return source_first - (source_first - end) // size * size


def planned_groups(
    source: KVLayout, destination: KVLayout, pairs: list[PlanePair]
) -> dict[str, PlannedGroup]:
    """The groups that move, by name in the order of decode, with the bytes of their pairs."""
    groups: dict[str, PlannedGroup] = {}
    moved = {pair.destination.group for pair in pairs}
    for name, theirs in destination.group_by_name.items():
        if name in moved:
            groups[name] = PlannedGroup(len(groups), source.group_by_name[name], theirs)
    for pair in pairs:
        groups[pair.destination.group].weigh(pair)
    return groups

"""The byte map that a layout is: groups of pages, planes of cells, regions of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdxfer.layout.groups import Group
    from pdxfer.layout.planes import Plane, RegionSpec


@dataclass(frozen=True)
class ByteMap:
    """What a `KVLayout` consists of, not checked."""

    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    regions: tuple[RegionSpec, ...]
    dtype: str
    """Of the first group's planes; each plane also has its own."""
    model: str = ""
    """`name@revision`; empty: not compared."""
    unified_memory: bool = False
    """Pages are envelopes: all planes of one page lie together in one region; where layouts were
    joined or combined, those of each in a region of its own."""
    relayout: str = "allow"
    """Default of this pool: `allow` any layout of the same model, or `never`."""

    @cached_property
    def group_by_name(self) -> dict[str, Group]:
        """Groups by name, in order."""
        return {group.name: group for group in self.groups}

    @cached_property
    def planes_by_key(self) -> dict[tuple[str, str, int], tuple[Plane, ...]]:
        """Planes of each (group, part, layer), by first head."""
        found: dict[tuple[str, str, int], list[Plane]] = {}
        for plane in self.planes:
            found.setdefault(plane.key, []).append(plane)
        return {
            key: tuple(sorted(planes, key=lambda plane: plane.head_first))
            for key, planes in found.items()
        }

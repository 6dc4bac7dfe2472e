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
    """The fields of a `KVLayout`, which checks them; here they are not checked."""

    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    regions: tuple[RegionSpec, ...]
    dtype: str
    """Name of the element type of the first group's planes; each plane also has its own."""
    model: str = ""
    """The model as `name@revision`, compared where both sides give one; empty: not compared."""
    unified_memory: bool = False
    """True where pages are envelopes: all planes of one page lie together in one region.

    Where layouts were joined or combined, the planes of each lie together in a region of its own.
    """
    relayout: str = "allow"
    """What the pool allows unless its client says otherwise: `allow` that pages are converted to or
    from any layout of the same model, or `never`, so that they move whole or not at all."""

    @cached_property
    def group_by_name(self) -> dict[str, Group]:
        """The groups by their names, in the order of the layout."""
        return {group.name: group for group in self.groups}

    @cached_property
    def planes_by_key(self) -> dict[tuple[str, str, int], tuple[Plane, ...]]:
        """The planes of each (group, part, layer), ordered by their first head."""
        found: dict[tuple[str, str, int], list[Plane]] = {}
        for plane in self.planes:
            found.setdefault(plane.key, []).append(plane)
        return {
            key: tuple(sorted(planes, key=lambda plane: plane.head_first))
            for key, planes in found.items()
        }

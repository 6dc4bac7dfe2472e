"""The layout of one rank's pool: groups, planes and regions; its wire form and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError
from pdxfer.layout import layout_wire, validation
from pdxfer.layout.byte_map import ByteMap
from pdxfer.layout.planes import TILE, TOKEN

if TYPE_CHECKING:
    from collections.abc import Collection

ORDER_VERSION: Final = 1
"""Version of the canonical order of bytes; it is part of every fingerprint and digest."""


@dataclass(frozen=True)
class KVLayout(ByteMap):
    """Where every cell of a pool is.

    It cannot be changed. When it is made it is checked that every cell lies inside of its region,
    that no two cells of a plane share a byte, and that the head ranges of one (group, part, layer)
    are disjoint.

    Raises:  ConfigError: a value that breaks these rules; the text names it.
    Threads: any thread may use it.
    """

    def __post_init__(self) -> None:
        validation.check_layout(self)

    @property
    def item_lens(self) -> tuple[int, ...]:
        """Bytes of one page in each region, in the order of the regions."""
        return tuple(region.item_len for region in self.regions)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The global layers that are here, in ascending order."""
        return tuple(sorted({plane.layer for plane in self.planes}))

    @cached_property
    def _layers_by_group(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for plane in self.planes:
            found.setdefault(plane.group, set()).add(plane.layer)
        return {name: tuple(sorted(layers)) for name, layers in found.items()}

    def layers_of(self, group: str) -> tuple[int, ...]:
        """The global layers that a group has planes of, in ascending order."""
        return self._layers_by_group.get(group, ())

    def locate(
        self,
        part: str,
        layer: int,
        slot: int,
        head: int = 0,
        group: str | None = None,
        row: int = 0,
    ) -> tuple[int, int]:
        """Where one cell is.

        Args:    part: name of the part, such as `k`. layer: number of the layer in the model. slot:
                 `page * page_size + row` of the group; the id of a slot in a state group. head:
                 number of the head in the model. group: name of the group, which may be left out
                 where there is only one. row: the row of a plane whose rows are not tokens.
        Returns: the index of the region, and the offset in bytes from its start.
        Raises:  ConfigError: there is no such plane, slot, head or row here.
        """
        name = group if group is not None else self.groups[0].name
        if group is None and len(self.groups) != 1:
            raise ConfigError("group must be named: the layout has several")
        planes = self.planes_by_key.get((name, part, layer), ())
        plane = next((p for p in planes if p.head_first <= head < p.head_end), None)
        if plane is None:
            raise ConfigError(
                f"no plane holds group {name}, part {part}, layer {layer}, head {head}"
            )
        spec = self.group_by_name[name]
        page, token_row = divmod(slot, spec.page_size)
        if not 0 <= page < spec.pages:
            raise ConfigError(f"slot {slot} is outside 0 <= slot < {spec.pages * spec.page_size}")
        used = {TOKEN: token_row, TILE: 0}.get(plane.row_kind, row)
        if not 0 <= used < plane.rows:
            raise ConfigError(f"row {row} is outside 0 <= row < {plane.rows}")
        return plane.region, plane.offset(page, used, head)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal where planes, groups, dtype, tile names and order version are.

        Page counts, addresses and the model do not change it.
        """
        return self.fingerprint_without(())

    def fingerprint_without(self, ignore_parts: Collection[str]) -> bytes:
        """The fingerprint of the planes whose parts are not among those to be ignored."""
        groups = [(g.name, g.kind, g.page_size) for g in self.groups]
        planes = []
        for plane in self.planes:
            if plane.part in ignore_parts:
                continue
            fields = dataclasses.asdict(plane)
            fields.update(plane.places(self.group_by_name[plane.group].pages))
            planes.append(sorted(fields.items()))
        return hashlib.sha256(
            canonical(
                [
                    ORDER_VERSION,
                    self.dtype,
                    self.unified_memory,
                    groups,
                    sorted(planes, key=canonical),
                ]
            )
        ).digest()

    @cached_property
    def map_digest(self) -> bytes:
        """32 bytes that are equal where every byte lies in the same place, whatever the model."""
        wire = self.to_wire()
        return hashlib.sha256(
            canonical([wire[name] for name in ("groups", "planes", "regions", "dtype")])
        ).digest()

    def to_wire(self) -> dict[str, object]:
        """This layout as maps, lists, strings, ints and booleans; `from_wire` is the inverse."""
        return layout_wire.to_wire(self)

    @staticmethod
    def from_wire(obj: object) -> KVLayout:
        """The layout that a peer sent as plain values.

        Raises:  RemoteProtocolError: a field that is missing or has another type, more entries than
                 a limit allows, or a value that no layout may have; the text names the field.
        """
        parsed = layout_wire.parse(obj)
        with layout_wire.as_remote_error():
            return KVLayout(**parsed)

    def with_model(self, model: str) -> KVLayout:
        """A copy of this layout that names another model, as `name@revision`."""
        return dataclasses.replace(self, model=model)


def canonical(value: object) -> bytes:
    """Plain values as bytes that are equal on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

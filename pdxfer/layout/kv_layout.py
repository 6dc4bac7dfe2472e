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
"""Version of the canonical order of bytes; part of fingerprints and digests."""


@dataclass(frozen=True)
class KVLayout(ByteMap):
    """Where every cell of a pool is.

    Immutable; checked when made: every cell inside its region, no cell of a plane on another,
    head ranges of one (group, part, layer) disjoint.

    Raises:  ConfigError: a value that breaks these rules, naming it.
    Threads: any.
    """

    def __post_init__(self) -> None:
        validation.check_layout(self)

    @property
    def item_lens(self) -> tuple[int, ...]:
        """Bytes of one page in each region."""
        return tuple(region.item_len for region in self.regions)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Global layers that are here, ascending."""
        return tuple(sorted({plane.layer for plane in self.planes}))

    def locate(
        self,
        part: str,
        layer: int,
        slot: int,
        head: int = 0,
        group: str | None = None,
        row: int = 0,
    ) -> tuple[int, int]:
        """Where one cell is: (region index, offset in bytes).

        Args:    slot: `page * page_size + row` of the group. head: global head. group: may be left
                 out where there is one. row: only for planes whose rows are not tokens.
        Raises:  ConfigError: no such plane, slot, head or row here.
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
        """32 bytes over planes, groups, dtype, tile names and the order version.

        Page counts, addresses and the model do not enter.
        """
        return self.fingerprint_without(())

    def fingerprint_without(self, ignore_parts: Collection[str]) -> bytes:
        """The fingerprint of the planes whose part is not ignored."""
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
        """32 bytes over all that decides where bytes are: page counts and bases too, no model."""
        wire = self.to_wire()
        return hashlib.sha256(
            canonical([wire[name] for name in ("groups", "planes", "regions", "dtype")])
        ).digest()

    def to_wire(self) -> dict[str, object]:
        """This layout as plain values; `from_wire` is the inverse."""
        return layout_wire.to_wire(self)

    @staticmethod
    def from_wire(obj: object) -> KVLayout:
        """A layout that a peer sent.

        Raises:  RemoteProtocolError: a missing field, a wrong type, a limit passed or a value that
                 no layout may have, naming the field.
        """
        parsed = layout_wire.parse(obj)
        with layout_wire.as_remote_error():
            return KVLayout(**parsed)

    def with_model(self, model: str) -> KVLayout:
        """The same layout for another model name."""
        return dataclasses.replace(self, model=model)


def canonical(value: object) -> bytes:
    """Plain values as bytes that are equal on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

"""The table of layouts that are orders of axes.

To add a layout: write a row here, its numbers in `tests/golden/layout_numbers.py`, and run
`make generated`, which writes its line in `docs/layouts.md`. A test refuses one that lacks either.
A layout that is no order of axes is a builder of its own, with an entry in `catalog.py`.

From these rows come what `pdxfer plan` knows, the arrangements of `mla`, the orders of host pools
and of vLLM's blocks, the page of layouts in the documentation, and the cases of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError, repr_of
from pdxfer.layout.builders.axes import HEAD_GROUPS, PADDED, check_order, strided

if TYPE_CHECKING:
    from pdxfer.layout.builders.shapes import Shape
    from pdxfer.layout.kv_layout import KVLayout

DEVICE: Final = "device"
"""A pool that kernels read; the first page is a sink that never travels."""
HOST: Final = "host"
"""A host pool behind a device pool; every page travels, and layers lie in ascending order."""
ENVELOPE: Final = "envelope"
"""A pool that kernels read whose pages are envelopes: each lies together in one region, and moves
whole (`unified_memory`, `relayout="never"`)."""
BLOCKS: Final = "blocks"
"""One allocation of blocks, as vLLM has them; K and V of a head and token lie together."""
HOMES: Final = (DEVICE, ENVELOPE, HOST, BLOCKS)


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: its name, the order of its axes, and where it is found.

    Raises:  ConfigError: an order that is none.
    """

    name: str
    order: str
    """The order for keys and values, as `pdxfer.layout.builders.axes` writes orders."""
    latent: str
    """The order for latent attention; empty where it has no such layout."""
    home: str
    """Where it is found: `DEVICE`, `ENVELOPE`, `HOST` or `BLOCKS`."""
    says: str
    """What it is, in a line of the page of layouts."""

    def __post_init__(self) -> None:
        check_order(self.order)
        if self.latent:
            check_order(self.latent)

    @property
    def grouped(self) -> bool:
        """Whether it divides the heads into groups, and so takes `head_groups`."""
        return HEAD_GROUPS in self.order

    @property
    def padded(self) -> bool:
        """Whether its pages are padded entries in a buffer that other groups may share."""
        return PADDED in self.order

    @property
    def reserved_pages(self) -> int:
        """How many pages never travel, unless the caller says otherwise."""
        return 0 if self.home == HOST else 1

    def layout(
        self,
        shape: Shape,
        *,
        latent: bool = False,
        head_groups: int = 1,
        length_bytes: int | None = None,
    ) -> KVLayout:
        """The layout of a shape in this order.

        Args:    latent: the shape is of latent attention. head_groups, length_bytes: as `strided`.
        Raises:  ConfigError: tensors that this order cannot hold; head groups, or a length of the
                 buffer, for an order that has no such thing.
        """
        if head_groups != 1 and not self.grouped:
            some = ", ".join(row.name for row in ROWS.values() if row.grouped)
            raise ConfigError(
                f"head_groups={head_groups}: only {some} groups heads, and the arrangement is "
                f"{self.name}; leave head_groups out",
                fields={"head_groups": str(head_groups)},
            )
        if length_bytes is not None and not self.padded:
            some = ", ".join(row.name for row in ROWS.values() if row.padded)
            raise ConfigError(
                f"length_bytes is {length_bytes} and the arrangement is {self.name}; only {some} "
                "lies in a buffer that other groups share: leave length_bytes out",
                fields={"length_bytes": str(length_bytes)},
            )
        if self.home == HOST:
            shape = replace(shape, layers=tuple(sorted(shape.layers)))
        return strided(
            self.latent if latent else self.order,
            shape,
            name=self.name,
            head_groups=head_groups,
            length_bytes=length_bytes,
            unified=self.home == ENVELOPE,
        )


# fmt: off
_ROWS: Final = (
    Row("token_major",       "TL|BNH",  "L|BN",    DEVICE,   "A tensor a layer and part (NHD)."),
    Row("head_major",        "TL|BHN",  "",        DEVICE,   "A tensor a layer and part (HND)."),
    Row("page_major",        "|BLTNH",  "|BLN",    ENVELOPE, "An envelope a page, layer by layer."),
    Row("unified_entries",   "|BN+LTH", "|BN+L",   ENVELOPE, "One padded entry a token."),
    Row("layer_first",       "TL|BNH",  "TL|BNH",  HOST,     "A tensor a layer and part."),
    Row("page_first",        "T|BNLH",  "T|BNLH",  HOST,     "A tensor a part, token by token."),
    Row("page_first_direct", "T|BLNH",  "T|BLNH",  HOST,     "A tensor a part, page by page."),
    Row("page_head",         "T|BHNL",  "T|BHNL",  HOST,     "A tensor a part, layers innermost."),
    Row("page_unified",      "|BGLTNH", "|BGLTNH", HOST,     "An envelope a page, by head groups."),
    Row("LBHNC",             "|LBHN",   "|LBHN",   BLOCKS,   "Layer by layer (HND)."),
    Row("LBNHC",             "|LBNH",   "|LBNH",   BLOCKS,   "Layer by layer (NHD)."),
    Row("LHBNC",             "|LHBN",   "|LHBN",   BLOCKS,   "Layer by layer, head by head."),
    Row("BLHNC",             "|BLHN",   "|BLHN",   BLOCKS,   "Block by block, all layers (HND)."),
    Row("BLNHC",             "|BLNH",   "|BLNH",   BLOCKS,   "Block by block, all layers (NHD)."),
    Row("BHLNC",             "|BHLN",   "|BHLN",   BLOCKS,   "Block by block, head by head."),
)
# fmt: on
ROWS: Final[dict[str, Row]] = {row.name: row for row in _ROWS}
"""Every row by its name; what is listed anywhere is read from here at that time."""


def names(*homes: str, latent: bool = False) -> tuple[str, ...]:
    """The names of the rows that are at home in one of these places.

    Args:    homes: `DEVICE`, `ENVELOPE`, `HOST` or `BLOCKS`. latent: only rows that latent
             attention has.
    """
    return tuple(
        row.name for row in ROWS.values() if row.home in homes and (row.latent or not latent)
    )


def row_of(name: object, *homes: str, latent: bool = False, argument: str = "arrangement") -> Row:
    """The row of that name.

    Args:    homes: where it must be at home; none given: anywhere. latent: latent attention must
             have it. argument: what the caller calls the name.
    Raises:  ConfigError: another name, listing those that there are.
    """
    known = names(*(homes or HOMES), latent=latent)
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"{argument} is {repr_of(name)}; it must be one of {', '.join(known)}",
            fields={argument: repr_of(name)},
        )
    return ROWS[name]

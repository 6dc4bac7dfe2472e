"""Where cells lie, from the order of their axes: the one formula behind every strided layout.

An order is written as axes around a bar, as in `TL|BNH`. Each axis before the bar gives a region of
its own to every index, in that order; the axes behind the bar lie inside of a region, outermost
first. The content of a cell is always innermost and is not written.

    T   the tensors of a layer: K and V, latent rows, block scales, keys of an index
    L   the layers of the rank, in the order of the shape
    B   the pages (blocks) of the pool
    N   the rows of a page, one for each token; a tile has one
    H   the heads of a row
    G   groups of heads, each of which becomes a plane of its own
    +   whatever follows is padded to a multiple of 32 bytes

Without T the tensors of a layer lie side by side in the content of a cell. Without H there is one
head, and neighbouring heads would lie a cell apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.entries import ROW_ALIGN_BYTES, entry_bytes
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import TILE, TOKEN, Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdxfer.layout.builders.shapes import Part, Shape, Tensor
    from pdxfer.layout.groups import Group

TENSORS: Final = "T"
LAYERS: Final = "L"
PAGES: Final = "B"
ROWS: Final = "N"
HEADS: Final = "H"
HEAD_GROUPS: Final = "G"
PADDED: Final = "+"
_ONCE: Final = (LAYERS, PAGES, ROWS)
"""Axes that every order has."""
_OUTSIDE: Final = (TENSORS, LAYERS)
"""Axes that may stand before the bar."""
_APART: Final = (TENSORS, LAYERS, HEAD_GROUPS)
"""Axes whose indices may differ in size: what lies along them is summed, not multiplied."""


def check_order(order: str) -> None:
    """Refuse what is no order of axes.

    Raises:  ConfigError: no bar, an unknown axis, one that is missing or there twice, one that
             cannot stand where it does.
    """
    outside, bar, inside = order.partition("|")
    axes = outside + inside
    known = (*_ONCE, TENSORS, HEADS, HEAD_GROUPS, PADDED)
    sound = (
        bool(bar)
        and all(axes.count(axis) == 1 for axis in _ONCE)
        and all(axis in known and axes.count(axis) == 1 for axis in axes)
        and all(axis in _OUTSIDE for axis in outside)
        and (HEAD_GROUPS not in axes or HEADS in axes)
    )
    if not sound:
        raise ConfigError(
            f"order is {order!r}; it must have each of L, B and N once, T, H, G and + at most "
            "once, and only T and L before the bar, as in TL|BNH",
            fields={"order": repr(order)},
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The heads of one tensor that are placed together: all of them, or one head group."""

    tensor: Tensor
    layer_at: int
    head_group: int
    heads: int
    rows: int

    def at(self, axis: str) -> int:
        """The index of this block on an axis along which blocks lie apart."""
        if axis == TENSORS:
            return self.tensor.number
        return self.layer_at if axis == LAYERS else self.head_group


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block begins in its region, and the bytes from one index of an axis to the next."""

    region: int
    base: int
    strides: dict[str, int]


def strided(
    order: str,
    shape: Shape,
    *,
    name: str = "",
    head_groups: int = 1,
    length_bytes: int | None = None,
    unified: bool = False,
) -> KVLayout:
    """The layout of a shape whose axes lie in this order.

    Args:    order: axes around a bar, as the head of this module says. shape: what there is. name:
             what errors call the order. head_groups: how many groups of heads there are, for an
             order with G. length_bytes: bytes of the one region, where it is longer than its pages
             because other groups share it. unified: whether the layout says `unified_memory` and
             `relayout="never"`.
    Raises:  ConfigError: tensors that this order cannot hold, naming part, values and remedy.
    """
    check_order(order)
    outside, _, inside = order.partition("|")
    if PADDED in inside:
        _check_aligned(shape.tensors)
    blocks = list(_blocks(order, shape, head_groups))
    pages = shape.group.pages
    places: dict[_Block, _Place] = {}
    regions = []
    for number, held in enumerate(_regions(outside, blocks)):
        length = _Walk(pages, name or order, number, places).place(inside, held)
        held_bytes = length if length_bytes is None else length_bytes
        regions.append(RegionSpec(held_bytes, length // pages))
    ordered = [axis for axis in outside + inside if axis in (TENSORS, LAYERS)]
    blocks.sort(key=lambda block: (*(block.at(axis) for axis in ordered), block.head_group))
    return KVLayout(
        groups=(shape.group,),
        planes=tuple(
            plane for block in blocks for plane in _planes(block, places[block], shape.group)
        ),
        regions=tuple(regions),
        dtype=shape.dtype,
        model=shape.model,
        unified_memory=unified,
        relayout="never" if unified else "allow",
    )


def _blocks(order: str, shape: Shape, head_groups: int) -> Iterator[_Block]:
    positive(head_groups=head_groups)
    if head_groups != 1 and HEAD_GROUPS not in order:
        raise ConfigError(f"head_groups={head_groups}: the order {order} has no axis G for them")
    if head_groups > 1 and len(shape.tensors) * head_groups > limits.PLANES_MAX:
        raise ConfigError(
            f"head_groups={head_groups} of {len(shape.tensors)} tensors are more than "
            f"{limits.PLANES_MAX} planes; take fewer groups",
            fields={"head_groups": str(head_groups)},
        )
    number = {layer: at for at, layer in enumerate(shape.layers)}
    for tensor in shape.tensors:
        if tensor.heads % head_groups:
            raise ConfigError(
                f"head_group_num={head_groups} must divide the pool's {tensor.heads} kv heads "
                f"(part {tensor.parts[0].name})",
                fields={"head_groups": str(head_groups), "kv_heads": str(tensor.heads)},
            )
        if HEADS not in order and tensor.heads != 1:
            raise ConfigError(
                f"part {tensor.parts[0].name} has {tensor.heads} heads; an order without H has one"
            )
        rows = 1 if tensor.tile else shape.group.page_size
        for group in range(head_groups):
            heads = tensor.heads // head_groups
            yield _Block(tensor, number[tensor.layer], group, heads, rows)


def _check_aligned(tensors: Iterable[Tensor]) -> None:
    """Refuse rows that kernels could not read in a padded entry."""
    for tensor in tensors:
        size = tensor.heads * tensor.cell_bytes
        if size % ROW_ALIGN_BYTES:
            row = "+".join(part.name for part in tensor.parts)
            raise ConfigError(
                f"a row of {row} has {size} bytes; unified entries need multiples of "
                f"{ROW_ALIGN_BYTES}: use page_major or token_major",
                fields={f"row_bytes of {row}": str(size)},
            )


def _along(axis: str, blocks: Iterable[_Block]) -> list[list[_Block]]:
    """The blocks by their index on an axis, ascending."""
    found: dict[int, list[_Block]] = {}
    for block in blocks:
        found.setdefault(block.at(axis), []).append(block)
    return [found[index] for index in sorted(found)]


def _regions(outside: str, blocks: list[_Block]) -> list[list[_Block]]:
    """The blocks of each region, one region for every index of the axes before the bar."""
    regions = [blocks]
    for axis in outside:
        regions = [part for region in regions for part in _along(axis, region)]
    return regions


@dataclass(frozen=True, slots=True)
class _Walk:
    """Goes through the axes of one region from the outermost to the innermost."""

    pages: int
    name: str
    region: int
    places: dict[_Block, _Place]
    """What was found: the place of each block."""

    def place(self, axes: str, blocks: Sequence[_Block], base: int = 0) -> int:
        """Place the blocks inside of these axes, from byte `base` on, and return their bytes."""
        if not axes:
            return self._side_by_side(blocks, base)
        axis, inner = axes[0], axes[1:]
        if axis == PADDED:
            return entry_bytes(self.place(inner, blocks, base))
        if axis in _APART:
            end = base
            for part in _along(axis, blocks):
                end += self.place(inner, part, end)
            return end - base
        stride = self.place(inner, blocks, base)
        for block in blocks:
            self.places[block].strides[axis] = stride
        return self._count(axis, blocks) * stride

    def _side_by_side(self, blocks: Sequence[_Block], base: int) -> int:
        end = base
        for block in blocks:
            self.places[block] = _Place(self.region, end, {})
            end += block.tensor.cell_bytes
        return end - base

    def _count(self, axis: str, blocks: Sequence[_Block]) -> int:
        """How many indices the axis has, which must be the same in every block.

        Raises:  ConfigError: blocks that share the axis differ in it.
        """
        if axis == PAGES:
            return self.pages
        part = blocks[0].tensor.parts[0].name
        if axis == ROWS:
            if len({block.rows for block in blocks}) > 1:
                raise ConfigError(
                    f"{self.name}: part {part} has token rows where others have tiles; use "
                    "page_first_direct"
                )
            return blocks[0].rows
        if len({(block.heads, block.tensor.head_first) for block in blocks}) > 1:
            raise ConfigError(
                f"{self.name}: part {part} has other heads in other layers; use page_first"
            )
        return blocks[0].heads


def _planes(block: _Block, place: _Place, group: Group) -> Iterator[Plane]:
    """The planes of a block, one for each part of its tensor."""
    base = place.base
    for part in block.tensor.parts:
        yield _plane(block, part, place, base, group)
        base += part.cell_bytes


def _plane(block: _Block, part: Part, place: _Place, base: int, group: Group) -> Plane:
    return Plane(
        group=group.name,
        part=part.name,
        layer=block.tensor.layer,
        region=place.region,
        base=base,
        page_stride=place.strides[PAGES],
        row_stride=0 if part.tile else place.strides[ROWS],
        head_stride=place.strides.get(HEADS, part.cell_bytes),
        head_first=part.head_first + block.head_group * block.heads,
        heads=block.heads,
        heads_total=part.heads_total,
        cell_bytes=part.cell_bytes,
        rows=block.rows,
        dtype=part.dtype,
        row_kind=TILE if part.tile else TOKEN,
        tile=part.tile,
    )

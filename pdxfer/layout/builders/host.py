"""Layouts of host pools: the parts of any token group, in the orders that host caches use.

One function lays out whatever the device pool has (K and V of one width or two, latent rows, block
scales, index keys, draft lanes), so that none of them needs an order of its own. In byte orders P
is pages, ps page_size, N = P * ps slots, L layers, H heads, D the width of a cell; all are
row-major.

| arrangement         | regions              | each                                              |
|---------------------|----------------------|---------------------------------------------------|
| `layer_first`       | one a unit and layer | `[N, H, D]`                                       |
| `page_first`        | one a unit           | `[N, L, H, D]`                                    |
| `page_first_direct` | one a unit           | `[P, L, ps, H, D]`                                |
| `page_head`         | one a unit           | `[P, H, ps, L, D]`                                |
| `page_unified`      | one                  | `[P, G, L, unit, ps, H / G, D]`, G head groups    |

A unit is what lies together in one row: a part, or `latent` and `rope` of MLA. A tile has no rows:
it is `[H, D]` a page and layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Unpack

from pdxfer import limits
from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import token_major
from pdxfer.layout.builders.parts import only_group
from pdxfer.layout.groups import TOKEN as TOKEN_GROUP
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import TILE, Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.layout.groups import Group

HOST_ARRANGEMENTS: Final = (
    "layer_first",
    "page_first",
    "page_first_direct",
    "page_head",
    "page_unified",
)
_ONE_ROW: Final = (("latent", "rope"),)
"""Parts that share a row."""


def units_of(layout: KVLayout) -> tuple[tuple[str, ...], ...]:
    """The units of a layout, in the order in which their parts appear."""
    names = list(dict.fromkeys(plane.part for plane in layout.planes))
    units = []
    for name in names:
        unit = next((u for u in _ONE_ROW if name in u and set(u) <= set(names)), (name,))
        if unit not in units:
            units.append(unit)
    return tuple(units)


@dataclass(frozen=True, slots=True)
class _Block:
    """One unit of one layer: what every arrangement places."""

    unit: int
    layer: int
    cells: tuple[Plane, ...]
    """One for each part of the unit; only what the cell is matters, not where it lies."""
    rows: int
    """Of a page; 1 for a tile."""

    @property
    def heads(self) -> int:
        return self.cells[0].heads

    @property
    def width(self) -> int:
        """Bytes of all parts of one row and head."""
        return sum(cell.cell_bytes for cell in self.cells)

    @property
    def bytes(self) -> int:
        """Of a page."""
        return self.rows * self.heads * self.width


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some heads of a block are, in its region."""

    base: int
    page_stride: int
    row_stride: int
    head_stride: int


def host_layout(
    like: KVLayout,
    arrangement: str,
    *,
    pages: int,
    page_size: int | None = None,
    head_groups: int = 1,
    reserved_pages: int = 0,
) -> KVLayout:
    """The parts of `like` in the order of a host pool.

    Args:    like: of one token group; its layers, heads and cells are taken, not its places.
             arrangement: one of `HOST_ARRANGEMENTS`. page_size: None: that of `like`.
             head_groups: of `page_unified`; must divide the heads of every part.
             reserved_pages: host pools have no sink page.
    Raises:  ConfigError: another arrangement, heads that cannot be grouped, tiles of another page
             size, a group of states.
    """
    if arrangement not in HOST_ARRANGEMENTS:
        raise ConfigError(
            f"Unsupported layout: {arrangement}; a host pool has one of "
            f"{', '.join(HOST_ARRANGEMENTS)}",
            fields={"layout": arrangement},
        )
    positive(pages=pages, head_groups=head_groups)
    if head_groups != 1 and arrangement != "page_unified":
        raise ConfigError(f"head_groups={head_groups}: only page_unified groups heads")
    source = only_group(like)
    if source.kind != TOKEN_GROUP:
        raise ConfigError(f"group {source.name} holds states; a host pool holds token pages")
    group = replace(
        source,
        page_size=source.page_size if page_size is None else page_size,
        pages=pages,
        reserved_pages=reserved_pages,
    )
    positive(page_size=group.page_size)
    blocks = list(_blocks(like, group, source))
    if len(blocks) * head_groups > limits.PLANES_MAX:
        raise ConfigError(
            f"head_groups={head_groups} of {len(blocks)} tensors are more than "
            f"{limits.PLANES_MAX} planes; take fewer groups",
            fields={"head_groups": str(head_groups)},
        )
    if arrangement == "page_unified":
        regions = [sorted(blocks, key=lambda block: (block.layer, block.unit))]
    elif arrangement == "layer_first":
        regions = [[block] for block in blocks]
    else:
        regions = [
            [b for b in blocks if b.unit == unit] for unit in dict.fromkeys(b.unit for b in blocks)
        ]
    planes: list[Plane] = []
    for region, held in enumerate(regions):
        _check_heads(held, arrangement, head_groups)
        before: list[_Block] = []
        for block in held:
            for number in range(head_groups):
                place = _place(arrangement, block, before, held, (number, head_groups))
                planes += _planes(block, place, region, (number, head_groups))
            before.append(block)
    lengths = [sum(block.bytes for block in held) for held in regions]
    return KVLayout(
        groups=(group,),
        planes=tuple(planes),
        regions=tuple(RegionSpec(pages * length, length) for length in lengths),
        dtype=like.dtype,
        model=like.model,
    )


def _blocks(like: KVLayout, group: Group, source: Group) -> Iterator[_Block]:
    for number, unit in enumerate(units_of(like)):
        for layer in like.layers:
            keys = [(group.name, part, layer) for part in unit]
            if keys[0] not in like.planes_by_key:
                continue
            cells = tuple(_whole(like.planes_by_key[key]) for key in keys)
            tile = cells[0].row_kind == TILE
            if tile and group.page_size != source.page_size:
                raise ConfigError(
                    f"page_size={group.page_size}: tiles {cells[0].tile} of part {unit[0]} are of "
                    f"page_size={source.page_size} and move whole; use that"
                )
            if len({cell.heads for cell in cells}) > 1:
                raise ConfigError(f"parts {unit} of layer {layer} have not the same heads")
            yield _Block(number, layer, cells, 1 if tile else group.page_size)


def _whole(planes: tuple[Plane, ...]) -> Plane:
    """One plane for all heads of a part and layer."""
    heads = sum(plane.heads for plane in planes)
    if planes[-1].head_end - planes[0].head_first != heads:
        raise ConfigError(
            f"part {planes[0].part} of layer {planes[0].layer} holds heads with a gap between"
        )
    return replace(planes[0], heads=heads)


def _check_heads(held: list[_Block], arrangement: str, head_groups: int) -> None:
    """Refuses what an arrangement with a head axis cannot hold."""
    for block in held:
        if block.heads % head_groups:
            raise ConfigError(
                f"head_group_num={head_groups} must divide the pool's {block.heads} kv heads "
                f"(part {block.cells[0].part})",
                fields={"head_groups": str(head_groups), "kv_heads": str(block.heads)},
            )
    if arrangement == "page_head" and len({(b.heads, b.cells[0].head_first) for b in held}) > 1:
        raise ConfigError(
            f"page_head: part {held[0].cells[0].part} has other heads in other layers; use "
            "page_first"
        )


def _place(
    arrangement: str,
    block: _Block,
    before: list[_Block],
    held: list[_Block],
    head_group: tuple[int, int],
) -> _Place:
    """Where one head group of a block is, behind the blocks `before` it in a region of `held`."""
    page = sum(other.bytes for other in held)
    start = sum(other.bytes for other in before)
    if arrangement == "page_first":
        return _Place(start // block.rows, page, page // block.rows, block.width)
    if arrangement == "page_head":
        row = sum(other.width for other in held)
        head = block.rows * row
        return _Place(sum(other.width for other in before), page, row, head)
    number, groups = head_group
    base = (number * page + start) // groups
    return _Place(base, page, block.heads // groups * block.width, block.width)


def _planes(
    block: _Block, place: _Place, region: int, head_group: tuple[int, int]
) -> Iterator[Plane]:
    number, groups = head_group
    heads = block.heads // groups
    base = place.base
    for cell in block.cells:
        yield replace(
            cell,
            region=region,
            base=base,
            page_stride=place.page_stride,
            row_stride=place.row_stride if block.rows > 1 or cell.row_kind != TILE else 0,
            head_stride=place.head_stride,
            head_first=cell.head_first + number * heads,
            heads=heads,
            rows=block.rows,
        )
        base += cell.cell_bytes


@named
def layer_first(**shape: Unpack[KVShape]) -> KVLayout:
    """Host pool, K and V: `[N, H, D]` a part and layer.

    Args:    shape: those of `token_major`; `reserved_pages` is 0 unless given.
    """
    return _of_kv("layer_first", shape)


@named
def page_first(**shape: Unpack[KVShape]) -> KVLayout:
    """Host pool, K and V: `[N, L, H, D]` a part.

    Args:    shape: those of `token_major`; `reserved_pages` is 0 unless given.
    """
    return _of_kv("page_first", shape)


@named
def page_first_direct(**shape: Unpack[KVShape]) -> KVLayout:
    """Host pool, K and V: `[P, L, ps, H, D]` a part.

    Args:    shape: those of `token_major`; `reserved_pages` is 0 unless given.
    """
    return _of_kv("page_first_direct", shape)


@named
def page_head(**shape: Unpack[KVShape]) -> KVLayout:
    """Host pool, K and V: `[P, H, ps, L, D]` a part.

    Args:    shape: those of `token_major`; `reserved_pages` is 0 unless given.
    """
    return _of_kv("page_head", shape)


@named
def page_unified(*, head_groups: int = 1, **shape: Unpack[KVShape]) -> KVLayout:
    """Host pool, K and V: `[P, G, L, (K, V), ps, H / G, D]`.

    Args:    shape: those of `token_major`; `reserved_pages` is 0 unless given.
    """
    return _of_kv("page_unified", shape, head_groups)


def _of_kv(arrangement: str, shape: KVShape, head_groups: int = 1) -> KVLayout:
    return host_layout(
        token_major(**shape),
        arrangement,
        pages=shape["pages"],
        head_groups=head_groups,
        reserved_pages=shape.get("reserved_pages", 0),
    )

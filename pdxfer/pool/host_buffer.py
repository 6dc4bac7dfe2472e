"""A host pool as one tensor: its axes, where all of its parts have one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout.builders.host import units_of
from pdxfer.layout.builders.parts import only_group
from pdxfer.layout.planes import TILE
from pdxfer.pool.refusals import ShapeError

if TYPE_CHECKING:
    from pdxfer.pool.base import TokenPool


def host_shape(pool: TokenPool, arrangement: str) -> tuple[int, ...]:
    """The axes of all of a host pool's memory, in their order.

    Raises:  ShapeError: its parts are no one tensor.
    """
    layout, group = pool.layout, only_group(pool.layout)
    units, layers = units_of(layout), layout.layers
    cells = {
        (unit, layer): pool.rows(unit, layer)
        for unit in units
        for layer in layers
        if (group.name, unit[0], layer) in layout.planes_by_key
    }
    kinds = sorted({(rows.heads, rows.width, str(rows.dtype)) for rows in cells.values()})
    tiled = any(plane.row_kind == TILE for plane in layout.planes)
    whole = len(cells) == len(units) * len(layers)
    if arrangement == "page_unified" or tiled or len(kinds) > 1 or not whole:
        raise ShapeError(
            f"Unsupported layout: {arrangement} with parts of (heads, width, dtype) {kinds} is no "
            "one tensor; take pages with flat=True",
            fields={"layout": arrangement},
        )
    (heads, width, _), pages, page_size = kinds[0], group.pages, group.page_size
    shape = {
        "layer_first": (len(layers), pages * page_size, heads, width),
        "page_first": (pages * page_size, len(layers), heads, width),
        "page_first_direct": (pages, len(layers), page_size, heads, width),
        "page_head": (pages, heads, page_size, len(layers), width),
    }[arrangement]
    return shape if len(units) == 1 else (len(units), *shape)

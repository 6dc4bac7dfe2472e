"""What of a page lies together: the blocks of bytes that a page consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from pdxfer.layout import KVLayout


@dataclass(frozen=True, slots=True, order=True)
class PageBlock:
    """Contiguous bytes of every page: page p has them at `base + p * stride` of the region."""

    region: int
    base: int
    stride: int
    length_bytes: int
    pages: int
    """How many there are."""
    layer: int
    """The lowest of its layers."""


def page_blocks(
    layout: KVLayout,
    group: str,
    *,
    parts: Collection[str] | None = None,
    heads: tuple[int, int] | None = None,
) -> tuple[PageBlock, ...]:
    """The blocks of a group's pages, as few as there can be, by region and base.

    Args:    parts: only these; None: all. heads: only global heads `[first, end)`.
    Returns: every byte of every chosen cell is in one block, and no other byte is.
    """
    pieces = []
    for plane in layout.planes:
        if plane.group != group or (parts is not None and plane.part not in parts):
            continue
        first, end = (plane.head_first, plane.head_end) if heads is None else heads
        first, end = max(first, plane.head_first), min(end, plane.head_end)
        if first >= end:
            continue
        rows = np.arange(plane.rows, dtype=np.int64)[:, None] * plane.row_stride
        units = np.arange(first - plane.head_first, end - plane.head_first) * plane.head_stride
        cells = (plane.base + rows + units).reshape(-1)
        same = (plane.region, plane.page_stride, plane.cell_bytes, plane.layer)
        pieces.append(np.column_stack([cells, np.broadcast_to(same, (len(cells), 4))]))
    pages = layout.group_by_name[group].pages
    return _merged(np.concatenate(pieces), pages) if pieces else ()


def _merged(cells: NDArray[np.int64], pages: int) -> tuple[PageBlock, ...]:
    """Neighbours of `cells` (offset, region, stride, length, layer) as one block."""
    order = np.lexsort((cells[:, 0], cells[:, 2], cells[:, 1]))
    at, region, stride, length, layer = cells[order].T
    apart = at[1:] != at[:-1] + length[:-1]
    starts = np.flatnonzero(
        np.concatenate(
            [[True], apart | np.diff(region).astype(bool) | np.diff(stride).astype(bool)]
        )
    )
    lengths = np.add.reduceat(length, starts)
    layers = np.minimum.reduceat(layer, starts)
    columns = (region[starts], at[starts], stride[starts], lengths, layers)
    return tuple(
        sorted(
            PageBlock(region, base, stride, length, pages, layer)
            for region, base, stride, length, layer in zip(
                *(column.tolist() for column in columns), strict=True
            )
        )
    )

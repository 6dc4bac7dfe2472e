"""The canonical order of a chunk's bytes, as each side finds them in its own memory.

The order numbers the bytes of a chunk from 0 without gaps: groups by name, then destination pages
in the order of their list, then layers, parts, head ranges, rows and heads. Neither side needs the
other's page ids for it, so a sender can gather and a receiver can scatter the same interval. See
`proto/SPEC.md`, section 7.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdxfer.layout import planes as row_kinds
from pdxfer.layout.pages import Pages
from pdxfer.layout.planned_groups import PlanePair, PlannedGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.layout.ownership import Owned


RankedPair = tuple[int, PlanePair]
"""Place of the owned head range of a pair in the canonical order of its group, and the pair."""


def ranked_pairs(pairs: Sequence[PlanePair], owned: Owned) -> list[RankedPair]:
    """Each pair with the place of its owned head range: by layer, part (bytes), first head.

    A range that several planes of either side hold between them has one place.
    """
    ranges = sorted(
        owned.cells, key=lambda c: (c.group.encode(), c.layer, c.part.encode(), c.head_first)
    )
    found: list[RankedPair] = []
    for pair in pairs:
        plane = pair.destination
        rank = next(
            number
            for number, cells in enumerate(ranges)
            if (cells.group, cells.part, cells.layer) == (plane.group, plane.part, plane.layer)
            and cells.head_first <= pair.first < cells.head_end
        )
        found.append((rank, pair))
    return found


@dataclass(frozen=True, slots=True)
class OwnPages:
    """The pages of the side whose memory is meant, and where decode's pages begin.

    Args:  is_source: whether these are the source's pages. pages: by group. destination_first:
           token of decode's first page by group; 0 where left out, which any other page start
           comes to.
    """

    is_source: bool
    pages: Mapping[str, Pages]
    destination_first: Mapping[str, int]


def pieces_in_order(
    groups: Mapping[str, PlannedGroup],
    pairs: Sequence[RankedPair],
    own: OwnPages,
    spans: Mapping[str, Sequence[tuple[int, int]]],
    layers: Collection[int] | None,
) -> NDArray[np.int64]:
    """The bytes of a chunk in canonical order, in the memory of one side.

    Args:    pairs: of the plan, from `ranked_pairs`. spans: the ranges `[first, end)` of each
             group that move, in order, to the byte: ends are not rounded here. layers: global
             layers that move; None: all.
    Shapes:  int64 [n, 3]: region, offset, length (bytes). Neighbours in memory are one piece.
    Cost:    numpy operations over all cells of the chunk.
    """
    found = [np.zeros((0, 3), dtype=np.int64)]
    for name in sorted(spans, key=str.encode):
        group = groups.get(name)
        if group is None:
            continue
        mine = [
            (rank, pair)
            for rank, pair in pairs
            if pair.destination.group == name
            and (layers is None or pair.destination.layer in layers)
        ]
        side = group.source if own.is_source else group.destination
        which = "source" if own.is_source else "destination"
        for span in spans[name]:
            listed = own.pages[name].stretch(side, span, which)
            found.append(_group_pieces(group, mine, own, listed, span))
    return _merged(np.concatenate(found))


def _group_pieces(
    group: PlannedGroup,
    pairs: list[RankedPair],
    own: OwnPages,
    listed: Pages,
    tokens: tuple[int, int],
) -> NDArray[np.int64]:
    name = group.destination.name
    size = (group.source if own.is_source else group.destination).page_size
    token = np.arange(*tokens, dtype=np.int64)
    page = (token - own.destination_first.get(name, 0)) // group.destination.page_size
    at, row = np.divmod(token - listed.first_token, size)
    begins = np.flatnonzero(np.diff(page, prepend=page[0] - 1)) if len(page) else page
    columns: list[NDArray[np.int64]] = []
    for rank, pair in pairs:
        plane = pair.source if own.is_source else pair.destination
        heads = np.arange(pair.end - pair.first, dtype=np.int64)
        if plane.row_kind == row_kinds.TOKEN:
            pages, ids, rows, order = page, listed.ids[at], row, token
        else:
            pages = np.repeat(page[begins], plane.rows)
            ids = np.repeat(listed.ids[at[begins]], plane.rows)
            rows = order = np.tile(np.arange(plane.rows, dtype=np.int64), len(begins))
        offsets = (
            plane.base
            + (pair.first - plane.head_first) * plane.head_stride
            + ids * plane.page_stride
            + rows * plane.row_stride
        )[:, None] + heads * plane.head_stride
        count = offsets.size
        columns.append(
            np.stack(
                [
                    np.repeat(pages, len(heads)),
                    np.full(count, rank),
                    np.repeat(order, len(heads)),
                    np.tile(heads + pair.first, len(rows)),
                    np.full(count, plane.region),
                    offsets.reshape(-1),
                    np.full(count, plane.cell_bytes),
                ],
                axis=1,
            )
        )
    if not columns:
        return np.zeros((0, 3), dtype=np.int64)
    cells = np.concatenate(columns)
    return cells[np.lexsort((cells[:, 3], cells[:, 2], cells[:, 1], cells[:, 0])), 4:]


def _merged(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Neighbours that touch, in one region, as one piece."""
    if len(pieces) < 2:
        return pieces
    ends = pieces[:, 1] + pieces[:, 2]
    touches = (pieces[1:, 0] == pieces[:-1, 0]) & (pieces[1:, 1] == ends[:-1])
    begins = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    merged = pieces[begins]
    merged[:, 2] = np.add.reduceat(pieces[:, 2], begins)
    return merged

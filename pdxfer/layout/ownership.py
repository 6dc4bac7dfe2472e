"""Who owes which cells: every cell of a destination belongs to exactly one source worker."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planes import Plane
    from pdxfer.layout.rank import Rank

_NAMED_MAX = 4


@dataclass(frozen=True, slots=True, order=True)
class OwnedCells:
    """Heads `[head_first, head_end)` of one (group, part, layer): all pages and rows."""

    group: str
    part: str
    layer: int
    head_first: int
    head_end: int


@dataclass(frozen=True, slots=True)
class Owned:
    """What one source worker owes one destination worker; may be nothing."""

    cells: tuple[OwnedCells, ...] = ()

    @property
    def empty(self) -> bool:
        """True where this source worker owes nothing."""
        return not self.cells

    def __bool__(self) -> bool:
        return bool(self.cells)


def cover(
    source_workers: Sequence[tuple[Rank, KVLayout]],
    destination: tuple[Rank, KVLayout],
    *,
    ignore_parts: Collection[str] = (),
) -> tuple[Owned, ...]:
    """What each source worker owes the destination worker.

    Pure and the same on both sides. Among source workers that hold a cell, in rank order, the owner
    is number `destination rank index % count`.

    Args:    source_workers: every rank of the source instance, in any order.
    Returns: one `Owned` per source worker, in the order given.
    Raises:  LayoutMismatchError: cells of the destination that no source worker holds, or (the
             destination is no pipeline stage) cells of the source that it lacks.
             ConfigError: ranks missing, repeated, or of different instance sizes.
    """
    _check_ranks([rank for rank, _ in source_workers])
    order = sorted(range(len(source_workers)), key=lambda at: source_workers[at][0].index)
    holders: dict[tuple[str, str, int], list[tuple[int, Plane]]] = {}
    for at in order:
        for plane in source_workers[at][1].planes:
            holders.setdefault(plane.key, []).append((at, plane))
    rank, layout = destination
    owned: list[list[OwnedCells]] = [[] for _ in source_workers]
    missing: list[OwnedCells] = []
    for key in sorted(layout.planes_by_key):
        if key[1] in ignore_parts:
            continue
        for plane in layout.planes_by_key[key]:
            for first, end in _pieces(plane, holders.get(key, ())):
                candidates = [
                    at
                    for at, held in holders.get(key, ())
                    if held.head_first <= first and end <= held.head_end
                ]
                cells = OwnedCells(*key, first, end)
                if not candidates:
                    missing.append(cells)
                else:
                    _append(owned[candidates[rank.index % len(candidates)]], cells)
    _refuse_missing(missing)
    if rank.pp_size == 1:
        _refuse_surplus(holders, layout, ignore_parts)
    return tuple(Owned(tuple(cells)) for cells in owned)


def _check_ranks(ranks: list[Rank]) -> None:
    if not ranks:
        raise ConfigError("cover needs the workers of a source instance; there are none")
    sizes = {(rank.tp_size, rank.pp_size, rank.cp_size) for rank in ranks}
    if len(sizes) > 1:
        raise ConfigError(f"source ranks are of different instances: (tp, pp, cp) sizes {sizes}")
    indexes = {rank.index for rank in ranks}
    if len(indexes) != len(ranks):
        raise ConfigError("a source rank appears twice")
    if len(ranks) != ranks[0].instance_size:
        raise ConfigError(f"{len(ranks)} of {ranks[0].instance_size} source ranks are given")


def _pieces(plane: Plane, holders: Iterable[tuple[int, Plane]]) -> list[tuple[int, int]]:
    """The plane's heads, cut where a source plane begins or ends."""
    cuts = {plane.head_first, plane.head_end}
    for _, held in holders:
        cuts.update(
            cut
            for cut in (held.head_first, held.head_end)
            if plane.head_first < cut < plane.head_end
        )
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))


def _append(cells: list[OwnedCells], more: OwnedCells) -> None:
    """Adds a piece, joined to the one before where they touch."""
    last = cells[-1] if cells else None
    if (
        last is not None
        and (last.group, last.part, last.layer) == (more.group, more.part, more.layer)
        and last.head_end == more.head_first
    ):
        cells[-1] = OwnedCells(more.group, more.part, more.layer, last.head_first, more.head_end)
    else:
        cells.append(more)


def named_cells(cells: Sequence[OwnedCells]) -> str:
    """The first few cells, for a text."""
    names = [
        f"(group {c.group}, part {c.part}, layer {c.layer}, heads {c.head_first}-{c.head_end - 1})"
        for c in cells[:_NAMED_MAX]
    ]
    more = len(cells) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _refuse_missing(missing: Sequence[OwnedCells]) -> None:
    if missing:
        raise LayoutMismatchError(
            f"KV cover is incomplete: decode needs {named_cells(missing)}, which no prefill rank "
            "holds. Both sides must serve the same model with all its layers and heads; a part "
            "that only decode has must be named in ignore_parts.",
            fields={"missing": f"prefill=none, decode={named_cells(missing)}"},
        )


def _refuse_surplus(
    holders: dict[tuple[str, str, int], list[tuple[int, Plane]]],
    layout: KVLayout,
    ignore_parts: Collection[str],
) -> None:
    surplus = sorted(
        key for key in holders if key not in layout.planes_by_key and key[1] not in ignore_parts
    )
    if surplus:
        names = ", ".join(f"(group {g}, part {p}, layer {n})" for g, p, n in surplus[:_NAMED_MAX])
        raise LayoutMismatchError(
            f"prefill holds {names}{' and more' if len(surplus) > _NAMED_MAX else ''}, which "
            "decode lacks. Both sides must serve the same model; a part that only prefill has must "
            "be named in ignore_parts.",
            fields={"surplus": f"prefill={names}, decode=none"},
        )

"""Who owes which cells: every cell of a destination belongs to exactly one source worker.

Cells are divided over ranks by layer and head; over prefill's context parallel ranks by page: each
of them owes one range of the request's pages, of the same cells.
"""

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
    """The cells of heads `[head_first, head_end)` of one (group, part, layer), in all pages."""

    group: str
    part: str
    layer: int
    head_first: int
    head_end: int


@dataclass(frozen=True, slots=True)
class PageShare:
    """Share number `part` of `parts` of a request's pages; all of them where `parts` is 1.

    Pages are the source's, counted from token 0 of the request. Shares are balanced: the first
    `pages % parts` have one page more. They need the request's tokens only, not decode's prefix, so
    that a context parallel rank may hold its own range and nothing else.
    """

    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ConfigError(f"share {self.part} of {self.parts}: 0 <= part < parts must hold")

    def pages(self, count: int) -> tuple[int, int]:
        """The pages `[first, end)` of a request of `count` pages that are this share."""
        each, more = divmod(count, self.parts)
        first = self.part * each + min(self.part, more)
        return first, first + each + (self.part < more)


@dataclass(frozen=True, slots=True)
class Owned:
    """What one source worker owes one destination worker; it may be nothing."""

    cells: tuple[OwnedCells, ...] = ()
    share: PageShare = PageShare()
    """Which of the request's pages it owes of these cells."""

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
    """What each source worker owes one destination worker.

    It is pure, and both sides compute the same. Among the source workers that hold a cell, in the
    order of their ranks, the owner is number `destination rank index % count`. Context parallel
    ranks of one stage and TP rank count as one, and share the pages.

    Args:    source_workers: rank and layout of every rank of the source instance, in any order.
             destination_worker: rank and layout of the destination worker. ignore_parts: names of
             parts that do not travel.
    Returns: one `Owned` for each source worker, in the order given.
    Raises:  LayoutMismatchError: cells of the destination that no source worker holds; cells of the
             source that a destination lacks which is no pipeline stage; a destination of several
             context parallel ranks; cells that only some context parallel ranks of the source hold.
             ConfigError: ranks that are missing, repeated, or of instances of different sizes.
    """
    _check_ranks([rank for rank, _ in source_workers])
    order = sorted(range(len(source_workers)), key=lambda at: source_workers[at][0].index)
    holders: dict[tuple[str, str, int], list[tuple[int, Plane]]] = {}
    for at in order:
        for plane in source_workers[at][1].planes:
            holders.setdefault(plane.key, []).append((at, plane))
    rank, layout = destination
    _refuse_decode_cp(source_workers[0][0], rank)
    owned: list[list[OwnedCells]] = [[] for _ in source_workers]
    missing: list[OwnedCells] = []
    for key in sorted(layout.planes_by_key):
        if key[1] in ignore_parts:
            continue
        for plane in layout.planes_by_key[key]:
            for first, end in _pieces(plane, holders.get(key, ())):
                cells = OwnedCells(*key, first, end)
                teams = _teams(source_workers, holders.get(key, ()), cells)
                if not teams:
                    missing.append(cells)
                    continue
                for at in teams[rank.index % len(teams)]:
                    _append(owned[at], cells)
    _refuse_missing(missing)
    if rank.pp_size == 1:
        _refuse_surplus(holders, layout, ignore_parts)
    return tuple(
        Owned(tuple(cells), PageShare(worker.cp, worker.cp_size) if cells else PageShare())
        for cells, (worker, _) in zip(owned, source_workers, strict=True)
    )


def _check_ranks(ranks: list[Rank]) -> None:
    if not ranks:
        raise ConfigError("cover needs the workers of a source instance; there are none")
    sizes = {(rank.tp_size, rank.pp_size, rank.cp_size) for rank in ranks}
    if len(sizes) > 1:
        raise ConfigError(f"source ranks are of different instances: (tp, pp, cp) sizes {sizes}")
    indexes = {rank.index for rank in ranks}
    if len(indexes) != len(ranks):
        listed = [rank.index for rank in ranks]
        rank = next(rank for rank in ranks if listed.count(rank.index) > 1)
        raise ConfigError(
            f"source rank {rank.index} (tp={rank.tp}, pp={rank.pp}, cp={rank.cp}) appears twice; "
            "each rank of an instance is one worker",
            fields={"rank": str(rank.index)},
        )
    if len(ranks) != ranks[0].instance_size:
        raise ConfigError(f"{len(ranks)} of {ranks[0].instance_size} source ranks are given")


def _pieces(plane: Plane, holders: Iterable[tuple[int, Plane]]) -> list[tuple[int, int]]:
    """The heads of a plane, cut where a plane of the source begins or ends."""
    cuts = {plane.head_first, plane.head_end}
    for _, held in holders:
        cuts.update(
            cut
            for cut in (held.head_first, held.head_end)
            if plane.head_first < cut < plane.head_end
        )
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))


def _teams(
    source_workers: Sequence[tuple[Rank, KVLayout]],
    holders: Iterable[tuple[int, Plane]],
    cells: OwnedCells,
) -> list[list[int]]:
    """Who holds these cells: the context parallel ranks of each stage and TP rank, in rank order.

    Raises:  LayoutMismatchError: only some of such ranks hold them.
    """
    teams: dict[tuple[int, int], list[int]] = {}
    for at, held in holders:
        if held.head_first <= cells.head_first and cells.head_end <= held.head_end:
            rank = source_workers[at][0]
            teams.setdefault((rank.pp, rank.tp), []).append(at)
    size = source_workers[0][0].cp_size
    for members in teams.values():
        if len(members) != size:
            held_by = [source_workers[at][0].cp for at in members]
            raise LayoutMismatchError(
                f"KV cover: prefill cp_size={size}, but only cp ranks {held_by} hold "
                f"{named_cells([cells])}. Context parallel ranks share pages, not layers or heads: "
                "give all of them the same layers and heads, or use PP or TP ranks.",
                fields={"cp_size": f"prefill={size} (held by cp {held_by}), decode=1"},
            )
    return list(teams.values())


def _refuse_decode_cp(source: Rank, destination: Rank) -> None:
    if destination.cp_size != 1:
        raise LayoutMismatchError(
            f"Decode cp size ({destination.cp_size}) should be equal to 1: decode context parallel "
            f"(tokens interleaved over ranks) is not served; prefill has cp_size={source.cp_size}, "
            f"decode has cp_size={destination.cp_size}. Start decode with cp_size=1 and use "
            "attention TP or more decode instances.",
            fields={"cp_size": f"prefill={source.cp_size}, decode={destination.cp_size}"},
        )


def _append(cells: list[OwnedCells], more: OwnedCells) -> None:
    """Add a piece, joined to the one before it where they touch."""
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
    """The first few of these cells in words, for a text."""
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

"""The one planner: how page pairs of any two layouts turn into runs.

Planes are matched by (group, part, layer) and cut to the heads that both hold and the source owes;
the native core walks token ranges and merges what touches on both sides. A request costs its ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.errors import LayoutMismatchError
from pdxfer.layout.compatibility import Side, check_pair
from pdxfer.layout.compiled import Plan
from pdxfer.layout.ownership import Owned, OwnedCells, named_cells
from pdxfer.layout.planned_groups import PlanePair

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdxfer.layout.kv_layout import KVLayout


def plan(
    source: KVLayout,
    destination: KVLayout,
    *,
    relayout: str = "allow",
    owned: Owned | None = None,
    ignore_parts: Collection[str] = (),
) -> Plan:
    """Compile how pages of one layout are written into pages of another.

    Args:    source: the layout that is read. destination: the layout that is written. relayout:
             `never` also refuses another arrangement of the same cells. owned: what this source
             worker owes, as `cover` says; None: everything that the destination holds.
             ignore_parts: names of parts that do not travel and are not compared.
    Raises:  LayoutMismatchError: the two do not mean the same bytes, or the source lacks cells; the
             text names field, both values and remedy. ConfigError: a bad argument.
    Threads: any thread may call it. It is pure: both sides hold the same plan and `digest`.
    Cost:    grows with the number of planes.
    """
    ignored = tuple(ignore_parts)
    check_pair(*(_side(layout, relayout, ignored, owned) for layout in (source, destination)))
    wanted = _everything(destination, ignored) if owned is None else owned
    pairs = _matched(source, destination, wanted)
    if owned is None and not pairs:
        raise LayoutMismatchError("KV layout mismatch: the two layouts have no cell in common")
    return Plan(source, destination, pairs, wanted)


def _side(layout: KVLayout, relayout: str, ignored: tuple[str, ...], owned: Owned | None) -> Side:
    """A layout as a side of a comparison.

    Its heads tell the attention TP size, and owned cells tell that there may be pipeline stages.
    """
    tp = max(
        planes[0].heads_total // sum(plane.heads for plane in planes)
        for planes in layout.planes_by_key.values()
    )
    return Side(layout, tp, relayout, ignored, all_layers=owned is None)


def _everything(layout: KVLayout, ignored: Collection[str]) -> Owned:
    return Owned(
        tuple(
            OwnedCells(*key, plane.head_first, plane.head_end)
            for key in sorted(layout.planes_by_key)
            if key[1] not in ignored
            for plane in layout.planes_by_key[key]
        )
    )


def _matched(source: KVLayout, destination: KVLayout, owned: Owned) -> list[PlanePair]:
    """The pairs of planes that hold exactly the owned cells, each of them once."""
    pairs: list[PlanePair] = []
    missing: list[OwnedCells] = []
    for cells in owned.cells:
        key = (cells.group, cells.part, cells.layer)
        found = 0
        for theirs in destination.planes_by_key.get(key, ()):
            for mine in source.planes_by_key.get(key, ()):
                first = max(cells.head_first, mine.head_first, theirs.head_first)
                end = min(cells.head_end, mine.head_end, theirs.head_end)
                if first < end:
                    pairs.append(PlanePair(mine, theirs, first, end))
                    found += end - first
        if found != cells.head_end - cells.head_first:
            missing.append(cells)
    if missing:
        raise LayoutMismatchError(
            f"KV layout mismatch: heads: decode needs {named_cells(missing)}, which this prefill "
            "worker does not hold in full. Give plan the cells it owes (owned, from cover).",
            fields={"heads": f"prefill=not held, decode={named_cells(missing)}"},
        )
    return pairs

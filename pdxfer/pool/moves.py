"""Rows and pages from one place of a pool to another; sources and targets may overlap.

Everything that is to be moved is gathered before a byte of it is written, layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import last_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from pdxfer.pool.rows import PartRows


def move_slots(rows: Iterable[PartRows], target: torch.Tensor, source: torch.Tensor) -> None:
    """Every row of slot `source[i]` to slot `target[i]`; of a repeated target the last stays."""
    target, source = _pairs(target, source)
    for part in rows:
        part.scatter(target, part.gather(source))


def move_pages(blocks: Iterable[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy page `source[i]` to page `target[i]` in every block `[pages, bytes]`."""
    target, source = _pairs(target, source)
    for block in blocks:
        block[target] = block[source]


def check_counts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Refuses targets that are not as many as sources.

    Raises:  ShapeError.
    """
    if target.numel() != source.numel():
        raise ShapeError(f"{target.numel()} targets for {source.numel()} sources")


def _pairs(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_counts(target, source)
    kept = last_of_each(target)
    return (target, source) if kept is None else (target[kept], source[kept])

"""Which rows of a speculative block are committed: the first few of each request.

Each request wrote a block of T rows; only the first `commit_lens[b]` were accepted. Those go to
their slots, the others leave the pool as it was, whatever their slots say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Mapping


def committed_rows(
    loc_2d: torch.Tensor,
    commit_lens: torch.Tensor,
    rows: Mapping[str, torch.Tensor],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and row numbers of what is committed, by request, then position.

    Shapes:  loc_2d [B, T], slots; commit_lens [B]; each of `rows` [B * T, ...]
    Returns: slots [n] of the dtype of loc_2d, not looked at, and positions among the rows int64
             [n], both on `device`.
    Raises:  ShapeError: in this order: the shapes of loc_2d, commit_lens, rows; then loc_2d or
             commit_lens of no integers.
    """
    if loc_2d.ndim != 2:
        raise ShapeError(f"loc_2d must be rank-2, got shape={tuple(loc_2d.shape)}.")
    if commit_lens.ndim != 1 or commit_lens.shape[0] != loc_2d.shape[0]:
        raise ShapeError(
            "commit_lens must match loc_2d batch size: "
            f"{tuple(commit_lens.shape)=} {tuple(loc_2d.shape)=}."
        )
    if any(given.shape[0] != loc_2d.numel() for given in rows.values()):
        shapes = " ".join(f"tuple({name}.shape)={tuple(r.shape)}" for name, r in rows.items())
        raise ShapeError(f"KV rows must match loc_2d size: {shapes} {tuple(loc_2d.shape)=}.")
    for name, given in (("loc_2d", loc_2d), ("commit_lens", commit_lens)):
        if given.dtype not in INTEGERS:
            raise ShapeError(f"{name} must hold integers, got {given.dtype}")
    lens = _lengths(commit_lens.to(device))
    mask = torch.arange(loc_2d.shape[1], device=device)[None, :] < lens[:, None]
    at = torch.nonzero(mask.reshape(-1)).flatten()
    return loc_2d.to(device).reshape(-1)[at], at


def _lengths(commit_lens: torch.Tensor) -> torch.Tensor:
    """The lengths as int64. An unsigned one beyond 63 bits becomes one that is over any T."""
    lens = commit_lens.to(torch.int64)
    if commit_lens.dtype == torch.uint64:
        return lens.masked_fill(lens < 0, torch.iinfo(torch.int64).max)
    return lens

"""Rows of a pool by slot: one part of one layer, wherever the layout has its cells.

Everything that reads or writes tokens goes through here, so that a method is written once and holds
for every pool: `slot = page * page_size + row`, and the strides are the plane's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.mxfp8 import MXFP8_TILE, SCALE_BLOCK
from pdxfer.layout.planes import TILE
from pdxfer.pool.refusals import ShapeError, SlotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import Group, Plane
    from pdxfer.pool.storage import Storage

_STORED_AS: Final = {
    "float8_e4m3fn": torch.uint8,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2": torch.uint8,
}
"""Torch has no indexed store for them."""
INTEGERS: Final = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""Dtypes that ids and lengths may have. A boolean tensor is a mask and no list of slots 0 and 1."""


def stored_dtype(name: str) -> torch.dtype:
    """The dtype in which elements of a layout's dtype are stored."""
    found = _STORED_AS.get(name, getattr(torch, name))
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={name} is none of torch")
    return found


class PartRows:
    """One part of one layer, `[slots, heads, width]` of `dtype`, read and written by slot."""

    def __init__(self, group: Group, planes: Sequence[Plane], storage: Storage) -> None:
        """Rows of the planes of one (group, part, layer), by first head."""
        self.part = planes[0].part
        self.layer = planes[0].layer
        self.page_size = group.page_size
        self.slots = group.pages * group.page_size
        self.dtype = stored_dtype(planes[0].dtype)
        self.element = getattr(torch, planes[0].dtype)
        """What the stored bytes stand for; `dtype` where torch can store it."""
        cells = [storage.cells(plane, group.pages, self.dtype) for plane in planes]
        self._row_of: torch.Tensor | None = None
        if planes[0].row_kind == TILE:
            self._row_of = _tile_rows(planes[0], group.page_size).to(cells[0].device)
            cells = [_untiled(cell, group.page_size) for cell in cells]
        self._views = [_flat(cell) if self._row_of is None else cell for cell in cells]
        self._heads = [plane.heads for plane in planes]
        self.heads = sum(self._heads)
        self.width = cells[0].shape[3]
        """Elements of one head of one row."""

    @property
    def view(self) -> torch.Tensor:
        """All rows as one tensor: `[slots, heads, width]`, or `[pages, page_size, heads, width]`.

        Raises:  ConfigError: heads lie apart, or rows are inside of tiles.
        """
        if len(self._views) != 1 or self._row_of is not None:
            raise ConfigError(f"part {self.part} is no single tensor in this layout")
        return self._views[0]

    def gather(self, loc: torch.Tensor) -> torch.Tensor:
        """The rows of slots `loc`, `[n, heads, width]`; a copy."""
        parts = [view[self._index(view, loc)] for view in self._views]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter(self, loc: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows` `[n, heads, width]` to slots `loc`; which of a repeated slot is not said."""
        for view, part in zip(self._views, torch.split(rows, self._heads, dim=1), strict=True):
            view[self._index(view, loc)] = part

    def _index(self, view: torch.Tensor, loc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if view.ndim == 3:
            return (loc,)
        page = torch.div(loc, self.page_size, rounding_mode="floor")
        row = loc - page * self.page_size
        return page, row if self._row_of is None else self._row_of[row]


def widened(parts: Sequence[Sequence[Plane]]) -> list[Plane]:
    """One plane for the parts of a unit that lie in one row, for each of their head ranges.

    Raises:  ConfigError: the parts do not lie side by side.
    """
    wide = []
    for planes in zip(*parts, strict=True):
        first, end = planes[0], planes[0].base
        for plane in planes:
            if plane.base != end or _steps(plane) != _steps(first):
                raise ConfigError(f"parts {first.part} and {plane.part} do not share a row")
            end += plane.cell_bytes
        wide.append(
            replace(first, part="+".join(p.part for p in planes), cell_bytes=end - first.base)
        )
    return wide


def _steps(plane: Plane) -> tuple[int, ...]:
    """What planes of one row have equal; one head has no next one."""
    head_stride = plane.head_stride if plane.heads > 1 else 0
    return plane.region, plane.page_stride, plane.row_stride, plane.heads, head_stride


def slots_of(
    loc: object, name: str, slots: int, device: torch.device, *, wait: bool = True
) -> torch.Tensor:
    """`loc` as slot ids, int64 on `device`, every one of them in the pool.

    Args:    loc: integers of any width, signed or not. wait: look at ids that are on a GPU too,
             which waits for it. Without, an id outside of the pool is found there by the store
             itself, in torch's own way.

    Raises:  ShapeError: no one-dimensional integers. SlotError: an id outside of the pool.
    """
    found = as_tensor(loc, name)
    if found.numel() == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    if found.ndim != 1 or found.dtype not in INTEGERS:
        raise ShapeError(
            f"{name} must be one-dimensional slot ids, got {found.dtype} {tuple(found.shape)}"
        )
    ids = found.to(torch.int64)
    if ids.device.type != "cpu" and not wait:
        # An index below zero would count from the end, so it is put where no slot is.
        return ids.masked_fill(ids < 0, slots).to(device)
    if ids.device.type != "meta":
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= slots:
            # Beyond 63 bits an unsigned id has wrapped.
            wrapped = 1 << 64 if found.dtype == torch.uint64 else 0
            raise SlotError(
                f"{name} has slot {low + wrapped if low < 0 else high}; the pool has "
                f"0 <= slot < {slots}"
            )
    return ids.to(device)


def as_tensor(loc: object, name: str) -> torch.Tensor:
    """`loc`, a tensor or a list of ids, as a tensor.

    Raises:  ShapeError: it is neither.
    """
    if isinstance(loc, torch.Tensor):
        return loc
    try:
        return torch.as_tensor(loc)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{name} must be one-dimensional slot ids: {error}") from error


def last_of_each(loc: torch.Tensor) -> torch.Tensor | None:
    """Positions of the last appearance of every slot; None where none appears twice.

    An indexed store does not say which of several rows of one slot stays; with these the last does.
    """
    if loc.numel() < 2:
        return None
    sorted_loc, order = torch.sort(loc, stable=True)
    last = torch.ones_like(sorted_loc, dtype=torch.bool)
    last[:-1] = sorted_loc[1:] != sorted_loc[:-1]
    return None if bool(last.all()) else order[last]


def _flat(cells: torch.Tensor) -> torch.Tensor:
    """`[slots, heads, width]` where slots are equally far apart, else the cells by page and row."""
    pages, rows = cells.shape[:2]
    if pages > 1 and cells.stride(0) != rows * cells.stride(1):
        return cells
    shape = (pages * rows, *cells.shape[2:])
    return cells.as_strided(shape, cells.stride()[1:], cells.storage_offset())


def _tile_rows(plane: Plane, page_size: int) -> torch.Tensor:
    """Where each token of a page is inside of its tile."""
    if plane.tile != MXFP8_TILE:
        raise ConfigError(
            f"part {plane.part} has tiles {plane.tile}, whose rows this pool does not know; pages "
            "of it move whole"
        )
    token = torch.arange(page_size)
    return (token % SCALE_BLOCK) * (page_size // SCALE_BLOCK) + token // SCALE_BLOCK


def _untiled(cells: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tiles `[pages, 1, heads, bytes]` as `[pages, page_size, heads, bytes of a token]`."""
    width = cells.shape[3] // page_size
    return cells.as_strided(
        (cells.shape[0], page_size, cells.shape[2], width),
        (cells.stride(0), width, cells.stride(2), 1),
        cells.storage_offset(),
    )

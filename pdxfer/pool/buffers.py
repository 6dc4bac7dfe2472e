"""Addresses, steps and sizes of a pool's buffers, as kernels and logs of engines ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.layout import KVLayout, Plane

GIB: Final = 1 << 30


def data_ptrs(buffers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The addresses of buffers, uint64 on `device`."""
    return torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=device)


def data_strides(buffers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Bytes from one slot of a buffer to the next (of a view by page: one page), int64."""
    steps = [b.stride(0) * b.dtype.itemsize for b in buffers]
    return torch.tensor(steps, dtype=torch.int64, device=device)


def size_bytes(layout: KVLayout, wanted: Callable[[Plane], bool] = lambda _: True) -> int:
    """Bytes of the cells of some planes in all pages, the reserved ones included."""
    pages = {group.name: group.pages for group in layout.groups}
    return sum(
        pages[plane.group] * plane.rows * plane.heads * plane.cell_bytes
        for plane in layout.planes
        if wanted(plane)
    )

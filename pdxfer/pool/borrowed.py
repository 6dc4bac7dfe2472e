"""Memory that another pool owns: one tensor of bytes for each region of a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.memory import MemoryRange
from pdxfer.pool.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdxfer.layout import KVLayout


class BorrowedRegions(Storage):
    """The regions of a layout where they lie already, each in a tensor of its own.

    Ownership: the tensors are kept, so that their memory stays; `close` lets go of them.
    """

    def __init__(self, layout: KVLayout, regions: Sequence[torch.Tensor]) -> None:
        """Take one uint8 tensor a region, at least as long as the layout says."""
        self._regions = tuple(regions)
        self.length_bytes = sum(region.length_bytes for region in layout.regions)
        self.device = str(regions[0].device)
        self._unpin = None
        self._raw = self._regions[0]

    def ranges(self) -> tuple[MemoryRange, ...]:
        """One range a region, in order; each keeps its tensor."""
        return tuple(
            MemoryRange(region.data_ptr(), region.numel(), region) for region in self._regions
        )

    def address(self, region: int, offset: int) -> int:
        """Address of a byte of a region, in this process."""
        return self._regions[region].data_ptr() + offset

    def close(self) -> None:
        """Let go of the tensors. Idempotent."""
        self._raw, self._regions = None, ()

    def _view(
        self,
        dtype: torch.dtype,
        place: tuple[int, int],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        region, offset = place
        item = dtype.itemsize
        held = self._regions[region]
        whole = held[: held.numel() // item * item].view(dtype)
        return whole.as_strided(shape, strides, whole.storage_offset() + offset // item)

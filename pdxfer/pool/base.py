"""What every pool does, written once over its layout.

The layout says where each cell is; a pool adds the memory and the methods by slot:

    slot = page * page_size + row;  page 0 is reserved: padding is written there, it never travels

Method names are SGLang's, so that code written for its pools works on these. A pool is also what a
client attaches: it has `layout` and `memory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.host import units_of
from pdxfer.layout.builders.parts import only_group
from pdxfer.pool import moves
from pdxfer.pool.blocks import PageBlock, page_blocks
from pdxfer.pool.borrowed import BorrowedRegions
from pdxfer.pool.copies import CHUNK_SLOTS, Chunk, HostCopy, check_copy, copy_in, copy_out
from pdxfer.pool.refusals import ShapeError, SlotError
from pdxfer.pool.rows import PartRows, slots_of, widened
from pdxfer.pool.storage import REGION_ALIGN_BYTES, Storage
from pdxfer.pool.write_loc import check_physical, slots_to_write

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange, SharedMemory
    from pdxfer.pool.layers import LayerCounter


class Pool:
    """A layout and the memory it lies in.

    Ownership: a pool made without `memory` owns its memory, and `close` frees it. Tensors got from
    a pool keep the memory mapped: `close` raises `BufferError` while one lives.

    Threads: as torch; nothing here is locked.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: str = "cpu",
        memory: SharedMemory | torch.Tensor | list[torch.Tensor] | None = None,
        align_bytes: int = REGION_ALIGN_BYTES,
        pin: bool = False,
    ) -> None:
        """Take or make the memory of `layout`; see `Storage`.

        Args:    memory: also one tensor of bytes a region, which stay their owner's.
        """
        self.layout = layout
        self.device = device
        self._storage = (
            BorrowedRegions(layout, memory)
            if isinstance(memory, list)
            else Storage(layout, device=device, memory=memory, align_bytes=align_bytes, pin=pin)
        )
        self.length_bytes = self._storage.length_bytes
        """Bytes of the pool's memory."""
        self._blocks: dict[str, tuple[PageBlock, ...]] = {}
        self._rows: dict[tuple[str, tuple[str, ...], int], PartRows] = {}
        self._bind()

    @property
    def memory(self) -> tuple[MemoryRange, ...]:
        """One range per region of the layout, in order; no tensor, so `close` does not mind it."""
        return self._storage.ranges()

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Region by region: addresses, lengths and bytes of a page.

        Page `i` of region `r` is the bytes `[addresses[r] + i * item_lens[r], + item_lens[r])`.
        """
        return (
            [part.address for part in self.memory],
            [region.length_bytes for region in self.layout.regions],
            [region.item_len for region in self.layout.regions],
        )

    def _infos_of(self, parts: Collection[str]) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes a page of the regions that have some of these parts."""
        regions = sorted({p.region for p in self.layout.planes if p.part in parts})
        everything = Pool.get_contiguous_buf_infos(self)
        addresses, lengths, items = ([column[at] for at in regions] for column in everything)
        return addresses, lengths, items

    def move_pages(
        self, tgt_pages: torch.Tensor, src_pages: torch.Tensor, group: str | None = None
    ) -> None:
        """All of page `src_pages[i]` to page `tgt_pages[i]`; the two may overlap.

        Bytes that belong to no cell stay. Of a target that appears twice the last source stays.

        Raises:  SlotError, ShapeError: ids that are not pages of the group, other counts.
                 ConfigError: no such group. Nothing was moved.
        """
        name = only_group(self.layout).name if group is None else group
        if name not in self.layout.group_by_name:
            known = ", ".join(self.layout.group_by_name)
            raise ConfigError(f"no group {name!r}; there are {known}")
        pages = self.layout.group_by_name[name].pages
        target, source = (
            slots_of(ids, field, pages, self._torch_device)
            for field, ids in (("tgt_pages", tgt_pages), ("src_pages", src_pages))
        )
        moves.move_pages(map(self._block, self._page_blocks(name)), target, source)

    def rows(self, parts: str | tuple[str, ...], layer: int, group: str | None = None) -> PartRows:
        """Rows by slot of a part, or of parts that share a row, of a global layer.

        Raises:  SlotError: no such part here. ConfigError: parts apart, tiles of unknown rows.
        """
        unit = (parts,) if isinstance(parts, str) else parts
        name = only_group(self.layout).name if group is None else group
        found = self._rows.get((name, unit, layer))
        if found is None:
            planes = [self.layout.planes_by_key.get((name, part, layer), ()) for part in unit]
            if not all(planes):
                raise SlotError(f"no part {unit} of layer {layer} in group {name} of this pool")
            found = PartRows(self.layout.group_by_name[name], widened(planes), self._storage)
            self._rows[name, unit, layer] = found
        return found

    def close(self) -> None:
        """Free the memory, if it is the pool's own; the pool is of no use afterwards. Idempotent.

        Raises: BufferError while a tensor of the pool lives; the pool is as before then.
        """
        self._rows.clear()
        self._unbind()
        try:
            self._storage.close()
        except BufferError:
            self._bind()
            raise

    def _page_blocks(self, group: str) -> tuple[PageBlock, ...]:
        """What the pages of a group consist of."""
        found = self._blocks.get(group)
        if found is None:
            found = self._blocks[group] = page_blocks(self.layout, group)
        return found

    def _block(self, block: PageBlock) -> torch.Tensor:
        """Bytes of a block of every page, `[pages, length]`; a view."""
        shape = (block.pages, block.length_bytes)
        return self._storage.block(block.region, block.base, block.stride, shape)

    @property
    def _torch_device(self) -> torch.device:
        return self._storage.raw.device

    def _bind(self) -> None:
        """Make what keeps tensors of the memory."""

    def _unbind(self) -> None:
        """Let go of it."""


class TokenPool(Pool):
    """A pool of one group of token pages."""

    cpu_offloading_chunk_size = CHUNK_SLOTS
    """Rows of one chunk of a host copy."""
    requires_physical_write_loc = False
    """Whether ids of a write that are marked as virtual are refused: in unified memory."""
    layer_transfer_counter: LayerCounter | None = None
    """Who reads a layer's buffers waits for it first."""

    def register_layer_transfer_counter(self, layer_transfer_counter: LayerCounter | None) -> None:
        """Let reads of a layer's buffers wait until its bytes have come in; None: wait no more.

        `get_key_buffer` and its like wait, in the caller's thread, for the place of the layer among
        the pool's layers, from 0; writes, host copies and moves do not.
        """
        self.layer_transfer_counter = layer_transfer_counter

    def get_cpu_copy(
        self,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> HostCopy:
        """The rows of some slots in all layers, on the host; drafts' layers come last.

        Args:    indices: slots in any order, repeats allowed. The other two are for pools that
                 hold states.
        Returns: `[layer][chunk]` of `[K, V]` (MLA: of one tensor), rows `[n, heads, dim]` as they
                 are stored.
        Raises:  SlotError, ShapeError: no slots of this pool.
        """
        del mamba_indices, req_pool_index
        loc = self._loc(indices, "indices")
        chunk = self.cpu_offloading_chunk_size
        return copy_out(self._layer_rows(), loc, self._copy_dtype, chunk)

    def load_cpu_copy(
        self,
        kv_cache_cpu: Sequence[Sequence[Chunk]],
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Write a copy to other slots; one taken from any layout of the same geometry.

        Args:    kv_cache_cpu: what `get_cpu_copy` gave. indices: as many slots as it has rows, in
                 its order; of a slot that appears twice the last row stays.
        Raises:  SlotError, ShapeError: no slots of this pool, or a copy of another geometry;
                 nothing was written.
        """
        del mamba_indices, req_pool_index
        loc = self._loc(indices, "indices")
        copy_in(self._layer_rows(), loc, kv_cache_cpu, self._copy_dtype)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Every row of slot `src_loc[i]` to slot `tgt_loc[i]`, in all layers; they may overlap.

        Of a target that appears twice the last source stays.

        Raises:  SlotError, ShapeError: ids that are not slots, other counts; nothing was moved.
        """
        target, source = self._loc(tgt_loc, "tgt_loc"), self._loc(src_loc, "src_loc")
        moves.move_slots((rows for units in self._layer_rows() for rows in units), target, source)

    def check_cpu_copy(self, kv_cache_cpu: Sequence[Sequence[Chunk]], count: int) -> None:
        """Refuses a copy that is not of `count` rows of this pool's geometry.

        Raises:  ShapeError.
        """
        check_copy(self._layer_rows(), count, kv_cache_cpu, self._copy_dtype)

    def checked_slots(self, loc: torch.Tensor, name: str = "indices") -> torch.Tensor:
        """`loc` as slot ids, int64 on the pool's device.

        Raises:  SlotError, ShapeError: ids that are not slots of this pool.
        """
        return self._loc(loc, name)

    @property
    def slots(self) -> int:
        """All of them, those of reserved pages included."""
        group = only_group(self.layout)
        return group.pages * group.page_size

    @property
    def _copy_dtype(self) -> str:
        return self.layout.dtype

    def _layer_rows(self) -> list[list[PartRows]]:
        """Rows of every unit, by layer, ascending."""
        group = only_group(self.layout)
        units = units_of(self.layout)
        return [
            [
                self.rows(unit, layer)
                for unit in units
                if (group.name, unit[0], layer) in self.layout.planes_by_key
            ]
            for layer in self.layout.layers
        ]

    def _wait_for(self, layer_id: int) -> None:
        """Wait for the bytes of a layer of this pool, where they are still coming in."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(self.layout.layers.index(layer_id))

    def _target(self, loc: object, where: str) -> torch.Tensor:
        """The slots of a write, without waiting for a GPU."""
        if self.requires_physical_write_loc:
            check_physical(loc, where)
        return self._loc(slots_to_write(loc), "loc", wait=False)

    def _loc(self, loc: object, name: str, *, wait: bool = True) -> torch.Tensor:
        return slots_of(loc, name, self.slots, self._torch_device, wait=wait)

    def _write(self, layer: int, loc: torch.Tensor, rows: dict[str, torch.Tensor]) -> None:
        """Write rows of some parts of a layer, checked as a whole before the first byte.

        Args:    rows: by part, `[n, heads, width]`, of the stored dtype.
        """
        found = {part: self.rows(part, layer) for part in rows}
        for part, given in rows.items():
            check_rows(f"cache_{part}", given, (loc.numel(), found[part].heads, found[part].width))
        for part, given in rows.items():
            found[part].scatter(loc, given)


def check_rows(name: str, rows: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """Refuses rows of another shape.

    Raises:  ShapeError: naming both.
    """
    if tuple(rows.shape) != wanted:
        raise ShapeError(f"{name} has shape {tuple(rows.shape)}, needs {wanted}")

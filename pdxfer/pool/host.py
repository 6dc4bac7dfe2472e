"""A host pool behind a device pool: the same parts in an order that suits pages and their storage.

The order is one of `pdxfer.layout.builders.table`; everything here goes by that layout: a pool of
two widths, of latents, of rows with scales, with an index or a draft is not a case of its own.
A host pool has `layout` and `memory`: it can be the source or the destination of a transfer.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.host import host_layout, units_of
from pdxfer.layout.builders.parts import only_group
from pdxfer.memory import available_bytes
from pdxfer.pool.base import TokenPool
from pdxfer.pool.blocks import PageBlock, page_blocks
from pdxfer.pool.copies import kind_of
from pdxfer.pool.engine_pool import as_pool
from pdxfer.pool.host_buffer import host_shape
from pdxfer.pool.page_allocator import PageAllocator
from pdxfer.pool.refusals import HostMemoryError, ShapeError, SlotError, value_errors
from pdxfer.pool.rows import PartRows, stored_dtype

if TYPE_CHECKING:
    from pdxfer.layout import KVLayout
    from pdxfer.memory import SharedMemory

IO_BACKENDS: Final = ("kernel", "direct")
"""Names that engines give to ways of copying; here both come to the same."""
_GB: Final = 1e9
_SLOTS_END: Final = 1 << 62


class HostPool(TokenPool):
    """Pages of a device pool's parts in host memory, without reserved pages; pinned where a GPU is.

    Layers are numbered as engines do: by place among the pool's own layers, a draft's after them.
    """

    @value_errors()
    def __init__(  # noqa: PLR0913 SGLang's constructor
        self,
        device_pool: object,
        host_to_device_ratio: float = 2.0,
        host_size: float = 0,
        page_size: int | None = None,
        layout: str = "page_first",
        *,
        pages: int | None = None,
        head_groups: int = 1,
        pin_memory: bool = True,
        memory: SharedMemory | None = None,
    ) -> None:
        """Make the pool, all zero, all pages free.

        Args:
            device_pool: of one token group; what it holds, this pool holds. An engine's own pool,
                of which `pdxfer.pool.EnginePool` knows the layout, or anything with a `layout`.
            host_to_device_ratio: slots as a multiple of the device pool's.
            host_size: GB (1e9 bytes) instead; 0: by the ratio.
            page_size: None: the device pool's.
            layout: name of the order, a host one of `docs/layouts.md`.
            pages: instead of both sizes.
            head_groups: of `page_unified`.
            pin_memory: register the memory with the GPU, where there is one.
            memory: to be used instead of memory of the pool's own.

        Raises:
            ConfigError: a layout that cannot hold these parts. ResourceError: not enough memory.
        """
        self.device_pool = device_pool
        self._device = as_pool(device_pool)
        device_layout = self._device.layout
        group = only_group(device_layout)
        self.arrangement = layout
        """Name of the order; `layout` is the byte map."""
        self.page_size = group.page_size if page_size is None else page_size
        positive(page_size=self.page_size)
        if pages is None:
            slots = _slots_of_size(device_layout, host_to_device_ratio, host_size)
            pages = slots // self.page_size + 1
        made = host_layout(
            device_layout,
            layout,
            pages=pages,
            page_size=self.page_size,
            head_groups=head_groups,
        )
        page_bytes = sum(region.item_len for region in made.regions)
        if memory is None:
            _check_memory(pages * page_bytes)
        self.page_num = pages
        self.size = pages * self.page_size
        self.size_per_token = page_bytes // self.page_size
        """Bytes of a token in all layers."""
        self.dtype = made.dtype
        self.allocator = PageAllocator(pages, self.page_size)
        super().__init__(made, memory=memory, align_bytes=1, pin=pin_memory)

    # -- pages ---------------------------------------------------------------------------------
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Token ids of free pages, or None where there are too few; see `PageAllocator`."""
        return self.allocator.alloc(need_size)

    def free(self, indices: torch.Tensor) -> int:
        """Give pages back; returns how many tokens. A page that is free already is refused."""
        return self.allocator.free(indices)

    def available_size(self) -> int:
        """Tokens of the free pages."""
        return self.allocator.available_size()

    def clear(self) -> None:
        """All pages are free again; their bytes stay."""
        self.allocator.clear()

    @property
    def kv_buffer(self) -> torch.Tensor:
        """The whole memory with the axes of the layout; a view.

        `layer_first` `[2, L, N, H, D]`, `page_first` `[2, N, L, H, D]`, `page_first_direct`
        `[2, P, L, page_size, H, D]`, `page_head` `[2, P, H, page_size, L, D]`; without the first
        axis where the pool has one tensor a layer (latents).

        Raises:  ShapeError: parts of other shapes, which are no one tensor, or `page_unified`.
        """
        shape = host_shape(self, self.arrangement)
        return self._storage.strided(
            self.store_dtype, 0, shape, torch.empty(shape, device="meta").stride()
        )

    # -- a page as bytes -----------------------------------------------------------------------
    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page that begins at token id `index`, of `store_dtype`.

        Flat it is a copy: K, then V (then scales, index keys, draft lanes), each in the element
        order of the layout: pages of two layouts are other strings of bytes. Not flat it is that
        page of `kv_buffer`, a view with the same axes.

        Raises:  ShapeError, SlotError: not the first token of a page, no int; not flat a pool that
                 has no `kv_buffer`.
        """
        page = self._page(index)
        if not flat:
            behind = {"layer_first": 3, "page_first": 4}.get(self.arrangement, 5)
            buffer, step = self.kv_buffer, self.page_size if behind < 5 else 1
            return buffer.narrow(buffer.ndim - behind, page * step, step)
        pieces = [self._block(block)[page] for block in self._flat_blocks]
        return torch.cat(pieces).view(self.store_dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Zeros as long as a page, to be read into; pinned where the pool is."""
        length = self.size_per_token * self.page_size // self.store_dtype.itemsize
        return torch.zeros(length, dtype=self.store_dtype, pin_memory=self._storage.pinned)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write what `get_data_page` of a pool of this layout gave to the page at token `index`.

        Raises:  ShapeError, SlotError: another length or dtype, no page; nothing was written.
        """
        page = self._page(index)
        length = self.size_per_token * self.page_size
        given = data_page.contiguous().reshape(-1)
        if given.nbytes != length or given.dtype not in (self.store_dtype, torch.uint8):
            raise ShapeError(
                f"data_page has {given.nbytes} bytes of {given.dtype}; a page has {length} of "
                f"{self.store_dtype}"
            )
        rest = given.to("cpu").view(torch.uint8)
        for block in self._flat_blocks:
            self._block(block)[page] = rest[: block.length_bytes]
            rest = rest[block.length_bytes :]

    # -- a page as addresses -------------------------------------------------------------------
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and lengths of what pages consist of.

        Args:    indices: token ids, `page_size` for each page, of which the first counts.
        Returns: page by page; inside by layer, then K, V: one pair a page where all layers of a
                 part lie together, one a layer where they do not.
        Raises:  ShapeError, SlotError: no whole pages of this pool.
        """
        return self._meta(self._pages(indices), [self._meta_blocks])

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor, split_factor: int
    ) -> tuple[list[int], list[int]]:
        """Addresses and lengths of the head groups of pages, so that ranks of other TP share them.

        Returns: page by page, head group by head group, K then V.
        Raises:  ShapeError: a layout in which the heads of a page do not lie together, or a
                 split_factor that does not divide the heads. SlotError: no pages of this pool.
        """
        if self.arrangement != "page_head":
            raise ShapeError(
                "get_split_heads_page_buffer_meta requires layout='page_head', got "
                f"layout={self.arrangement!r}."
            )
        return self._meta(self._pages(indices), self._head_group_blocks(split_factor))

    # -- between host and device ---------------------------------------------------------------
    def load_to_device_per_layer(
        self,
        device_pool: object,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str = "kernel",
    ) -> None:
        """Rows of one layer from here into a device pool of any layout.

        Args:    layer_id: place of the layer in the pool, from 0.
        Raises:  ShapeError, SlotError: other parts, no slots, other counts, no such layer; nothing
                 was written.
        """
        pool = self._known(device_pool)
        host, device = self._slots(pool, host_indices, device_indices, io_backend)
        if not 0 <= layer_id < len(self.layout.layers):
            raise SlotError(f"layer_id {layer_id} is outside 0 to {len(self.layout.layers) - 1}")
        for theirs, mine in self._pairs(pool, self.layout.layers[layer_id]):
            theirs.scatter(device, mine.gather(host).to(device.device))

    def backup_from_device_all_layer(
        self,
        device_pool: object,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str = "kernel",
    ) -> None:
        """Rows of every layer, a draft's too, from a device pool of any layout to here.

        Raises:  ShapeError, SlotError: other parts, no slots, other counts; nothing was written.
        """
        pool = self._known(device_pool)
        host, device = self._slots(pool, host_indices, device_indices, io_backend)
        for layer in self.layout.layers:
            for theirs, mine in self._pairs(pool, layer):
                mine.scatter(host, theirs.gather(device).to("cpu"))

    # -- inside --------------------------------------------------------------------------------
    def _bind(self) -> None:
        self.store_dtype = stored_dtype(self.layout.dtype)
        """Type of an element; bytes where the parts of a page have several types."""
        if len({stored_dtype(plane.dtype) for plane in self.layout.planes}) > 1:
            self.store_dtype = torch.uint8
        group = only_group(self.layout).name
        units = units_of(self.layout)
        self._unit_blocks = [page_blocks(self.layout, group, parts=unit) for unit in units]
        self._flat_blocks = [block for blocks in self._unit_blocks for block in blocks]
        """The blocks in the order of a flat page."""
        together = [page_blocks(self.layout, group)] if self.arrangement == "page_unified" else []
        numbered = [
            (block.layer, number, block)
            for number, blocks in enumerate(together or self._unit_blocks)
            for block in blocks
        ]
        self._meta_blocks = [block for _, _, block in sorted(numbered)]

    def _head_group_blocks(self, split_factor: int) -> list[list[PageBlock]]:
        """The blocks of each head group."""
        groups: list[list[PageBlock]] = [[] for _ in range(max(split_factor, 0))]
        for unit in units_of(self.layout):
            plane = next(p for p in self.layout.planes if p.part == unit[0])
            if split_factor < 1 or plane.heads % split_factor:
                raise ShapeError(
                    f"split_factor={split_factor} must divide the {plane.heads} heads of {unit[0]}"
                )
            size = plane.heads // split_factor
            for number, blocks in enumerate(groups):
                first = plane.head_first + number * size
                heads = (first, first + size)
                blocks += page_blocks(self.layout, plane.group, parts=unit, heads=heads)
        return groups

    def _meta(self, pages: list[int], groups: list[list[PageBlock]]) -> tuple[list[int], list[int]]:
        addresses, lengths = [], []
        for page in pages:
            for blocks in groups:
                for block in blocks:
                    offset = block.base + page * block.stride
                    addresses.append(self._storage.address(block.region, offset))
                    lengths.append(block.length_bytes)
        return addresses, lengths

    def _page(self, index: int) -> int:
        try:
            page, row = divmod(operator.index(index), self.page_size)
        except TypeError as error:
            raise ShapeError(f"index is {index!r}; the id of a token, an int, is needed") from error
        if row or not 0 <= page < self.page_num:
            raise SlotError(
                f"index {index} is not the first of {self.page_size} tokens of one of "
                f"{self.page_num} pages"
            )
        return page

    def _pages(self, indices: torch.Tensor) -> list[int]:
        loc = self._loc(indices, "indices")
        if loc.numel() % self.page_size:
            raise ShapeError(
                f"indices has {loc.numel()} token ids, no multiple of page_size={self.page_size}"
            )
        return [self._page(index) for index in loc[:: self.page_size].tolist()]

    def _known(self, device_pool: object) -> TokenPool:
        """A device pool by its layout.

        Raises:  ShapeError: nothing that has rows by slot.
        """
        pool = self._device if device_pool is self.device_pool else as_pool(device_pool)
        if not isinstance(pool, TokenPool):
            raise ShapeError(f"device_pool is {kind_of(device_pool)}; a pool of tokens is needed")
        return pool

    def _slots(
        self,
        device_pool: TokenPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Checked slots of both pools; refuses a device pool of other parts."""
        if io_backend not in IO_BACKENDS:
            raise ShapeError(f"Unsupported IO backend: {io_backend}")
        host = self._loc(host_indices, "host_indices")
        device = device_pool.checked_slots(device_indices, "device_indices")
        if host.numel() != device.numel():
            raise ShapeError(f"{host.numel()} host_indices for {device.numel()} device_indices")
        mine, theirs = self.layout.planes_by_key.keys(), device_pool.layout.planes_by_key.keys()
        if mine != theirs:
            odd = min(mine ^ theirs)
            raise ShapeError(f"part {odd[1]} of layer {odd[2]} is in one of the two pools only")
        for layer in self.layout.layers:
            for there, here in self._pairs(device_pool, layer):
                if (there.heads, there.width, there.dtype) != (here.heads, here.width, here.dtype):
                    raise ShapeError(
                        f"{here.part} of layer {layer} is {here.heads} x {here.width} {here.dtype} "
                        f"here, {there.heads} x {there.width} {there.dtype} in the device pool"
                    )
        return host, device

    def _pairs(self, device_pool: TokenPool, layer: int) -> list[tuple[PartRows, PartRows]]:
        """Rows of every unit of a layer, there and here."""
        group = only_group(self.layout).name
        return [
            (device_pool.rows(unit, layer), self.rows(unit, layer))
            for unit in units_of(self.layout)
            if (group, unit[0], layer) in self.layout.planes_by_key
        ]


def _slots_of_size(layout: KVLayout, ratio: float, size_gb: float) -> int:
    """Slots of a host pool of `size_gb`, or where that is 0 of `ratio` times the device pool's."""
    group = only_group(layout)
    slots = (group.pages - group.reserved_pages) * group.page_size * ratio
    if size_gb > 0:
        slots = size_gb * _GB // _token_bytes(layout)
    if not 0 <= slots < _SLOTS_END:
        raise ConfigError(
            f"host_to_device_ratio={ratio} and host_size={size_gb} come to {slots} slots; give a "
            "ratio, or a number of GB, that a host has memory for"
        )
    return int(slots)


def _token_bytes(layout: KVLayout) -> float:
    """Bytes of one token in all layers."""
    page = sum(plane.rows * plane.heads * plane.cell_bytes for plane in layout.planes)
    return page / only_group(layout).page_size


def _check_memory(length_bytes: int) -> None:
    """Refuses a pool that the host has no memory for, before a page of it is touched."""
    free = available_bytes()
    if length_bytes > free:
        raise HostMemoryError(
            f"Not enough host memory available. Requesting {length_bytes / _GB:.2f} GB but only "
            f"have {free / _GB:.2f} GB free. Please reduce the size of the hierarchical cache."
        )

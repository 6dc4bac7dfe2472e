"""What the pools of one rank share: geometry, memory, reading and writing by layer.

Constructor and method names are SGLang's, so that an attention backend written for its pools works
on these. A pool is also what a client attaches: it has `layout` and `memory`.

    slot = page * page_size + row;  page 0 is reserved: padding is written there, it never travels
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.dtypes import ITEM_BYTES
from pdxfer.memory import MemoryRange, SharedMemory, allocate

if TYPE_CHECKING:
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders import KVShape

RESERVED_PAGES: Final = 1
REGION_ALIGN_BYTES: Final = 4096
"""Regions that share a memory begin at multiples of it."""
_STORED_AS_BYTES: Final = frozenset({torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz})
"""Torch has no indexed store for them."""


class Layer(Protocol):
    """An attention layer, as engines hand it to their pool."""

    @property
    def layer_id(self) -> int:
        """Global."""
        ...


class KVPool(ABC):
    """K and V of some layers of one rank.

    Ownership: a pool made without `memory` owns its memory, and `close` frees it. Tensors got from
    a pool keep the memory mapped: `close` raises `BufferError` while one lives.

    Threads: as torch; nothing here is locked.
    """

    k_buffer: list[torch.Tensor]
    """By local layer, of `store_dtype`."""
    v_buffer: list[torch.Tensor]

    def __init__(  # noqa: PLR0913 SGLang's constructor
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        v_head_dim: int | None = None,
        device: str = "cpu",
        start_layer: int = 0,
        memory: SharedMemory | None = None,
        total_kv_heads: int | None = None,
        head_first: int = 0,
        model: str = "",
    ) -> None:
        """Make the pool, all zero.

        Args:
            size: usable slots, a multiple of `page_size`. The buffers hold one more page, page 0.
            page_size: tokens of a page.
            dtype: of an element. Floats of 8 bits are stored as uint8 and viewed back on reading.
            head_num: KV heads that are here.
            head_dim: of K.
            layer_num: layers that are here, from global layer `start_layer` on.
            v_head_dim: of V; None: `head_dim`.
            device: where; other than `cpu` only an agent inside this process can reach it.
            start_layer: global id of the first layer.
            memory: to be used instead of memory of the pool's own, at least `length_bytes` long.
            total_kv_heads: of the whole model; None: `head_num`.
            head_first: global number of the first head that is here.
            model: `name@revision`, compared by both sides where both give it.

        Raises:
            ConfigError: a value that no pool has, or `memory` too small or not of this device.
            ResourceError: not enough memory.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in ITEM_BYTES:
            raise ConfigError(f"dtype={dtype}: a cache has one of {', '.join(ITEM_BYTES)}")
        if size < 1 or page_size < 1 or size % page_size:
            raise ConfigError(
                f"size={size} must be a positive multiple of page_size={page_size} slots"
            )
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in _STORED_AS_BYTES else dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.layer_num = layer_num
        self.start_layer = start_layer
        self.end_layer = start_layer + layer_num - 1
        """Global id of the last layer."""
        self.device = device
        self.pages = size // page_size + RESERVED_PAGES
        """The reserved one included."""
        self.layout: KVLayout = self._make_layout(
            layers=range(start_layer, start_layer + layer_num),
            kv_heads=head_num,
            head_dim=head_dim,
            v_head_dim=self.v_head_dim,
            page_size=page_size,
            pages=self.pages,
            dtype=name,
            total_kv_heads=total_kv_heads,
            head_first=head_first,
            reserved_pages=RESERVED_PAGES,
            model=model,
        )
        self._offsets, self.length_bytes = _place(
            [region.length_bytes for region in self.layout.regions]
        )
        self._owned = memory is None and device == "cpu"
        self._shared = allocate(self.length_bytes) if self._owned else memory
        self._open()

    # -- reading and writing -------------------------------------------------------------------
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self.k_buffer[self._local(layer_id)])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self.v_buffer[self._local(layer_id)])

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self, layer: int | Layer, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write tokens of one layer.

        Shapes:  loc [n], slots; cache_k [n, head_num, head_dim]; cache_v [n, head_num, v_head_dim];
                 other dtypes are converted.
        Raises:  ConfigError: another shape, a negative slot, a layer that is not here.
                 IndexError: a slot behind the pool (on a GPU, torch's own way to say so).
        """
        local = self._local(layer if isinstance(layer, int) else layer.layer_id)
        if loc.ndim != 1 or loc.is_floating_point():
            raise ConfigError(f"loc must be one-dimensional slot ids, got {loc.dtype} {loc.shape}")
        if loc.device.type == "cpu" and loc.numel() and int(loc.min()) < 0:
            raise ConfigError(f"loc has slot {int(loc.min())}; slots begin at 0")
        for name, rows, dim in (("k", cache_k, self.head_dim), ("v", cache_v, self.v_head_dim)):
            wanted = (loc.numel(), self.head_num, dim)
            if tuple(rows.shape) != wanted:
                raise ConfigError(f"cache_{name} has shape {tuple(rows.shape)}, needs {wanted}")
        where = self._index(loc)
        self.k_buffer[local][where] = self._storable(cache_k)
        self.v_buffer[local][where] = self._storable(cache_v)

    # -- for transfer --------------------------------------------------------------------------
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Region by region: addresses, lengths and bytes of a page.

        Page `i` of region `r` is the bytes `[addresses[r] + i * item_lens[r], + item_lens[r])`.
        """
        return (
            [part.address for part in self.memory],
            [region.length_bytes for region in self.layout.regions],
            [region.item_len for region in self.layout.regions],
        )

    @property
    def memory(self) -> tuple[MemoryRange, ...]:
        """One range per region of the layout, in order; no tensor, so `close` does not mind it."""
        lengths = [region.length_bytes for region in self.layout.regions]
        if self._shared is not None:
            return tuple(map(self._shared.range, self._offsets, lengths))
        base = self._raw.data_ptr()
        return tuple(
            MemoryRange(base + offset, length, self._raw)
            for offset, length in zip(self._offsets, lengths, strict=True)
        )

    def close(self) -> None:
        """Free the memory, if it is the pool's own; the pool is of no use afterwards. Idempotent.

        Raises: BufferError while a tensor of the pool lives; the pool is as before then.
        """
        if not hasattr(self, "_raw"):
            return
        del self._raw, self.k_buffer, self.v_buffer
        if self._shared is None or not self._owned:
            return
        try:
            self._shared.close()
        except BufferError:
            self._open()
            raise

    # -- what a kind of pool says --------------------------------------------------------------
    @staticmethod
    @abstractmethod
    def _make_layout(**shape: Unpack[KVShape]) -> KVLayout:
        """The builder of this kind."""

    @abstractmethod
    def _make_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of every layer, as views of `_raw`."""

    @abstractmethod
    def _index(self, loc: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What indexes the slots `loc` in a layer's view."""

    # -- inside --------------------------------------------------------------------------------
    def _open(self) -> None:
        if self._shared is None:
            self._raw = torch.zeros(self.length_bytes, dtype=torch.uint8, device=self.device)
        elif self.device != "cpu" or self._shared.length_bytes < self.length_bytes:
            raise ConfigError(
                f"memory has {self._shared.length_bytes} bytes of the host; a pool on "
                f"device={self.device} needs {self.length_bytes} bytes there"
            )
        else:
            whole = torch.from_numpy(np.frombuffer(self._shared.buffer, np.uint8))
            self._raw = whole[: self.length_bytes]
        self.k_buffer, self.v_buffer = self._make_views()

    def _region(self, index: int) -> torch.Tensor:
        """The bytes of a region."""
        offset = self._offsets[index]
        return self._raw[offset : offset + self.layout.regions[index].length_bytes]

    def _local(self, layer_id: int) -> int:
        if not self.start_layer <= layer_id <= self.end_layer:
            raise ConfigError(
                f"layer {layer_id} is not in this pool, which has layers {self.start_layer} to "
                f"{self.end_layer}"
            )
        return layer_id - self.start_layer

    def _readable(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.store_dtype == self.dtype else stored.view(self.dtype)

    def _storable(self, rows: torch.Tensor) -> torch.Tensor:
        converted = rows.to(device=self.device, dtype=self.dtype)
        return converted if self.store_dtype == self.dtype else converted.view(self.store_dtype)


def _place(lengths: list[int]) -> tuple[list[int], int]:
    """Offsets of regions in one memory, and its length."""
    offsets, end = [], 0
    for length in lengths:
        start = -(-end // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        offsets.append(start)
        end = start + length
    return offsets, end

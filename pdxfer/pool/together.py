"""Two pools as one cache.

Each is a pool of its own with its own ids; together they are one layout of two groups, and one
cache for a client. Where both lie in one buffer (unified memory) it is one region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout import combine
from pdxfer.pool.base import TokenPool

if TYPE_CHECKING:
    import torch

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange
    from pdxfer.pool.device_pool_info import DevicePoolInfo
    from pdxfer.pool.kv import KVPool
    from pdxfer.pool.layers import LayerCounter
    from pdxfer.pool.mla import MLAPool
    from pdxfer.pool.state import StatePool


class PoolPair:
    """Two pools as one cache."""

    layer_transfer_counter: LayerCounter | None = None
    """Who reads a layer's buffers waits for it first."""

    def __init__(self, full: KVPool | MLAPool, other: KVPool | StatePool) -> None:
        self._pools: tuple[KVPool | MLAPool, KVPool | StatePool] = (full, other)
        one_region = full.memory[0].address == other.memory[0].address
        self.layout: KVLayout = combine(full.layout, other.layout, one_region=one_region)
        """Layout of both groups together."""
        self._one_region = one_region

    @property
    def memory(self) -> tuple[MemoryRange, ...]:
        """One range per region of the layout, in order."""
        full, other = self._pools
        return full.memory if self._one_region else full.memory + other.memory

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the full-attention pool."""
        return self._pools[0].get_contiguous_buf_infos()

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes a page of the other pool's regions."""
        return self._pools[1].get_contiguous_buf_infos()

    def register_layer_transfer_counter(self, layer_transfer_counter: LayerCounter | None) -> None:
        """Let reads of a layer's buffers wait until its bytes have come in; None: wait no more.

        They wait here, for the place of the layer among those of both pools; the two pools
        themselves wait no more.
        """
        self.layer_transfer_counter = layer_transfer_counter
        for pool in self._pools:
            if isinstance(pool, TokenPool):
                pool.register_layer_transfer_counter(None)

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """What a host cache behind these pools has to know: of the first, then of the other."""
        return tuple(info for pool in self._pools for info in pool.get_device_pool_infos())

    def _wait_for(self, layer_id: int) -> None:
        if self.layer_transfer_counter is not None and layer_id in self.layout.layers:
            self.layer_transfer_counter.wait_until(self.layout.layers.index(layer_id))

    def move_pages(
        self, tgt_pages: torch.Tensor, src_pages: torch.Tensor, group: str | None = None
    ) -> None:
        """Whole pages of one group; see `Pool.move_pages`. None: the full-attention group."""
        for pool in self._pools:
            if group in pool.layout.group_by_name or (group is None and pool is self._pools[0]):
                pool.move_pages(tgt_pages, src_pages)
                return
        raise ConfigError(f"no group {group!r}; there are {', '.join(self.layout.group_by_name)}")

    def close(self) -> None:
        """Free the memory that is the pools' own. Idempotent.

        Raises: BufferError while a tensor lives; call again when it is gone. The pool that it is of
            is as before, the other one may be closed.
        """
        for pool in self._pools:
            pool.close()

"""A pool of full attention beside recurrent state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.pool.copies import kind_of
from pdxfer.pool.elements import Scale
from pdxfer.pool.kv import KVPool
from pdxfer.pool.layers import Layer, layer_id_of
from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import as_tensor
from pdxfer.pool.together import PoolPair
from pdxfer.pool.write_loc import check_physical, slots_to_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdxfer.pool.copies import Chunk, HostCopy
    from pdxfer.pool.mla import MLAPool
    from pdxfer.pool.state import StateCopy, StatePool
    from pdxfer.pool.write_loc import WriteSlots


class HybridMambaPool(PoolPair):
    """A full-attention pool of any kind and the recurrent state of the other layers."""

    def __init__(self, *, full_kv_pool: KVPool | MLAPool, mamba_pool: StatePool) -> None:
        """Join two pools; `close` closes both.

        Raises:  ConfigError: a group that both have.
        """
        super().__init__(full_kv_pool, mamba_pool)
        self.full_kv_pool = full_kv_pool
        self.mamba_pool = mamba_pool

    def get_kv_size_bytes(self) -> int | tuple[int, int]:
        """Bytes of the full-attention pool, in the form that it gives; states are not counted."""
        return self.full_kv_pool.get_kv_size_bytes()

    @property
    def mem_usage(self) -> float:
        """GiB of the full-attention pool."""
        return self.full_kv_pool.mem_usage

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer with full attention."""
        self._wait_for(layer_id)
        return self.full_kv_pool.get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer with full attention."""
        self._wait_for(layer_id)
        return self.full_kv_pool.get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer with full attention."""
        self._wait_for(layer_id)
        return self.full_kv_pool.get_kv_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: int | Layer,
        loc: WriteSlots,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write into the full-attention pool; of a `loc` that bundles several, its `full_loc`."""
        layer_id = layer_id_of(layer, layer_id_override)
        if self.full_kv_pool.requires_physical_write_loc:
            check_physical(loc, "set_kv_buffer (hybrid)")
        slots = as_tensor(slots_to_write(loc, "full_loc"), "loc")
        if isinstance(self.full_kv_pool, KVPool):
            self.full_kv_pool.set_kv_buffer(layer_id, slots, cache_k, cache_v, k_scale, v_scale)
        else:
            self.full_kv_pool.set_kv_buffer(layer_id, slots, cache_k, cache_v)

    def set_kv_buffer_prefix_valid(  # noqa: PLR0913 SGLang's signature
        self,
        layer: int | Layer,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Do what the full-attention pool's method of this name does."""
        layer_id = layer_id_of(layer, layer_id_override)
        self.full_kv_pool.set_kv_buffer_prefix_valid(
            layer_id, loc_2d, commit_lens, cache_k, cache_v, k_scale, v_scale
        )

    def get_cpu_copy(
        self,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> tuple[HostCopy, StateCopy | None]:
        """Tokens and, where `mamba_indices` are given, the state of those slots, on the host.

        Args:    indices: slots of the full-attention pool. mamba_indices: `[n]` slots of the
                 states, or the 0-d one of a request; see `StatePool.get_cpu_copy`.
        """
        del req_pool_index
        copied = self.full_kv_pool.get_cpu_copy(indices)
        return copied, None if mamba_indices is None else self.mamba_pool.get_cpu_copy(
            mamba_indices
        )

    def load_cpu_copy(
        self,
        kv_cache_cpu: tuple[Sequence[Sequence[Chunk]], StateCopy | None],
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Write a copy to other slots.

        Raises:  SlotError, ShapeError: no slots, a copy of another geometry, or state without
                 `mamba_indices` or the reverse; nothing was written.
        """
        del req_pool_index
        if not isinstance(kv_cache_cpu, (list, tuple)) or len(kv_cache_cpu) != 2:
            raise ShapeError(
                f"the copy is {kind_of(kv_cache_cpu)}; a pair of the copy of the tokens and of the "
                "states is needed, as get_cpu_copy gives it"
            )
        tokens, kept = kv_cache_cpu
        if (kept is None) != (mamba_indices is None):
            raise ShapeError("state of a copy and mamba_indices must be given together")
        if kept is not None and mamba_indices is not None:
            self.mamba_pool.check_cpu_copy(kept, mamba_indices)
        # Checks all of its own before it writes, and the states are known to be right.
        self.full_kv_pool.load_cpu_copy(tokens, indices)
        if kept is not None and mamba_indices is not None:
            self.mamba_pool.load_cpu_copy(kept, mamba_indices)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Rows of the full-attention pool; the state of a request does not move with its tokens."""
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)

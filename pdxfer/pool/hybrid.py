"""Pools of two kinds of layers: full attention beside a window, or beside recurrent state.

Each kind is a pool of its own with its own ids; together they are one layout of two groups, and one
cache for a client. Where both lie in one buffer (unified memory) it is one region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout import combine
from pdxfer.pool.copies import HostCopy, take_rows
from pdxfer.pool.kv import KVPool, Layer, Scale, layer_id_of
from pdxfer.pool.moves import check_counts
from pdxfer.pool.prefix_valid import committed_rows
from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import INTEGERS, slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange
    from pdxfer.pool.base import Pool
    from pdxfer.pool.copies import Chunk
    from pdxfer.pool.kv import KVOptions
    from pdxfer.pool.mla import MLAPool
    from pdxfer.pool.state import StateCopy, StatePool


class SWACopy(TypedDict):
    """Tokens of a pool with a window, on the host."""

    full: HostCopy
    swa: HostCopy
    """Of the tokens that `swa_mask` marks, in order."""
    swa_mask: torch.Tensor
    """bool [tokens]: those that had a slot in the window."""


class _Together:
    """Two pools as one cache."""

    def __init__(self, full: Pool, other: Pool) -> None:
        self._pools = (full, other)
        one_region = full.memory[0].address == other.memory[0].address
        self.layout: KVLayout = combine(full.layout, other.layout, one_region=one_region)
        """Of both groups."""
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
        """As `get_contiguous_buf_infos`, of the other pool."""
        return self._pools[1].get_contiguous_buf_infos()

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


class SWAPool(_Together):
    """A full-attention pool and a sliding-window pool.

    Tokens are named by their slot in the full pool; `full_to_swa_index_mapping[slot]` is the slot
    in the window pool, 0 where the token has left the window. The engine's allocator keeps it.
    """

    def __init__(self, *, full_kv_pool: KVPool, swa_kv_pool: KVPool) -> None:
        """Join two pools of distinct groups and layers; `close` closes both.

        Raises:  ConfigError: a group or layer that both have.
        """
        both = set(full_kv_pool.layer_ids) & set(swa_kv_pool.layer_ids)
        if both:
            raise ConfigError(f"layer {min(both)} is in the full and in the window pool")
        super().__init__(full_kv_pool, swa_kv_pool)
        self.full_kv_pool = full_kv_pool
        self.swa_kv_pool = swa_kv_pool
        self.full_to_swa_index_mapping = torch.zeros(
            full_kv_pool.slots, dtype=torch.int64, device=full_kv_pool.device
        )

    @classmethod
    def of_sizes(
        cls,
        *,
        size_swa: int,
        swa_attention_layer_ids: Sequence[int],
        full_attention_layer_ids: Sequence[int],
        pool_class: type[KVPool],
        **options: Unpack[KVOptions],
    ) -> SWAPool:
        """Both pools of one kind and shape, with SGLang's names; `size` is of the full pool.

        `layer_num`, `layer_ids`, `group`, `memory` and `draft` of `options` are not used.
        """

        def make(size: int, layers: Sequence[int], group: str) -> KVPool:
            own: KVOptions = {
                **options,
                "size": size,
                "layer_num": len(layers),
                "layer_ids": tuple(layers),
                "group": group,
                "memory": None,
                "draft": None,
            }
            return pool_class(**own)

        return cls(
            full_kv_pool=make(options["size"], full_attention_layer_ids, "full"),
            swa_kv_pool=make(size_swa, swa_attention_layer_ids, "swa"),
        )

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Take the allocator's mapping, `[slots of the full pool]`; it is read at each call.

        Raises:  ShapeError: too short, or no one-dimensional integers.
        """
        if full_to_swa_index_mapping.ndim != 1 or full_to_swa_index_mapping.dtype not in INTEGERS:
            raise ShapeError(
                "the mapping must be one-dimensional integers, got "
                f"{full_to_swa_index_mapping.dtype} {tuple(full_to_swa_index_mapping.shape)}"
            )
        if full_to_swa_index_mapping.numel() < self.full_kv_pool.slots:
            raise ShapeError(
                f"the mapping has {full_to_swa_index_mapping.numel()} slots, the full pool "
                f"{self.full_kv_pool.slots}"
            )
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Slots in the window pool, int64 [n]; 0 where a token has none."""
        mapping = self.full_to_swa_index_mapping
        loc = slots_of(kv_indices, "kv_indices", self.full_kv_pool.slots, mapping.device)
        return mapping[loc].to(torch.int64)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer."""
        return self._pool(layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer."""
        return self._pool(layer_id).get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        return self._pool(layer_id).get_kv_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: int | Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """As `KVPool.set_kv_buffer`; `loc` are slots of the full pool in every layer."""
        layer_id = layer_id_of(layer, layer_id_override)
        pool = self._pool(layer_id)
        if pool is self.swa_kv_pool:
            loc = self.translate_loc_from_full_to_swa(loc)
        pool.set_kv_buffer(layer_id, loc, cache_k, cache_v, k_scale, v_scale)

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
        """As `KVPool.set_kv_buffer_prefix_valid`; `loc_2d` are slots of the full pool."""
        layer_id = layer_id_of(layer, layer_id_override)
        pool = self._pool(layer_id)
        if pool is self.swa_kv_pool:
            given = {"cache_k": cache_k, "cache_v": cache_v}
            loc, at = committed_rows(loc_2d, commit_lens, given, loc_2d.device)
            translated = torch.zeros(loc_2d.numel(), dtype=torch.int64, device=loc_2d.device)
            translated[at] = self.translate_loc_from_full_to_swa(loc).to(loc_2d.device)
            loc_2d = translated.reshape(loc_2d.shape)
        pool.set_kv_buffer_prefix_valid(
            layer_id, loc_2d, commit_lens, cache_k, cache_v, k_scale, v_scale
        )

    def get_cpu_copy(
        self,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> SWACopy:
        """Tokens of both pools on the host; `indices` are slots of the full pool."""
        del mamba_indices, req_pool_index
        window = self.translate_loc_from_full_to_swa(indices)
        mask = window > 0
        return SWACopy(
            full=self.full_kv_pool.get_cpu_copy(indices),
            swa=self.swa_kv_pool.get_cpu_copy(window[mask]),
            swa_mask=mask.to("cpu"),
        )

    def load_cpu_copy(
        self,
        kv_cache_cpu: SWACopy,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Write a copy to other slots; the window's rows where the token has a slot there now too.

        Raises:  SlotError, ShapeError: ids that are not slots of the full pool, or that the mapping
                 sends out of the window pool; a copy of another geometry. Nothing was written.
        """
        del mamba_indices, req_pool_index
        slots = self.full_kv_pool.checked_slots(indices)
        window = self.translate_loc_from_full_to_swa(slots)
        saved = _saved_mask(kv_cache_cpu, slots.numel())
        here = (window > 0).to("cpu")
        self.full_kv_pool.check_cpu_copy(kv_cache_cpu["full"], slots.numel())
        self.swa_kv_pool.check_cpu_copy(kv_cache_cpu["swa"], int(saved.sum()))
        rows = take_rows(kv_cache_cpu["swa"], here[saved])
        to = self._window_slots(window, saved & here, "indices")
        self.full_kv_pool.load_cpu_copy(kv_cache_cpu["full"], slots)
        self.swa_kv_pool.load_cpu_copy(rows, to)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Rows of both pools; the window's where source and target have a slot there.

        Raises:  SlotError, ShapeError: ids that are not slots of the full pool, or that the mapping
                 sends out of the window pool; other counts. Nothing was moved.
        """
        target = self.full_kv_pool.checked_slots(tgt_loc, "tgt_loc")
        source = self.full_kv_pool.checked_slots(src_loc, "src_loc")
        check_counts(target, source)
        there, here = map(self.translate_loc_from_full_to_swa, (target, source))
        both = (there > 0) & (here > 0)
        to = self._window_slots(there, both, "tgt_loc")
        of = self._window_slots(here, both, "src_loc")
        self.full_kv_pool.move_kv_cache(target, source)
        self.swa_kv_pool.move_kv_cache(to, of)

    def _window_slots(self, window: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
        """The marked ones of translated slots, checked before either pool is written to."""
        marked = window[mask.to(window.device)]
        return self.swa_kv_pool.checked_slots(marked, f"the mapping of {name} to the window pool")

    def _pool(self, layer_id: int) -> KVPool:
        in_window = layer_id in self.swa_kv_pool.layer_ids
        return self.swa_kv_pool if in_window else self.full_kv_pool


class HybridMambaPool(_Together):
    """A full-attention pool of any kind and the recurrent state of the other layers."""

    def __init__(self, *, full_kv_pool: KVPool | MLAPool, mamba_pool: StatePool) -> None:
        """Join two pools; `close` closes both.

        Raises:  ConfigError: a group that both have.
        """
        super().__init__(full_kv_pool, mamba_pool)
        self.full_kv_pool = full_kv_pool
        self.mamba_pool = mamba_pool

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer with full attention."""
        return self.full_kv_pool.get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer with full attention."""
        return self.full_kv_pool.get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer with full attention."""
        return self.full_kv_pool.get_kv_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: int | Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """As the full-attention pool's."""
        layer_id = layer_id_of(layer, layer_id_override)
        if isinstance(self.full_kv_pool, KVPool):
            self.full_kv_pool.set_kv_buffer(layer_id, loc, cache_k, cache_v, k_scale, v_scale)
        else:
            self.full_kv_pool.set_kv_buffer(layer_id, loc, cache_k, cache_v)

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
        """As the full-attention pool's."""
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
        """Tokens and, where `mamba_indices` are given, the state of those slots, on the host."""
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
        tokens, kept = kv_cache_cpu
        if (kept is None) != (mamba_indices is None):
            raise ShapeError("state of a copy and mamba_indices must be given together")
        slots = self.full_kv_pool.checked_slots(indices)
        self.full_kv_pool.check_cpu_copy(tokens, slots.numel())
        if kept is not None and mamba_indices is not None:
            # Checks all of its own before it writes, and the tokens are known to be right.
            self.mamba_pool.load_cpu_copy(kept, mamba_indices)
        self.full_kv_pool.load_cpu_copy(tokens, slots)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Rows of the full-attention pool; the state of a request does not move with its tokens."""
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)


def _saved_mask(copied: SWACopy, tokens: int) -> torch.Tensor:
    """Which of `tokens` tokens have rows of the window in a copy, bool on the host.

    Raises:  ShapeError: a mask of other tokens, or none.
    """
    saved = copied["swa_mask"].to("cpu")
    if saved.shape != (tokens,):
        raise ShapeError(f"the copy has {saved.numel()} tokens for {tokens} indices")
    if saved.dtype != torch.bool:
        raise ShapeError(f"swa_mask of the copy has dtype {saved.dtype}; it must be torch.bool")
    return saved

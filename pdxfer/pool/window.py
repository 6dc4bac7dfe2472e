"""A pool of full attention beside one of a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

import torch

from pdxfer.errors import ConfigError
from pdxfer.pool.buffers import GIB
from pdxfer.pool.copies import HostCopy, kind_of, take_rows
from pdxfer.pool.elements import Scale
from pdxfer.pool.kv import KVPool
from pdxfer.pool.layers import Layer, end_layer_of, layer_id_of
from pdxfer.pool.moves import check_counts
from pdxfer.pool.prefix_valid import committed_rows
from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import INTEGERS, as_tensor, slots_of
from pdxfer.pool.together import PoolPair
from pdxfer.pool.write_loc import check_physical, is_write_loc, slots_to_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from pdxfer.pool.kv import KVOptions
    from pdxfer.pool.write_loc import WriteSlots


NO_SLOT: Final = -1
"""Stands for no token in a list of slots that kernels read."""


class SWACopy(TypedDict):
    """Tokens of a pool with a window, on the host."""

    full: HostCopy
    swa: HostCopy | None
    """Copy of the tokens that `swa_mask` marks, in order; None where it marks none."""
    swa_mask: torch.Tensor | None
    """bool [tokens]: those that had a slot in the window. None: all of them, or none where `swa`
    is None."""


class SWAPool(PoolPair):
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

        `layer_num`, `layer_ids`, `group`, `memory` and `draft` of `options` are not used;
        `end_layer` is of all layers.
        """
        end_layer_of(
            options.get("end_layer"), (*swa_attention_layer_ids, *full_attention_layer_ids)
        )

        def make(size: int, layers: Sequence[int], group: str) -> KVPool:
            own: KVOptions = {
                **options,
                "size": size,
                "layer_num": len(layers),
                "layer_ids": tuple(layers),
                "group": group,
                "memory": None,
                "draft": None,
                "end_layer": None,
            }
            return pool_class(**own)

        return cls(
            full_kv_pool=make(options["size"], full_attention_layer_ids, "full"),
            swa_kv_pool=make(size_swa, swa_attention_layer_ids, "swa"),
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V of both pools."""
        (full_k, full_v), (window_k, window_v) = (
            pool.get_kv_size_bytes() for pool in (self.full_kv_pool, self.swa_kv_pool)
        )
        return full_k + window_k, full_v + window_v

    @property
    def mem_usage(self) -> float:
        """GiB of K and V of both pools."""
        return sum(self.get_kv_size_bytes()) / GIB

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
        """Slots in the window pool, int64 [n]; 0 where a token has none, -1 where `kv_indices` has.

        Raises:  SlotError, ShapeError: ids that are neither slots of the full pool nor -1.
        """
        mapping = self.full_to_swa_index_mapping
        given = as_tensor(kv_indices, "kv_indices")
        none = torch.zeros_like(given, dtype=torch.bool)
        if given.dtype.is_signed and given.dtype in INTEGERS:
            none = given == NO_SLOT
            given = given.masked_fill(none, 0)
        loc = slots_of(given, "kv_indices", self.full_kv_pool.slots, mapping.device)
        return mapping[loc].to(torch.int64).masked_fill(none.to(mapping.device), NO_SLOT)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer."""
        self._wait_for(layer_id)
        return self._pool(layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer."""
        self._wait_for(layer_id)
        return self._pool(layer_id).get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        self._wait_for(layer_id)
        return self._pool(layer_id).get_kv_buffer(layer_id)

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
        """Do what `KVPool.set_kv_buffer` does; `loc` are slots of the full pool in every layer.

        A `loc` that bundles several may have the slots of the window pool as `swa_loc`; they are
        taken as they are. Else the slots are translated here.
        """
        layer_id = layer_id_of(layer, layer_id_override)
        pool = self._pool(layer_id)
        if pool.requires_physical_write_loc:
            check_physical(loc, "set_kv_buffer (SWA)")
        slots = as_tensor(slots_to_write(loc, "full_loc"), "loc")
        if pool is self.swa_kv_pool:
            translated = getattr(loc, "swa_loc", None) if is_write_loc(loc) else None
            if translated is None:
                translated = self.translate_loc_from_full_to_swa(slots)
            slots = as_tensor(translated, "swa_loc")
        pool.set_kv_buffer(layer_id, slots, cache_k, cache_v, k_scale, v_scale)

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
        """Do what `KVPool.set_kv_buffer_prefix_valid` does; `loc_2d` are slots of the full pool."""
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
        """Tokens of both pools on the host.

        Args:    indices: slots of the full pool.
        Returns: `swa` is None where no token has a slot in the window.
        Raises:  SlotError, ShapeError: no slots of the full pool.
        """
        del mamba_indices, req_pool_index
        slots = self.full_kv_pool.checked_slots(indices)
        window = self.translate_loc_from_full_to_swa(slots)
        mask = window > 0
        return SWACopy(
            full=self.full_kv_pool.get_cpu_copy(slots),
            swa=self.swa_kv_pool.get_cpu_copy(window[mask]) if bool(mask.any()) else None,
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
        full, in_window, saved = _parts_of(kv_cache_cpu, slots.numel())
        here = (window > 0).to("cpu")
        self.full_kv_pool.check_cpu_copy(full, slots.numel())
        if in_window is None:
            self.full_kv_pool.load_cpu_copy(full, slots)
            return
        self.swa_kv_pool.check_cpu_copy(in_window, int(saved.sum()))
        rows = take_rows(in_window, here[saved])
        to = self._window_slots(window, saved & here, "indices")
        self.full_kv_pool.load_cpu_copy(full, slots)
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


def _parts_of(copied: object, tokens: int) -> tuple[HostCopy, HostCopy | None, torch.Tensor]:
    """The copy of the full pool, that of the window, and which tokens it is of (bool, on the host).

    Raises:  ShapeError: no copy of these pools, or one of other tokens.
    """
    if not isinstance(copied, dict) or not {"full", "swa"} <= copied.keys():
        raise ShapeError(
            f"the copy is {kind_of(copied)}; a dict of full, swa and swa_mask is needed, as "
            "get_cpu_copy gives it"
        )
    full, window, mask = copied["full"], copied["swa"], copied.get("swa_mask")
    if mask is None:
        mask = torch.full((tokens,), window is not None)
    if not isinstance(mask, torch.Tensor):
        raise ShapeError(f"swa_mask of the copy is {kind_of(mask)}; a tensor is needed")
    saved = mask.to("cpu")
    if saved.shape != (tokens,):
        raise ShapeError(f"the copy has {saved.numel()} tokens for {tokens} indices")
    if saved.dtype != torch.bool:
        raise ShapeError(f"swa_mask of the copy has dtype {saved.dtype}; it must be torch.bool")
    if window is None and bool(saved.any()):
        raise ShapeError(
            f"swa of the copy is None, but swa_mask marks {int(saved.sum())} tokens that had a "
            "slot in the window"
        )
    return full, window, saved

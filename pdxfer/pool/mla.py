"""Latent attention (MLA): one row a token and layer, `[latent | rope]`, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pdxfer.layout import mla
from pdxfer.pool.base import TokenPool, check_rows
from pdxfer.pool.buffers import GIB, data_ptrs, size_bytes
from pdxfer.pool.device_pool_info import DevicePoolInfo, MLABufferInfo
from pdxfer.pool.elements import Scale, storable
from pdxfer.pool.kv import RESERVED_PAGES, pool_shape
from pdxfer.pool.layers import Layer, check_memory_saver, end_layer_of, layer_id_of, shown_layers
from pdxfer.pool.prefix_valid import committed_rows
from pdxfer.pool.refusals import ShapeError, value_errors
from pdxfer.pool.rows import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.memory import SharedMemory
    from pdxfer.pool.write_loc import WriteSlots

_ROW: Final = ("latent", "rope")


class MLAPool(TokenPool):
    """Keys are whole rows `[slots, 1, kv_lora_rank + qk_rope_head_dim]`; values their latent part.

    Arrangements are those of `pdxfer.layout.mla`.
    """

    kv_buffer: list[torch.Tensor]
    """Whole rows by local layer, of `store_dtype`."""
    data_ptrs: torch.Tensor
    """uint64 addresses of `kv_buffer`."""

    dsa_kv_cache_store_fp8 = False
    """Whether rows are packed: 8-bit floats with their scales, then the rope as bfloat16."""

    @value_errors()
    def __init__(  # noqa: PLR0913 SGLang's constructor
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str = "cpu",
        start_layer: int = 0,
        memory: SharedMemory | torch.Tensor | None = None,
        model: str = "",
        layer_ids: Sequence[int] | None = None,
        group: str = "full",
        reserved_pages: int = RESERVED_PAGES,
        arrangement: str = "token_major",
        end_layer: int | None = None,
        enable_memory_saver: bool = False,
    ) -> None:
        """Make the pool, all zero. Arguments as `KVPool`, and the two widths of a row.

        Raises:
            ConfigError: a value that no pool has, or `memory` too small or not of this device.
            ResourceError: not enough memory.
        """
        check_memory_saver(enable_memory_saver)
        name, ids = pool_shape(size, page_size, dtype, (start_layer, layer_num, layer_ids))
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = stored_dtype(name)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = sum(self._row_widths())
        """Elements of a row, as it is stored."""
        self.layer_num = layer_num
        self.start_layer = min(ids, default=start_layer)
        self.end_layer = end_layer_of(end_layer, ids)
        self.layer_ids = self.model_layer_ids = ids
        self.requires_physical_write_loc = arrangement == "unified_entries"
        self.pages = size // page_size + reserved_pages
        layout = self._make_layout(
            layers=ids,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            page_size=page_size,
            pages=self.pages,
            dtype=name,
            arrangement=arrangement,
            reserved_pages=reserved_pages,
            group=group,
            model=model,
        )
        super().__init__(layout, device=device, memory=memory)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Whole rows of a global layer, of `dtype`; shares the pool's memory."""
        self._check_layer(layer_id)
        self._wait_for(layer_id)
        stored = self.rows(_ROW, layer_id).view
        return stored if self.store_dtype == self.dtype else stored.view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of the rows of a global layer."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: int | Layer,
        loc: WriteSlots,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write whole rows of one layer.

        Shapes:  loc [n], slots, or an object with such a `loc`; cache_k [n, 1, kv_lora_rank +
                 qk_rope_head_dim] (or without the 1); cache_v is not read: values are a part of
                 the keys.
        Raises:  ShapeError, SlotError, ConfigError: nothing was written.
        """
        del cache_v
        layer_id = layer_id_of(layer, layer_id_override)
        self._check_layer(layer_id)
        slots = self._target(loc, "set_kv_buffer (MLA)")
        rows = cache_k.unsqueeze(1) if cache_k.ndim == 2 else cache_k
        stored = self._stored(rows, "cache_k")
        whole = self.rows(_ROW, layer_id)
        check_rows("cache_k", stored, (slots.numel(), 1, whole.width))
        whole.scatter(slots, stored)

    def set_mla_kv_buffer(
        self,
        layer: int | Layer,
        loc: WriteSlots,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Write rows that come in two tensors, `[n, 1, kv_lora_rank]` and `[n, 1, rope]`.

        Raises:  ShapeError, SlotError, ConfigError: nothing was written.
        """
        slots = self._target(loc, "set_mla_kv_buffer (MLA)")
        parts = [
            rows.unsqueeze(1) if rows.ndim == 2 else rows for rows in (cache_k_nope, cache_k_rope)
        ]
        names = ("cache_k_nope", "cache_k_rope")
        for name, rows, width in zip(names, parts, self._row_widths(), strict=True):
            check_rows(name, rows, (slots.numel(), 1, width))
        rows = torch.cat(
            [self._stored(part, name) for name, part in zip(names, parts, strict=True)], dim=2
        )
        layer_id = layer_id_of(layer, layer_id_override)
        self._check_layer(layer_id)
        self.rows(_ROW, layer_id).scatter(slots, rows)

    def get_mla_kv_buffer(
        self, layer: int | Layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rope of slots `loc`, contiguous copies `[n, 1, width]` of `dst_dtype`."""
        layer_id = layer_id_of(layer, None)
        self._check_layer(layer_id)
        slots = self._loc(loc, "loc", wait=False)
        self._wait_for(layer_id)
        rows = self.rows(_ROW, layer_id).gather(slots).view(self.dtype)
        rows = rows if dst_dtype is None else rows.to(dst_dtype)
        parts = torch.split(rows, self._row_widths(), dim=2)
        latent, rope = (part.contiguous() for part in parts)
        return latent, rope

    def set_kv_buffer_prefix_valid(  # noqa: PLR0913 SGLang's signature
        self,
        layer: int | Layer,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the first `commit_lens[b]` whole rows of every request's block.

        As `KVPool.set_kv_buffer_prefix_valid`; only the number of rows of `cache_v` is looked at,
        and rows of latents have no scales.
        """
        del k_scale, v_scale
        given = (
            {"cache_k": cache_k} if cache_v is None else {"cache_k": cache_k, "cache_v": cache_v}
        )
        loc, at = committed_rows(loc_2d, commit_lens, given, self._torch_device)
        rows = cache_k.to(self._torch_device)[at]
        self.set_kv_buffer(layer, loc, rows, layer_id_override=layer_id_override)

    def get_kv_size_bytes(self) -> int:
        """Bytes of the rows of all layers."""
        return size_bytes(self.layout)

    @property
    def mem_usage(self) -> float:
        """GiB of the rows."""
        return self.get_kv_size_bytes() / GIB

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """What a host cache behind this pool has to know; the tensors share the pool's memory."""
        info = MLABufferInfo(
            buffers=tuple(self.kv_buffer),
            data_ptrs=self.data_ptrs,
            layer_indices=tuple(range(self.layer_num)),
            device_layer_num=self.layer_num,
            page_size=self.page_size,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            kv_cache_dim=self.kv_cache_dim,
            dtype=self.store_dtype,
            device=self._torch_device,
            packed_fp8=self.dsa_kv_cache_store_fp8,
        )
        return (
            DevicePoolInfo(
                pool_name="kv",
                indices_from_pool="kv",
                layer_ids=self.layer_ids,
                buffer_info=info,
            ),
        )

    def _make_layout(self, **shape: Any) -> KVLayout:  # noqa: ANN401 those of the builder
        return mla(**shape)

    def _row_widths(self) -> list[int]:
        """Elements of the latent and of the rope part of a row, as it is stored."""
        return [self.kv_lora_rank, self.qk_rope_head_dim]

    def _stored(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Rows or a part of them as the pool stores them."""
        del name
        return storable(rows, None, self.dtype, self._torch_device)

    def _bind(self) -> None:
        self.kv_buffer = [self.rows(_ROW, layer).view for layer in self.layer_ids]
        self.data_ptrs = data_ptrs(self.kv_buffer, torch.device(self.device))

    def _unbind(self) -> None:
        self.kv_buffer = []
        self.data_ptrs = data_ptrs((), torch.device(self.device))

    def _check_layer(self, layer_id: int) -> None:
        if layer_id not in self.layer_ids:
            raise ShapeError(
                f"layer {layer_id} is not in this pool, which has layers "
                f"{shown_layers(self.layer_ids)}"
            )

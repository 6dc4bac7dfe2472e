"""What a pool says of its buffers to who builds a host cache behind it.

Field names are those of SGLang's `DevicePoolInfo`; where it has an enumeration, here is the value
of its member. The tensors share the pool's memory: `close` raises while such a description lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBuffers:
    """K and V by layer."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    k_data_ptrs: torch.Tensor
    """uint64 addresses of `k`."""
    v_data_ptrs: torch.Tensor
    layout: str
    """`nhd`: `[slots, heads, dim]`, maybe with gaps between slots; `paged_nhd`: `[pages, page_size,
    heads, dim]`; `hnd`: `[pages, heads, page_size, dim]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScaleBuffers:
    """Scales of K and V by layer."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    layout: str
    """`token`: a row a slot; `mxfp8_interleaved`: one tile a page and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MHABufferInfo:
    """Keys and values of one geometry."""

    buffers: KVBuffers
    page_size: int
    head_num: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    """Type of the elements as they are stored."""
    device: torch.device
    scales: KVScaleBuffers | None = None
    transfer_buffers: None = None
    """Only pools whose memory moves have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLABufferInfo:
    """Whole rows of latent attention by layer, `[slots, 1, kv_cache_dim]`."""

    buffers: tuple[torch.Tensor, ...]
    data_ptrs: torch.Tensor
    """uint64 addresses of `buffers`."""
    layer_indices: tuple[int, ...]
    """Places of the layers in the pool."""
    device_layer_num: int
    page_size: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dim: int
    dtype: torch.dtype
    device: torch.device
    packed_fp8: bool = False
    """Rows are floats of 8 bits with their scales, then the rope as bfloat16."""
    scales: None = None
    native_buffers: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaStateBufferInfo:
    """Recurrent states, `[layers, slots, *shape]`."""

    temporal: torch.Tensor | None
    conv: tuple[torch.Tensor, ...]
    extra_checkpoint_buffers: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolInfo:
    """The buffers of one index space of a pool."""

    pool_name: str
    """`kv`, `swa`, `mamba`; `draft` for the lanes of a draft model."""
    indices_from_pool: str
    """Whose ids name the slots."""
    layer_ids: tuple[int, ...]
    """Global, in the order of the buffers."""
    buffer_info: MHABufferInfo | MLABufferInfo | MambaStateBufferInfo

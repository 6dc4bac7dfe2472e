"""The tensors of an engine's pool, and the layout in which they must lie.

Attributes are those of SGLang's pools: `k_buffer`, `v_buffer`, `kv_buffer` by layer, `page_size`,
`head_num` and their like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdxfer.layout import dsa, head_major, k_only, mla, page_major, token_major, unified_entries
from pdxfer.layout.builders.mxfp8 import mxfp8
from pdxfer.layout.builders.parts import join_parts, only_group
from pdxfer.pool.copies import kind_of
from pdxfer.pool.refusals import ShapeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdxfer.layout import Group, KVLayout, Plane

TheirPool = Any
"""What an engine made; its attributes are read by name."""
Tensors = dict[tuple[str, int], torch.Tensor]
"""An engine's tensors by part and global layer. Where a row has several parts, the first one stands
for it."""
_PAIR = "a pool of two pools; give its full_kv_pool, or the other one of the two"


def seen(
    pool: TheirPool, heads: Mapping[str, Any], named: Mapping[str, Any]
) -> tuple[KVLayout, Tensors]:
    """The layout that an engine's pool seems to have, and its tensors.

    Args:    heads: `total_kv_heads` and `head_first`, named: reserved pages, group and model, as
             the builders of layouts take them.
    Raises:  ShapeError, ConfigError: no pool whose layout is known.
    """
    if hasattr(pool, "full_kv_pool"):
        raise ShapeError(f"device_pool is {_PAIR}")
    if hasattr(pool, "main_pool"):
        return _sparse(pool, heads, named)
    if getattr(pool, "kv_buffer", None):
        return _latent(pool, named)
    if getattr(pool, "k_buffer", None):
        return _keys_and_values(pool, heads, named)
    raise ShapeError(
        f"device_pool is {kind_of(pool)}; a pool with a layout is needed, or one of SGLang's with "
        "k_buffer and v_buffer, or kv_buffer"
    )


def regions_of(layout: KVLayout, tensors: Tensors) -> list[torch.Tensor]:
    """The bytes of each region, where the tensors lie.

    Raises:  ShapeError: a tensor is not where the layout has its cells.
    """
    group = only_group(layout)
    regions: dict[int, torch.Tensor] = {}
    for (part, layer), tensor in tensors.items():
        plane = layout.planes_by_key[group.name, part, layer][0]
        if plane.region not in regions:
            length = layout.regions[plane.region].length_bytes
            regions[plane.region] = _bytes_around(tensor, plane.base, length)
        address = regions[plane.region].data_ptr() + plane.base
        steps = _steps(plane, tensor.ndim)
        item = tensor.dtype.itemsize
        got = [stride * item for stride in tensor.stride()]
        moved = any(
            size > 1 and have != step
            for size, have, step in zip(tensor.shape, got, steps, strict=False)
        )
        width = sum(p.cell_bytes for p in layout.planes if p.layer == layer and _shares(p, part))
        if (
            tensor.data_ptr() != address
            or moved
            or got[-1] != item
            or tensor.shape[0] < _rows(group, tensor)
            or (tensor.ndim in (3, 4) and tensor.shape[-1] * item != width)
            or (tensor.ndim == 2 and tensor.shape[1] * item != plane.page_stride)
        ):
            raise ShapeError(
                f"{part} of layer {layer} of the device pool, {tuple(tensor.shape)} with strides "
                f"of {got} bytes, does not lie as its layout says: cells of {width} bytes, {steps} "
                "bytes apart; its order is not known"
            )
    return [regions[number] for number in range(len(layout.regions))]


def _keys_and_values(
    pool: TheirPool, heads: Mapping[str, Any], named: Mapping[str, Any]
) -> tuple[KVLayout, Tensors]:
    if getattr(pool, "is_quantized_kv_cache", False):
        raise ShapeError("device_pool has quantised rows of 4 bits, whose layout is not known")
    layers, k, v = _layers(pool), pool.k_buffer, getattr(pool, "v_buffer", None)
    tensors = _by_layer("k", layers, k)
    shape = _shape(pool, k[0])
    if v is None:
        layout = k_only(
            layers=layers,
            heads=pool.head_num,
            head_dim=pool.head_dim,
            heads_total=heads["total_kv_heads"],
            head_first=heads["head_first"],
            part="k",
            **shape,
            **named,
        )
        return layout, tensors
    tensors |= _by_layer("v", layers, v)
    both: dict[str, Any] = {
        "layers": layers,
        "kv_heads": pool.head_num,
        "head_dim": pool.head_dim,
        "v_head_dim": pool.v_head_dim,
        **shape,
        **heads,
        **named,
    }
    scales = getattr(pool, "k_scale_buffer", None)
    if scales:
        tensors |= _by_layer("k_scale", layers, scales)
        tensors |= _by_layer("v_scale", layers, pool.v_scale_buffer)
        return mxfp8(interleaved=scales[0].ndim == 5, **both), tensors
    if getattr(pool, "kv_cache_layout", "nhd") == "hnd":
        return head_major(**both), tensors
    if k[0].ndim == 4:
        return page_major(**both), tensors
    if not k[0].is_contiguous():
        return unified_entries(length_bytes=_bytes_behind(k[0]), **both), tensors
    return token_major(**both), tensors


def _latent(pool: TheirPool, named: Mapping[str, Any]) -> tuple[KVLayout, Tensors]:
    layers, rows = _layers(pool), pool.kv_buffer
    index = getattr(pool, "index_k_with_scale_buffer", None)
    if index:
        return _latent_with_index(pool, layers, index, named)
    packed = rows[0].is_contiguous()
    layout = mla(
        layers=layers,
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=pool.qk_rope_head_dim,
        arrangement="token_major" if packed else "unified_entries",
        length_bytes=None if packed else _bytes_behind(rows[0]),
        **_shape(pool, rows[0]),
        **named,
    )
    return layout, _by_layer("latent", layers, rows)


def _latent_with_index(
    pool: TheirPool,
    layers: Sequence[int],
    index: Sequence[torch.Tensor],
    named: Mapping[str, Any],
) -> tuple[KVLayout, Tensors]:
    """Latent rows and an index of those layers whose tensor has pages."""
    if getattr(pool, "index_kpool", 1) != 1:
        raise ShapeError("device_pool has pooled index keys, whose layout is not known")
    keys = {at: tensor for at, tensor in _by_layer("index_k", layers, index).items() if len(tensor)}
    layout = dsa(
        layers=layers,
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=pool.qk_rope_head_dim,
        index_head_dim=pool.index_head_dim,
        index_layers=[layer for _, layer in keys],
        packed=bool(getattr(pool, "dsa_kv_cache_store_fp8", False)),
        **_shape(pool, pool.kv_buffer[0]),
        **named,
    )
    return layout, _by_layer("latent", layers, pool.kv_buffer) | keys


def _sparse(
    pool: TheirPool, heads: Mapping[str, Any], named: Mapping[str, Any]
) -> tuple[KVLayout, Tensors]:
    """A main pool and index keys of some of its layers."""
    if getattr(pool, "index_kv_pool", None) is not None or pool.index_k_pool is None:
        raise ShapeError("device_pool has an index with values, whose layout is not known")
    main, tensors = _keys_and_values(pool.main_pool, heads, named)
    index = pool.index_k_pool
    layers = sorted(pool.index_k_layer_id_mapping, key=pool.index_k_layer_id_mapping.__getitem__)
    keys = k_only(
        layers=layers,
        heads=index.head_num,
        head_dim=index.head_dim,
        **_shape(index, index.k_buffer[0]),
        **named,
    )
    return join_parts(main, keys), tensors | _by_layer("index_k", layers, index.k_buffer)


def _layers(pool: TheirPool) -> list[int]:
    """Global ids of the layers of a pool."""
    first = pool.start_layer
    return list(getattr(pool, "model_layer_ids", range(first, first + pool.layer_num)))


def _shape(pool: TheirPool, rows: torch.Tensor) -> dict[str, Any]:
    by_page = rows.ndim == 4
    return {
        "page_size": pool.page_size,
        "pages": rows.shape[0] if by_page else rows.shape[0] // pool.page_size,
        "dtype": str(pool.dtype).removeprefix("torch."),
    }


def _by_layer(part: str, layers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Tensors:
    if len(tensors) != len(layers):
        raise ShapeError(
            f"device_pool has {len(tensors)} tensors of {part} for {len(layers)} layers"
        )
    return {(part, layer): tensor for layer, tensor in zip(layers, tensors, strict=True)}


def _rows(group: Group, tensor: torch.Tensor) -> int:
    """How long the first axis of a tensor must be."""
    return group.pages if tensor.ndim != 3 else group.pages * group.page_size


def _steps(plane: Plane, axes: int) -> list[int]:
    """The strides that a tensor of a plane must have, in bytes, by its axes.

    `[slots, heads, ...]`, `[pages, ...]`, `[pages, bytes]`; of 4 axes the order of rows and heads
    is the plane's.
    """
    if axes == 2:
        return [plane.page_stride]
    if axes == 3:
        return [plane.row_stride, plane.head_stride]
    if axes == 5:
        return [plane.page_stride, plane.head_stride]
    if plane.row_stride < plane.head_stride:
        return [plane.page_stride, plane.head_stride, plane.row_stride]
    return [plane.page_stride, plane.row_stride, plane.head_stride]


def _bytes_behind(tensor: torch.Tensor) -> int:
    """Bytes of the storage from the first element of a tensor on."""
    storage = tensor.untyped_storage()
    return storage.nbytes() - (tensor.data_ptr() - storage.data_ptr())


def _bytes_around(tensor: torch.Tensor, before: int, length: int) -> torch.Tensor:
    """`length` bytes of a tensor's storage, from `before` its first element on.

    Raises:  ShapeError: the storage has not so many.
    """
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr() - before
    if start < 0 or start + length > storage.nbytes():
        raise ShapeError(
            f"a tensor of the device pool, {tuple(tensor.shape)}, is not the beginning of a region "
            f"of {length} bytes"
        )
    held = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return held.set_(storage, start, (length,), (1,))


def _shares(plane: Plane, part: str) -> bool:
    """Whether a plane is of this part, or lies in its rows."""
    return plane.part == part or (plane.part == "rope" and part == "latent")

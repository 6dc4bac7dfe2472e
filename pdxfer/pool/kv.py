"""Pools of keys and values: geometry, reading and writing by layer.

Constructor names are SGLang's. A kind of pool says which layout it has; the rest is here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict, Unpack

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, natural
from pdxfer.layout.builders.draft import DRAFT, beside_draft
from pdxfer.layout.builders.parts import only_group
from pdxfer.layout.dtypes import ITEM_BYTES
from pdxfer.pool.base import TokenPool
from pdxfer.pool.buffers import GIB, data_ptrs, data_strides, size_bytes
from pdxfer.pool.device_pool_info import DevicePoolInfo, KVBuffers, MHABufferInfo
from pdxfer.pool.elements import Scale, storable
from pdxfer.pool.layers import Layer, check_memory_saver, end_layer_of, layer_id_of, shown_layers
from pdxfer.pool.prefix_valid import committed_rows
from pdxfer.pool.refusals import ShapeError, value_errors
from pdxfer.pool.rows import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from pdxfer.layout import KVLayout, Plane
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.memory import SharedMemory
    from pdxfer.pool.device_pool_info import KVScaleBuffers
    from pdxfer.pool.write_loc import WriteSlots

RESERVED_PAGES: Final = 1


@dataclass(frozen=True, slots=True)
class DraftLanes:
    """Layers of a draft (speculative) model whose rows share the target's slots."""

    layer_num: int
    head_num: int
    head_dim: int
    v_head_dim: int | None = None
    """None: `head_dim`."""
    start_layer: int | None = None
    """Global id of the first; None: the one after the target's last."""
    total_kv_heads: int | None = None
    """None: `head_num`."""
    head_first: int = 0


class _Placing(TypedDict):
    """Which heads and pages of the whole model a layout is about, and what it is called."""

    total_kv_heads: int | None
    head_first: int
    reserved_pages: int
    group: str
    model: str


class KVOptions(TypedDict):
    """The arguments of `KVPool`, for the pools that add their own."""

    size: int
    page_size: int
    dtype: torch.dtype
    head_num: int
    head_dim: int
    layer_num: int
    v_head_dim: NotRequired[int | None]
    device: NotRequired[str]
    start_layer: NotRequired[int]
    memory: NotRequired[SharedMemory | torch.Tensor | None]
    total_kv_heads: NotRequired[int | None]
    head_first: NotRequired[int]
    model: NotRequired[str]
    layer_ids: NotRequired[Sequence[int] | None]
    group: NotRequired[str]
    reserved_pages: NotRequired[int]
    draft: NotRequired[DraftLanes | None]
    end_layer: NotRequired[int | None]
    enable_memory_saver: NotRequired[bool]
    enable_kv_cache_copy: NotRequired[bool]


class KVPool(TokenPool):
    """K and V of some layers of one rank."""

    k_buffer: list[torch.Tensor]
    """K of each local layer, in `store_dtype`, without the layers of a draft model."""
    v_buffer: list[torch.Tensor]
    k_data_ptrs: torch.Tensor
    """uint64 addresses of `k_buffer`."""
    v_data_ptrs: torch.Tensor
    data_ptrs: torch.Tensor
    """Addresses of the tensors in `k_buffer`, then of those in `v_buffer`."""
    data_strides: torch.Tensor
    """Bytes from one slot of these buffers to the next; of a view by page: from page to page."""
    kv_cache_layout = "nhd"
    """What engines call the order of the buffers' axes: `nhd`, `hnd` or `page_major`."""

    @value_errors()
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
        memory: SharedMemory | torch.Tensor | None = None,
        total_kv_heads: int | None = None,
        head_first: int = 0,
        model: str = "",
        layer_ids: Sequence[int] | None = None,
        group: str = "full",
        reserved_pages: int = RESERVED_PAGES,
        draft: DraftLanes | None = None,
        end_layer: int | None = None,
        enable_memory_saver: bool = False,
        enable_kv_cache_copy: bool = False,
    ) -> None:
        """Make the pool, all zero.

        Args:
            size: usable slots, a multiple of `page_size`. The buffers hold the reserved pages too.
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
            layer_ids: global ids of the `layer_num` layers, where they do not follow each other.
            group: name of the layout's group.
            reserved_pages: page ids below it never travel.
            draft: lanes of a draft model, written and read by their own global layer ids.
            end_layer: global id of the last layer, or the one behind it; says nothing new.
            enable_memory_saver: must be false: memory of a pool stays.
            enable_kv_cache_copy: `move_kv_cache` works with it and without.

        Raises:
            ConfigError: a value that no pool has, or `memory` too small or not of this device.
            ResourceError: not enough memory.
        """
        del enable_kv_cache_copy
        check_memory_saver(enable_memory_saver)
        name, ids = pool_shape(size, page_size, dtype, (start_layer, layer_num, layer_ids))
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = stored_dtype(name)
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.layer_num = layer_num
        self.start_layer = min(ids, default=start_layer)
        self.end_layer = end_layer_of(end_layer, ids)
        """Global id of the last layer, or what was given for it."""
        self.layer_ids = self.model_layer_ids = ids
        """Global ids of the target's layers; a layer's place is its local index."""
        self.pages = size // page_size + reserved_pages
        """The reserved ones included."""
        shape = self._shape(
            name,
            total_kv_heads=total_kv_heads,
            head_first=head_first,
            reserved_pages=reserved_pages,
            group=group,
            model=model,
        )
        super().__init__(self._with_draft(draft, shape), device=device, memory=memory)

    def _shape(self, dtype: str, **also: Unpack[_Placing]) -> KVShape:
        """The pool's own figures as the layout's builder takes them."""
        return {
            "layers": self.layer_ids,
            "kv_heads": self.head_num,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "page_size": self.page_size,
            "pages": self.pages,
            "dtype": dtype,
            **also,
        }

    # -- reading and writing -------------------------------------------------------------------
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self._awaited(self._parts(layer_id)[0], layer_id))

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self._awaited(self._parts(layer_id)[1], layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

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
        """Write tokens of one layer. The caller's tensors stay as they are.

        Shapes:  loc [n], slots, or an object with such a `loc`; cache_k [n, head_num, head_dim];
                 cache_v [n, head_num, v_head_dim]; other dtypes are divided by their scale, where
                 one is given, and converted; beyond the ends of an 8-bit float its ends are stored.
        Raises:  ShapeError: another shape. SlotError: a slot that is not in the pool (on a GPU,
                 torch's own way to say so: no call here waits for it). ConfigError: a layer that is
                 not here. Nothing was written.
        """
        layer_id = layer_id_of(layer, layer_id_override)
        k_part, v_part = self._parts(layer_id)
        rows = {
            k_part: self._storable(cache_k, k_scale),
            v_part: self._storable(cache_v, v_scale),
        }
        self._write(layer_id, self._target(loc, "set_kv_buffer (MHA)"), rows)

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
        """Write the first `commit_lens[b]` rows of every request's block, and no other.

        Shapes:  loc_2d [B, T], slots (of rows that are not committed anything); commit_lens [B],
                 over T counts as T, under 0 as 0; cache_k [B * T, head_num, head_dim], cache_v
                 alike. Rows, dtypes and scales are as in `set_kv_buffer`.
        Cost:    waits for the GPU once, to know how many rows there are.
        Raises:  ShapeError: in this order: loc_2d is not of rank 2, commit_lens is not of its
                 batch, the rows are not as many as its slots. Then as `set_kv_buffer`.
        """
        given = {"cache_k": cache_k, "cache_v": cache_v}
        loc, at = committed_rows(loc_2d, commit_lens, given, self._torch_device)
        self.set_kv_buffer(
            layer,
            loc,
            cache_k.to(self._torch_device)[at],
            cache_v.to(self._torch_device)[at],
            self._committed_scale(k_scale, at, len(cache_k)),
            self._committed_scale(v_scale, at, len(cache_v)),
            layer_id_override,
        )

    # -- what engines ask of their pools -------------------------------------------------------
    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, their scales and a draft's lanes included; index keys are K."""
        v_bytes = size_bytes(self.layout, _is_value)
        return size_bytes(self.layout) - v_bytes, v_bytes

    @property
    def mem_usage(self) -> float:
        """GiB of K and V."""
        return sum(self.get_kv_size_bytes()) / GIB

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """What a host cache behind this pool has to know; the tensors share the pool's memory."""
        name = "kv" if only_group(self.layout).name == "full" else only_group(self.layout).name
        infos = [self._pool_info(name, name, self.layer_ids)]
        if self.draft_layer_ids:
            infos.append(self._pool_info("draft", name, self.draft_layer_ids))
        return tuple(infos)

    # -- what a kind of pool says --------------------------------------------------------------
    @abstractmethod
    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        """The builder of this kind."""

    def _join_draft(self, target: KVLayout, draft: KVLayout) -> KVLayout:
        """Where a draft's lanes lie: in regions of their own."""
        return beside_draft(target, draft)

    def _committed_scale(self, scale: Scale, at: torch.Tensor, rows: int) -> Scale:
        """The scale of the rows `at` of `rows`: here one scale is for all."""
        del at, rows
        return scale

    def _scale_buffers(self) -> KVScaleBuffers | None:
        """The buffers of scales, in a pool that has some."""
        return None

    # -- inside --------------------------------------------------------------------------------
    def _with_draft(self, draft: DraftLanes | None, shape: KVShape) -> KVLayout:
        self.draft_layer_ids: tuple[int, ...] = ()
        target = self._make_layout(**shape)
        if draft is None:
            return target
        first = max(self.layer_ids) + 1 if draft.start_layer is None else draft.start_layer
        natural(start_layer=first, layer_num=draft.layer_num)
        self.draft_layer_ids = layer_ids(range(first, first + draft.layer_num))
        draft_shape: KVShape = {
            **shape,
            "layers": self.draft_layer_ids,
            "kv_heads": draft.head_num,
            "head_dim": draft.head_dim,
            "v_head_dim": draft.v_head_dim,
            "total_kv_heads": draft.total_kv_heads,
            "head_first": draft.head_first,
        }
        return self._join_draft(target, self._make_layout(**draft_shape))

    def _bind(self) -> None:
        self.k_buffer = [self._buffer("k", layer) for layer in self.layer_ids]
        self.v_buffer = [self._buffer("v", layer) for layer in self.layer_ids]
        self._point()

    def _unbind(self) -> None:
        self.k_buffer, self.v_buffer = [], []
        self._point()

    def _point(self) -> None:
        """Tell the addresses of the buffers."""
        device, both = torch.device(self.device), [*self.k_buffer, *self.v_buffer]
        self.k_data_ptrs, self.v_data_ptrs, self.data_ptrs = (
            data_ptrs(buffers, device) for buffers in (self.k_buffer, self.v_buffer, both)
        )
        self.data_strides = data_strides(both, device)

    def _pool_info(self, name: str, ids_of: str, layers: tuple[int, ...]) -> DevicePoolInfo:
        """Some layers of one geometry."""
        k, v = (
            tuple(self._buffer(self._parts(layer)[at], layer) for layer in layers) for at in (0, 1)
        )
        device = torch.device(self.device)
        paged = "hnd" if self.kv_cache_layout == "hnd" else "paged_nhd"
        buffers = KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=data_ptrs(k, device),
            v_data_ptrs=data_ptrs(v, device),
            layout="nhd" if k[0].ndim == 3 else paged,
        )
        rows_k, rows_v = (self.rows(part, layers[0]) for part in self._parts(layers[0]))
        info = MHABufferInfo(
            buffers=buffers,
            page_size=self.page_size,
            head_num=rows_k.heads,
            head_dim=rows_k.width,
            v_head_dim=rows_v.width,
            dtype=self.store_dtype,
            device=self._torch_device,
            scales=self._scale_buffers(),
        )
        return DevicePoolInfo(
            pool_name=name, indices_from_pool=ids_of, layer_ids=layers, buffer_info=info
        )

    def _buffer(self, part: str, layer: int) -> torch.Tensor:
        """All rows of a part of a layer, as they are stored."""
        return self.rows(part, layer).view

    def _awaited(self, part: str, layer: int) -> torch.Tensor:
        """All rows of a part of a layer, when its bytes have come in."""
        self._wait_for(layer)
        return self.rows(part, layer).view

    def _parts(self, layer_id: int) -> tuple[str, str]:
        """Names of K and V of a global layer."""
        if layer_id in self.layer_ids:
            return "k", "v"
        if layer_id in self.draft_layer_ids:
            return DRAFT + "k", DRAFT + "v"
        raise ShapeError(
            f"layer {layer_id} is not in this pool, which has layers "
            f"{shown_layers(self.layer_ids + self.draft_layer_ids)}"
        )

    def _readable(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.store_dtype == self.dtype else stored.view(self.dtype)

    def _storable(self, rows: torch.Tensor, scale: Scale) -> torch.Tensor:
        return storable(rows, scale, self.dtype, self._torch_device)


def _is_value(plane: Plane) -> bool:
    return plane.part.removeprefix(DRAFT).removesuffix("_scale") == "v"


def pool_shape(
    size: int, page_size: int, dtype: torch.dtype, layers: tuple[int, int, Sequence[int] | None]
) -> tuple[str, tuple[int, ...]]:
    """The name of a pool's dtype and its global layer ids.

    Args:    layers: start_layer, layer_num, and the ids where they do not follow each other.
    Raises:  ConfigError: a size, dtype or number of layers that no pool has.
    """
    given_dtype: object = dtype
    name = str(given_dtype).removeprefix("torch.")
    if not isinstance(given_dtype, torch.dtype) or name not in ITEM_BYTES:
        known = ", ".join(f"torch.{each}" for each in ITEM_BYTES)
        raise ConfigError(f"dtype={given_dtype!r}: must be one of {known}")
    start_layer, layer_num, given = layers
    natural(size=size, page_size=page_size, start_layer=start_layer, layer_num=layer_num)
    if size < 1 or page_size < 1 or size % page_size:
        raise ConfigError(f"size={size} must be a positive multiple of page_size={page_size} slots")
    ids = layer_ids(range(start_layer, start_layer + layer_num) if given is None else given)
    if len(ids) != layer_num:
        raise ConfigError(f"layer_ids has {len(ids)} ids for layer_num={layer_num}")
    return name, ids

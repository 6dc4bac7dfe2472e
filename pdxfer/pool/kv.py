"""Pools of keys and values: geometry, reading and writing by layer.

Constructor names are SGLang's. A kind of pool says which layout it has; the rest is here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NotRequired, Protocol, TypedDict

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, natural
from pdxfer.layout.builders.draft import DRAFT, beside_draft
from pdxfer.layout.dtypes import ITEM_BYTES
from pdxfer.pool.base import TokenPool
from pdxfer.pool.prefix_valid import committed_rows
from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.memory import SharedMemory

RESERVED_PAGES: Final = 1
Scale = float | torch.Tensor | None
"""What quantised rows are multiples of."""


class Layer(Protocol):
    """An attention layer, as engines hand it to their pool."""

    @property
    def layer_id(self) -> int:
        """Global."""
        ...


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


class KVPool(TokenPool):
    """K and V of some layers of one rank."""

    k_buffer: list[torch.Tensor]
    """By local layer, of `store_dtype`; without the draft's."""
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
        memory: SharedMemory | torch.Tensor | None = None,
        total_kv_heads: int | None = None,
        head_first: int = 0,
        model: str = "",
        layer_ids: Sequence[int] | None = None,
        group: str = "full",
        reserved_pages: int = RESERVED_PAGES,
        draft: DraftLanes | None = None,
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

        Raises:
            ConfigError: a value that no pool has, or `memory` too small or not of this device.
            ResourceError: not enough memory.
        """
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
        self.end_layer = max(ids, default=start_layer)
        """Global id of the last layer."""
        self.layer_ids = ids
        """Global ids of the target's layers; a layer's place is its local index."""
        self.pages = size // page_size + reserved_pages
        """The reserved ones included."""
        shape: KVShape = {
            "layers": ids,
            "kv_heads": head_num,
            "head_dim": head_dim,
            "v_head_dim": self.v_head_dim,
            "page_size": page_size,
            "pages": self.pages,
            "dtype": name,
            "total_kv_heads": total_kv_heads,
            "head_first": head_first,
            "reserved_pages": reserved_pages,
            "group": group,
            "model": model,
        }
        super().__init__(self._with_draft(draft, shape), device=device, memory=memory)

    # -- reading and writing -------------------------------------------------------------------
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All keys of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self.rows(self._parts(layer_id)[0], layer_id).view)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """All values of a global layer, of `dtype`; shares the pool's memory."""
        return self._readable(self.rows(self._parts(layer_id)[1], layer_id).view)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a global layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

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
        """Write tokens of one layer. The caller's tensors stay as they are.

        Shapes:  loc [n], slots; cache_k [n, head_num, head_dim]; cache_v [n, head_num, v_head_dim];
                 other dtypes are divided by their scale, where one is given, and converted; beyond
                 the ends of an 8-bit float its ends are stored.
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
        self._write(layer_id, self._loc(loc, "loc", wait=False), rows)

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

    # -- inside --------------------------------------------------------------------------------
    def _with_draft(self, draft: DraftLanes | None, shape: KVShape) -> KVLayout:
        self.draft_layer_ids: tuple[int, ...] = ()
        target = self._make_layout(**shape)
        if draft is None:
            return target
        first = self.end_layer + 1 if draft.start_layer is None else draft.start_layer
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
        self.k_buffer = [self.rows("k", layer).view for layer in self.layer_ids]
        self.v_buffer = [self.rows("v", layer).view for layer in self.layer_ids]

    def _unbind(self) -> None:
        self.k_buffer, self.v_buffer = [], []

    def _parts(self, layer_id: int) -> tuple[str, str]:
        """Names of K and V of a global layer."""
        if layer_id in self.layer_ids:
            return "k", "v"
        if layer_id in self.draft_layer_ids:
            return DRAFT + "k", DRAFT + "v"
        raise ConfigError(
            f"layer {layer_id} is not in this pool, which has layers "
            f"{shown_layers(self.layer_ids + self.draft_layer_ids)}"
        )

    def _readable(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.store_dtype == self.dtype else stored.view(self.dtype)

    def _storable(self, rows: torch.Tensor, scale: Scale) -> torch.Tensor:
        return storable(rows, scale, self.dtype, self._torch_device)


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


def layer_id_of(layer: int | Layer, override: int | None) -> int:
    """The global layer id that a caller means."""
    if override is not None:
        return override
    return layer if isinstance(layer, int) else layer.layer_id


def shown_layers(layers: Sequence[int]) -> str:
    """Global layer ids, for a text."""
    if list(layers) == list(range(layers[0], layers[0] + len(layers))):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def storable(
    rows: torch.Tensor, scale: Scale, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`rows` as a pool of `dtype` stores them; `rows` itself stays as it is.

    A scale divides only what is still to be converted: rows of `dtype` were scaled by who made
    them. Eight-bit floats saturate instead of becoming NaN.
    """
    store = stored_dtype(str(dtype).removeprefix("torch."))
    if rows.dtype != dtype:
        if scale is not None:
            if isinstance(scale, torch.Tensor) and scale.numel() != 1:
                raise ShapeError(f"scale has {scale.numel()} values; one is for the whole tensor")
            value = scale.to(rows.device) if isinstance(scale, torch.Tensor) else scale
            rows = torch.div(rows, value).to(rows.dtype)
        if store != dtype and rows.is_floating_point():
            end = torch.finfo(dtype).max
            rows = rows.clamp(-end, end)
    converted = rows.to(device=device, dtype=dtype)
    return converted if store == dtype else converted.contiguous().view(store)

"""Quantised rows (MXFP8): e4m3 elements, and one scale byte (UE8M0) for 32 of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdxfer.layout.builders.mxfp8 import SCALE_BLOCK, mxfp8
from pdxfer.layout.builders.parts import only_group
from pdxfer.layout.planes import TILE
from pdxfer.pool.device_pool_info import KVScaleBuffers
from pdxfer.pool.elements import Scale
from pdxfer.pool.kv import KVPool
from pdxfer.pool.layers import Layer, layer_id_of
from pdxfer.pool.refusals import ShapeError, value_errors

if TYPE_CHECKING:
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.pool.kv import KVOptions
    from pdxfer.pool.write_loc import WriteSlots


class MXFP8Pool(KVPool):
    """Rows as `TokenMajorPool`; scales `[slots, head_num, dim / 32]` beside them.

    With pages of 128 tokens (or `interleaved`) scales lie in the order that kernels read, one tile
    a page and head. Rows come quantised, with the scales of every token.
    """

    k_scale_buffer: list[torch.Tensor]
    """Scales of K of each local layer, in float8_e8m0fnu."""
    v_scale_buffer: list[torch.Tensor]

    @value_errors()
    def __init__(self, *, interleaved: bool | None = None, **options: Unpack[KVOptions]) -> None:
        """As `KVPool`; `dtype` must be float8_e4m3fn.

        Args:    interleaved: None: where `page_size` is 128.
        """
        if options["dtype"] != torch.float8_e4m3fn:
            raise ShapeError(f"dtype={options['dtype']}: an MXFP8 cache has float8_e4m3fn elements")
        self._interleaved = interleaved
        super().__init__(**options)
        self.store_dtype = self.dtype

    def get_kv_scale_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes a page of the scales: K of every layer, then V."""
        return self._infos_of(self._scale_parts())

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the regions of rows."""
        return self._infos_of({p.part for p in self.layout.planes} - self._scale_parts())

    def get_kv_scale_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of K and of V of a global layer, of float8_e8m0fnu; they share the memory."""
        k, v = (self._scales(part, layer_id) for part in self._parts(layer_id))
        self._wait_for(layer_id)
        return k, v

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
        """Write quantised tokens of one layer and their scales.

        Shapes:  loc [n], slots, or an object with such a `loc`; cache_k [n, head_num, head_dim] of
                 float8_e4m3fn, cache_v alike; k_scale [n, head_num, head_dim / 32] of
                 float8_e8m0fnu or the same bytes as uint8.
        Raises:  ShapeError, SlotError, ConfigError: nothing was written.
        """
        layer_id = layer_id_of(layer, layer_id_override)
        rows = {}
        for part, given, scale in zip(
            self._parts(layer_id), (cache_k, cache_v), (k_scale, v_scale), strict=True
        ):
            if given.dtype != self.dtype:
                raise ShapeError(
                    f"cache_{part} has dtype {given.dtype}; rows must come as {self.dtype}, with "
                    "their scales"
                )
            rows[part] = self._storable(given, None)
            rows[f"{part}_scale"] = self._scale_bytes(part, scale)
        self._write(layer_id, self._target(loc, "set_kv_buffer (MHA-MXFP8)"), rows)

    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        return mxfp8(interleaved=self._interleaved, **shape)

    def _committed_scale(self, scale: Scale, at: torch.Tensor, rows: int) -> Scale:
        if not isinstance(scale, torch.Tensor):
            return scale
        if scale.shape[:1] != (rows,):
            raise ShapeError(f"scales have shape {tuple(scale.shape)} for {rows} rows")
        return scale.to(at.device)[at]

    def _scale_bytes(self, part: str, scale: Scale) -> torch.Tensor:
        if not isinstance(scale, torch.Tensor) or scale.dtype.itemsize != 1:
            raise ShapeError(
                f"{part}_scale must be a tensor of UE8M0 scales of every token; MXFP8 rows mean "
                "nothing without them"
            )
        return scale.to(self._torch_device).contiguous().view(torch.uint8)

    def _readable(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.dtype)

    def _bind(self) -> None:
        super()._bind()
        self.k_scale_buffer = [self._scales("k", layer) for layer in self.layer_ids]
        self.v_scale_buffer = [self._scales("v", layer) for layer in self.layer_ids]

    def _unbind(self) -> None:
        super()._unbind()
        self.k_scale_buffer, self.v_scale_buffer = [], []

    def _buffer(self, part: str, layer: int) -> torch.Tensor:
        return super()._buffer(part, layer).view(self.dtype)

    def _scales(self, part: str, layer: int) -> torch.Tensor:
        """`[slots, heads, dim / 32]`; of tiles `[pages, heads, 32, page_size / 32, dim / 32]`."""
        group = only_group(self.layout)
        (plane,) = self.layout.planes_by_key[group.name, f"{part}_scale", layer]
        if plane.row_kind != TILE:
            return self.rows(plane.part, layer).view.view(torch.float8_e8m0fnu)
        tiles = self._storage.cells(plane, group.pages, torch.uint8).squeeze(1)
        shape = (*tiles.shape[:2], SCALE_BLOCK, group.page_size // SCALE_BLOCK, -1)
        return tiles.view(shape).view(torch.float8_e8m0fnu)

    def _scale_buffers(self) -> KVScaleBuffers:
        tiled = any(plane.row_kind == TILE for plane in self.layout.planes)
        return KVScaleBuffers(
            k=tuple(self.k_scale_buffer),
            v=tuple(self.v_scale_buffer),
            layout="mxfp8_interleaved" if tiled else "token",
        )

    def _scale_parts(self) -> set[str]:
        return {p.part for p in self.layout.planes if p.part.endswith("_scale")}

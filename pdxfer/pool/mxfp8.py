"""Quantised rows (MXFP8): e4m3 elements, and one scale byte (UE8M0) for 32 of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdxfer.layout.builders.mxfp8 import mxfp8
from pdxfer.pool.kv import KVPool, Layer, Scale, layer_id_of
from pdxfer.pool.refusals import ShapeError

if TYPE_CHECKING:
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.pool.kv import KVOptions


class MXFP8Pool(KVPool):
    """Rows as `TokenMajorPool`; scales `[slots, head_num, dim / 32]` beside them.

    With pages of 128 tokens (or `interleaved`) scales lie in the order that kernels read, one tile
    a page and head. Rows come quantised, with the scales of every token.
    """

    def __init__(self, *, interleaved: bool | None = None, **options: Unpack[KVOptions]) -> None:
        """As `KVPool`; `dtype` must be float8_e4m3fn.

        Args:    interleaved: None: where `page_size` is 128.
        """
        if options["dtype"] != torch.float8_e4m3fn:
            raise ShapeError(f"dtype={options['dtype']}: an MXFP8 cache has float8_e4m3fn elements")
        self._interleaved = interleaved
        super().__init__(**options)

    def get_kv_scale_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """As `get_contiguous_buf_infos`, of the regions of scales: K of every layer, then V."""
        return self._infos(scales=True)

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the regions of rows."""
        return self._infos(scales=False)

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
        """Write quantised tokens of one layer and their scales.

        Shapes:  loc [n]; cache_k [n, head_num, head_dim] of float8_e4m3fn, cache_v alike; k_scale
                 [n, head_num, head_dim / 32] of float8_e8m0fnu or the same bytes as uint8.
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
        self._write(layer_id, self._loc(loc, "loc", wait=False), rows)

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

    def _infos(self, *, scales: bool) -> tuple[list[int], list[int], list[int]]:
        regions = sorted(
            {p.region for p in self.layout.planes if p.part.endswith("_scale") == scales}
        )
        everything = super().get_contiguous_buf_infos()
        addresses, lengths, items = ([column[at] for at in regions] for column in everything)
        return addresses, lengths, items

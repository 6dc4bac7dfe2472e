"""Sparse latent attention (DSA): latent rows, and quantised keys of an index by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch

from pdxfer.layout import dsa
from pdxfer.layout.builders.dsa import INDEX, INDEX_SCALE, QUANTISED, packed_widths
from pdxfer.layout.builders.parts import only_group
from pdxfer.pool.base import check_rows
from pdxfer.pool.copies import HostCopy, check_copy, copy_in, copy_out, kind_of, synchronize
from pdxfer.pool.layers import layer_id_of
from pdxfer.pool.mla import MLAPool
from pdxfer.pool.refusals import ShapeError, value_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.pool.copies import Chunk
    from pdxfer.pool.layers import Layer
    from pdxfer.pool.write_loc import WriteSlots


class DSACopy(TypedDict):
    """Tokens of a pool with an index, on the host."""

    kv: HostCopy
    """Rows, `[layer][chunk]` of `[n, 1, kv_cache_dim]`."""
    index_k: list[list[torch.Tensor]]
    """Whole pages of the index, `[layer][chunk]` of uint8 `[pages, bytes of a page]`; no chunk of a
    layer without an index."""


class DSAPool(MLAPool):
    """Latent rows as `MLAPool`, and of some layers an index: of a page all keys, then all scales.

    With `kv_cache_dim` other than the two widths and 8-bit floats, rows are packed: elements and
    their scales, then the rope as bfloat16. Packed rows are taken and given as bytes, as kernels
    quantise them.
    """

    @value_errors()
    def __init__(
        self,
        *,
        index_head_dim: int = QUANTISED,
        kv_cache_dim: int | None = None,
        skip_topk_layers: Sequence[bool] | None = None,
        **options: Any,  # noqa: ANN401 those of MLAPool
    ) -> None:
        """Make the pool, all zero.

        Args:
            index_head_dim: elements of an index key.
            kv_cache_dim: bytes of a packed row; None or the sum of the two widths: not packed.
            skip_topk_layers: by local layer, which have no index; None: none of them.
            options: those of `MLAPool`, but `arrangement`: each layer has a tensor of its own.

        Raises:  ShapeError, ConfigError: a value that no pool has. ResourceError: not enough
                 memory.
        """
        if "arrangement" in options:
            raise ShapeError("arrangement: rows and index of such a pool are a tensor a layer")
        widths = options["kv_lora_rank"], options["qk_rope_head_dim"]
        self.dsa_kv_cache_store_fp8 = options[
            "dtype"
        ] == torch.float8_e4m3fn and kv_cache_dim not in (None, sum(widths))
        """Rows are packed."""
        if self.dsa_kv_cache_store_fp8 and kv_cache_dim != sum(packed_widths(*widths)):
            raise ShapeError(
                f"kv_cache_dim={kv_cache_dim}: packed rows of {widths} elements have "
                f"{sum(packed_widths(*widths))} bytes"
            )
        self.index_head_dim = index_head_dim
        self.skip_topk_layers = [*(skip_topk_layers or [False] * options["layer_num"])]
        if len(self.skip_topk_layers) != options["layer_num"]:
            raise ShapeError(
                f"skip_topk_layers has {len(self.skip_topk_layers)} layers for "
                f"layer_num={options['layer_num']}"
            )
        super().__init__(**options)

    # -- the index -----------------------------------------------------------------------------
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """The index of a global layer, uint8 `[pages, bytes of a page]`; shares the memory."""
        self._check_index(layer_id)
        self._wait_for(layer_id)
        return self._index(layer_id)

    def set_index_k_scale_buffer(
        self,
        layer: int | Layer,
        loc: WriteSlots,
        index_k: torch.Tensor,
        index_k_scale: torch.Tensor,
    ) -> None:
        """Write quantised index keys of one layer, and their scales.

        Shapes:  loc [n], slots, or an object with such a `loc`; index_k [n, index_head_dim] (or
                 [n, 1, index_head_dim]) of an 8-bit float, or the same bytes; index_k_scale
                 [n, index_head_dim / 128] (or of as many elements) of float32.
        Raises:  ShapeError, SlotError, ConfigError: nothing was written.
        """
        layer_id = layer_id_of(layer, None)
        self._check_index(layer_id)
        slots = self._target(loc, "set_index_k_scale_buffer")
        if index_k.dtype.itemsize != 1 or index_k_scale.dtype != torch.float32:
            raise ShapeError(
                f"index_k has dtype {index_k.dtype}, index_k_scale {index_k_scale.dtype}; "
                "quantised keys of 8 bits and scales of torch.float32 are needed"
            )
        keys = index_k.contiguous().view(torch.uint8).to(self._torch_device)
        keys = keys.unsqueeze(1) if keys.ndim == 2 else keys
        check_rows("index_k", keys, (slots.numel(), 1, self.index_head_dim))
        scales = index_k_scale.to(self._torch_device)
        wanted = (slots.numel(), 1, self.index_head_dim // QUANTISED)
        if scales.numel() != wanted[0] * wanted[2]:
            raise ShapeError(f"index_k_scale has shape {tuple(scales.shape)}, needs {wanted}")
        self.rows(INDEX, layer_id).scatter(slots, keys)
        self.rows(INDEX_SCALE, layer_id).scatter(slots, scales.reshape(wanted))

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the regions of rows."""
        return self._infos_of({"latent"})

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes a page of each layer's index; zeros where it has none."""
        infos = iter(zip(*self._infos_of({INDEX}), strict=True))
        found = [(0, 0, 0) if skipped else next(infos) for skipped in self.skip_topk_layers]
        addresses, lengths, items = (list(column) for column in zip(*found, strict=True))
        return addresses, lengths, items

    # -- host copies ---------------------------------------------------------------------------
    def get_cpu_copy(  # type: ignore[override]
        self,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> DSACopy:
        """Rows of some slots, and the pages of the index that they are in, on the host.

        Args:    indices: slots of whole pages in order, of which only the last may be cut off: the
                 index is copied by page.
        Raises:  SlotError, ShapeError: other slots.
        """
        del mamba_indices, req_pool_index
        loc = self._loc(indices, "indices")
        pages = self._pages_of(loc)
        chunk = self.cpu_offloading_chunk_size
        kv = copy_out(self._row_units(), loc, self.layout.dtype, chunk)
        step = max(1, chunk // self.page_size)
        index = [
            [
                self._index(layer)[pages[at : at + step]].to("cpu")
                for at in range(0, pages.numel(), step)
            ]
            if self._has_index(layer)
            else []
            for layer in self.layer_ids
        ]
        synchronize(loc.device)
        return DSACopy(kv=kv, index_k=index)

    def load_cpu_copy(
        self,
        kv_cache_cpu: DSACopy | Sequence[Sequence[Chunk]],
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Write a copy to other slots, and the pages of the index to the pages of these.

        Args:    kv_cache_cpu: what `get_cpu_copy` gave, or a copy by token, as host pools give.
                 indices: as those of `get_cpu_copy`.
        Raises:  SlotError, ShapeError: other slots, or a copy of another geometry; nothing was
                 written.
        """
        del mamba_indices, req_pool_index
        if isinstance(kv_cache_cpu, (list, tuple)):
            super().load_cpu_copy(kv_cache_cpu, indices)
            return
        if not isinstance(kv_cache_cpu, dict) or not {"kv", "index_k"} <= kv_cache_cpu.keys():
            raise ShapeError(
                f"the copy is {kind_of(kv_cache_cpu)}; a dict of kv and index_k is needed, as "
                "get_cpu_copy gives it"
            )
        loc = self._loc(indices, "indices")
        pages = self._pages_of(loc)
        check_copy(self._row_units(), loc.numel(), kv_cache_cpu["kv"], self.layout.dtype)
        given = self._index_pages(kv_cache_cpu["index_k"], pages.numel())
        copy_in(self._row_units(), loc, kv_cache_cpu["kv"], self.layout.dtype)
        for layer, content in given.items():
            self._index(layer)[pages] = content.to(loc.device)
        synchronize(loc.device)

    # -- inside --------------------------------------------------------------------------------
    def _make_layout(self, **shape: Any) -> KVLayout:  # noqa: ANN401 those of the builder
        shape.pop("arrangement")
        layers = shape["layers"]
        return dsa(
            index_head_dim=self.index_head_dim,
            index_layers=[
                layer
                for layer, skipped in zip(layers, self.skip_topk_layers, strict=True)
                if not skipped
            ],
            packed=self.dsa_kv_cache_store_fp8,
            **shape,
        )

    def _row_widths(self) -> list[int]:
        if self.dsa_kv_cache_store_fp8:
            return list(packed_widths(self.kv_lora_rank, self.qk_rope_head_dim))
        return super()._row_widths()

    def _stored(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        if not self.dsa_kv_cache_store_fp8:
            return super()._stored(rows, name)
        if rows.dtype.itemsize != 1:
            raise ShapeError(
                f"{name} has dtype {rows.dtype}; rows of this pool are packed, and must come as "
                "the bytes of quantised elements, scales and rope"
            )
        return rows.contiguous().view(torch.uint8).to(self._torch_device)

    def _row_units(self) -> list[list[Any]]:
        """Rows alone, by layer, without the index."""
        return [[self.rows(("latent", "rope"), layer)] for layer in self.layer_ids]

    def _has_index(self, layer_id: int) -> bool:
        return (only_group(self.layout).name, INDEX, layer_id) in self.layout.planes_by_key

    def _check_index(self, layer_id: int) -> None:
        self._check_layer(layer_id)
        if not self._has_index(layer_id):
            raise ShapeError(f"layer {layer_id} has no index: skip_topk_layers leaves it out")

    def _index(self, layer_id: int) -> torch.Tensor:
        """All pages of the index of a layer, as bytes."""
        group = only_group(self.layout)
        (plane,) = self.layout.planes_by_key[group.name, INDEX, layer_id]
        shape = (group.pages, plane.page_stride)
        return self._storage.block(plane.region, 0, plane.page_stride, shape)

    def _pages_of(self, loc: torch.Tensor) -> torch.Tensor:
        """The pages that slots fill in order.

        Raises:  ShapeError: slots that are not whole pages in order but for the last.
        """
        pages = torch.div(loc[:: self.page_size], self.page_size, rounding_mode="floor")
        at = torch.arange(loc.numel(), device=loc.device)
        wanted = pages[at // self.page_size] * self.page_size + at % self.page_size
        if not torch.equal(loc, wanted):
            raise ShapeError(
                f"indices are not the slots of whole pages of {self.page_size} tokens in order; "
                "the index is copied by page"
            )
        return pages

    def _index_pages(self, copied: object, count: int) -> dict[int, torch.Tensor]:
        """The pages of a copy of the index, by layer.

        Raises:  ShapeError: they are not `count` pages of every index of this pool.
        """
        if not isinstance(copied, (list, tuple)) or len(copied) != self.layer_num:
            raise ShapeError(
                f"index_k of the copy is {kind_of(copied)}; the chunks of {self.layer_num} layers "
                "are needed"
            )
        found = {}
        for layer, chunks in zip(self.layer_ids, copied, strict=True):
            if not self._has_index(layer):
                continue
            width = self._index(layer).shape[1]
            good = isinstance(chunks, (list, tuple)) and all(
                isinstance(chunk, torch.Tensor)
                and chunk.dtype == torch.uint8
                and chunk.ndim == 2
                and chunk.shape[1] == width
                for chunk in chunks
            )
            if not good or sum(len(chunk) for chunk in chunks) != count:
                raise ShapeError(
                    f"index_k of layer {layer} of the copy is not {count} pages of {width} bytes"
                )
            found[layer] = torch.cat(chunks) if chunks else torch.zeros(0, width).byte()
        return found

"""A main pool with an index: keys alone, of some layers, for the same slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError
from pdxfer.layout import page_major, token_major
from pdxfer.layout.builders.index import k_only
from pdxfer.layout.builders.parts import join_parts
from pdxfer.pool.kv import KVPool
from pdxfer.pool.layers import Layer, layer_id_of
from pdxfer.pool.refusals import ShapeError, value_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

    import torch

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.pool.device_pool_info import DevicePoolInfo
    from pdxfer.pool.kv import KVOptions
    from pdxfer.pool.write_loc import WriteSlots

INDEX: Final = "index_k"
_MAIN: Final[dict[str, Callable[..., KVLayout]]] = {
    "token_major": token_major,
    "page_major": page_major,
}


class SparsePool(KVPool):
    """K and V of every layer, and index keys `[slots, index_head_num, index_head_dim]` of some.

    The index shares the main pool's slots and pages: host copies, moves and transfers take both.
    Its heads are replicated over attention TP.
    """

    @value_errors()
    def __init__(
        self,
        *,
        index_head_dim: int,
        index_head_num: int = 1,
        index_layer_ids: Sequence[int] | None = None,
        arrangement: str = "token_major",
        **options: Unpack[KVOptions],
    ) -> None:
        """As `KVPool`.

        Args:    index_layer_ids: global layers that have an index; None: all. arrangement: of the
                 main pool, `token_major` or `page_major`.
        """
        if arrangement not in _MAIN:
            raise ConfigError(f"arrangement is {arrangement!r}; it must be one of {sorted(_MAIN)}")
        if options.get("draft") is not None:
            raise ConfigError("a sparse pool has no draft lanes; give the draft a pool of its own")
        self._arrangement = arrangement
        self.kv_cache_layout = "page_major" if arrangement == "page_major" else "nhd"
        self._index_shape = (index_head_num, index_head_dim)
        self.index_layer_ids = None if index_layer_ids is None else tuple(index_layer_ids)
        """Global layers that have an index."""
        super().__init__(**options)

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """All index keys of a global layer, of `dtype`; shares the pool's memory."""
        self._check_index(layer_id)
        return self._readable(self._awaited(INDEX, layer_id))

    def set_index_k_buffer(
        self, layer: int | Layer, loc: WriteSlots, index_k: torch.Tensor
    ) -> None:
        """Write index keys of one layer.

        Shapes:  loc [n], slots, or an object with such a `loc`; index_k [n, index_head_num,
                 index_head_dim].
        Raises:  ShapeError, SlotError, ConfigError: nothing was written.
        """
        layer_id = layer_id_of(layer, None)
        self._check_index(layer_id)
        slots = self._target(loc, "set_index_k_buffer")
        self._write(layer_id, slots, {INDEX: self._storable(index_k, None)})

    def get_index_k_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes a page of the regions that hold index keys."""
        return self._infos_of({INDEX})

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the regions of K and V."""
        return self._infos_of({"k", "v"})

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """Refused: such a description has no place for index keys, and they must not be lost.

        Raises:  ConfigError: always; make a `HostPool` of this pool.
        """
        raise ConfigError(
            "SparsePool has no device pool infos: they have no place for index keys; make a "
            "HostPool of the pool, which keeps them"
        )

    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        layers = tuple(shape["layers"])
        if self.index_layer_ids is None:
            self.index_layer_ids = layers
        others = set(self.index_layer_ids) - set(layers)
        if others:
            raise ConfigError(f"index_layer_ids has layer {min(others)}, which is not in this pool")
        heads, head_dim = self._index_shape
        index = k_only(
            layers=self.index_layer_ids,
            heads=heads,
            head_dim=head_dim,
            page_size=shape["page_size"],
            pages=shape["pages"],
            dtype=shape["dtype"],
            part=INDEX,
            reserved_pages=shape.get("reserved_pages", 1),
            group=shape.get("group", "full"),
            model=shape.get("model", ""),
        )
        return join_parts(_MAIN[self._arrangement](**shape), index)

    def _check_index(self, layer_id: int) -> None:
        self._parts(layer_id)
        if layer_id not in (self.index_layer_ids or ()):
            shown = ", ".join(map(str, self.index_layer_ids or ()))
            raise ShapeError(f"layer {layer_id} has no index; layers {shown} have one")

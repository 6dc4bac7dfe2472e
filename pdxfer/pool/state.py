"""Recurrent state of requests: convolution and temporal tensors, one slot a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.state import StateTensor, state, state_entries
from pdxfer.layout.dtypes import item_bytes
from pdxfer.pool.base import Pool
from pdxfer.pool.buffers import GIB, size_bytes
from pdxfer.pool.copies import kind_of, synchronize
from pdxfer.pool.device_pool_info import DevicePoolInfo, MambaStateBufferInfo
from pdxfer.pool.layers import check_memory_saver
from pdxfer.pool.refusals import ShapeError, value_errors
from pdxfer.pool.rows import as_tensor, last_of_each, slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.memory import SharedMemory

StateCopy = tuple[list[torch.Tensor], torch.Tensor | None]
"""`[layers, n, *shape]` of each convolution, and of the temporal state."""


class StatePool(Pool):
    """`conv[i]` and `temporal`: `[layers, slots, *shape]`; slot 0 is the reserved sink.

    Statically each tensor of a layer is a region; in `unified_entries` a slot is one entry of one
    region, `[conv.0 of every layer | conv.1 ... | temporal of every layer]`.
    """

    conv: list[torch.Tensor]
    temporal: torch.Tensor | None

    @value_errors()
    def __init__(  # noqa: PLR0913 the shape of a pool
        self,
        *,
        size: int,
        tensors: Sequence[StateTensor],
        layer_ids: Sequence[int],
        device: str = "cpu",
        memory: SharedMemory | torch.Tensor | None = None,
        model: str = "",
        group: str = "state",
        reserved_slots: int = 1,
        arrangement: str = "token_major",
        buffer_bytes: int | None = None,
        enable_memory_saver: bool = False,
    ) -> None:
        """Make the pool, all zero.

        Args:
            size: usable slots.
            tensors: convolutions, and the temporal state as part `temporal`.
            layer_ids: global ids of the layers that have them.
            device: of the tensors.
            memory: to be used instead of memory of the pool's own.
            model: `name@revision`, compared by both sides where both give it.
            group: name of the layout's group.
            reserved_slots: ids below it never travel.
            arrangement: `token_major` (a region a tensor and layer) or `unified_entries`.
            buffer_bytes: of the whole buffer, where pools in unified memory share `memory`.
            enable_memory_saver: must be false: memory of a pool stays.

        Raises:
            ConfigError: a value that no pool has. ResourceError: not enough memory.
        """
        check_memory_saver(enable_memory_saver)
        if arrangement not in ("token_major", "unified_entries"):
            raise ConfigError(
                f"arrangement is {arrangement!r}; state lies token_major or in unified_entries"
            )
        if size < 1:
            raise ConfigError(f"size={size}: a pool needs at least one slot")
        self.size = size
        self.layer_ids = tuple(layer_ids)
        self.tensors = tuple(tensors)
        self.slots = size + reserved_slots
        """The reserved ones included."""
        if arrangement == "token_major":
            layout = state(
                layers=self.layer_ids,
                tensors=tensors,
                slots=self.slots,
                reserved_slots=reserved_slots,
                group=group,
                model=model,
            )
        else:
            layout = state_entries(
                layers=self.layer_ids,
                tensors=tensors,
                slots=self.slots,
                reserved_slots=reserved_slots,
                group=group,
                model=model,
                length_bytes=buffer_bytes,
            )
        self._entries = arrangement == "unified_entries"
        super().__init__(layout, device=device, memory=memory)

    def get_cpu_copy(self, indices: torch.Tensor) -> StateCopy:
        """The state of some slots, on the host; in any order, repeats allowed.

        Args:    indices: `[n]` slots; or a 0-d one, as engines name the slot of a request: then
                 the tensors of the copy are `[layers, *shape]`, without an axis of slots.
        Raises:  SlotError, ShapeError: no slots of this pool.
        """
        ids = self._ids(indices, "indices")
        synchronize(ids.device)
        copied = [tensor[:, ids].to("cpu") for tensor in self._tensors()]
        if as_tensor(indices, "indices").ndim == 0:
            copied = [tensor.squeeze(1) for tensor in copied]
        return (copied, None) if self.temporal is None else (copied[:-1], copied[-1])

    def load_cpu_copy(self, copied: StateCopy, indices: torch.Tensor) -> None:
        """Write a copy to other slots; of a slot that appears twice the last state stays.

        Args:    indices: as many slots as the copy is of; one of them may be 0-d, and the copy of
                 one slot may be without an axis of slots.
        Raises:  SlotError, ShapeError: no slots, or a copy of other tensors; nothing was written.
        """
        ids = self._ids(indices, "indices")
        mine = self._tensors()
        given = self._given(copied, ids.numel())
        kept = last_of_each(ids)
        for tensor, got in zip(mine, given, strict=True):
            there = got.to(ids.device)
            if kept is None:
                tensor[:, ids] = there
            else:
                tensor[:, ids[kept]] = there[:, kept]
        synchronize(ids.device)

    def check_cpu_copy(self, copied: StateCopy, indices: torch.Tensor) -> None:
        """Refuses what `load_cpu_copy` would refuse, and writes nothing.

        Raises:  SlotError, ShapeError.
        """
        self._given(copied, self._ids(indices, "indices").numel())

    def copy_from(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """The state of slot `src_index[i]` to slot `dst_index[i]`; they may overlap, and be 0-d."""
        self.move_pages(self._ids(dst_index, "dst_index"), self._ids(src_index, "src_index"))

    def clear_slots(self, indices: torch.Tensor) -> None:
        """Make the state of some slots zero."""
        ids = self._ids(indices, "indices")
        for tensor in self._tensors():
            tensor[:, ids] = 0

    def get_kv_size_bytes(self) -> int:
        """Bytes of the states of all layers and slots."""
        return size_bytes(self.layout)

    @property
    def mem_usage(self) -> float:
        """GiB of the states."""
        return self.get_kv_size_bytes() / GIB

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """What a host cache behind this pool has to know; the tensors share the pool's memory."""
        info = MambaStateBufferInfo(temporal=self.temporal, conv=tuple(self.conv))
        return (
            DevicePoolInfo(
                pool_name="mamba",
                indices_from_pool="mamba",
                layer_ids=self.layer_ids,
                buffer_info=info,
            ),
        )

    def _given(self, copied: StateCopy, slots: int) -> list[torch.Tensor]:
        """The tensors of a copy of `slots` slots, `[layers, slots, *shape]`.

        Raises:  ShapeError: they are not those of this pool.
        """
        listed = listed_state(copied)
        mine = self._tensors()
        if len(listed) != len(mine):
            raise ShapeError(f"the copy has {len(listed)} state tensors, the pool {len(mine)}")
        found = []
        for tensor, got in zip(mine, listed, strict=True):
            wanted = (tensor.shape[0], slots, *tensor.shape[2:])
            if slots == 1 and got.ndim == tensor.ndim - 1:
                got = got.unsqueeze(1)
            if tuple(got.shape) != wanted or got.dtype != tensor.dtype:
                raise ShapeError(
                    f"a state tensor of the copy has {got.dtype} {tuple(got.shape)}, the pool "
                    f"{tensor.dtype} {wanted}"
                )
            found.append(got)
        return found

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.conv, *([] if self.temporal is None else [self.temporal])]

    def _ids(self, indices: object, name: str) -> torch.Tensor:
        found = as_tensor(indices, name)
        found = found.reshape(1) if found.ndim == 0 else found
        return slots_of(found, name, self.slots, self._torch_device)

    def _bind(self) -> None:
        views = {tensor.part: self._view(tensor) for tensor in self.tensors}
        self.temporal = views.pop("temporal", None)
        self.conv = list(views.values())

    def _unbind(self) -> None:
        self.conv, self.temporal = [], None

    def _view(self, tensor: StateTensor) -> torch.Tensor:
        """`[layers, slots, *shape]` of one tensor."""
        group = self.layout.groups[0].name
        first, *others = (
            self.layout.planes_by_key[group, tensor.part, layer][0] for layer in self.layer_ids
        )
        places = [self._storage.offset(plane.region, plane.base) for plane in (first, *others)]
        layer_stride = places[1] - places[0] if others else tensor.length_bytes
        item = item_bytes(tensor.dtype)
        strides = (layer_stride, first.page_stride)
        if any(place % item for place in (places[0], *strides)):
            raise ConfigError(
                f"state tensor {tensor.part} begins at byte {places[0]}, layers and slots are "
                f"{strides} bytes apart; these must be multiples of the {item} of {tensor.dtype}"
            )
        inner = torch.empty(tensor.shape, device="meta").stride()
        return self._storage.strided(
            getattr(torch, tensor.dtype),
            places[0],
            (len(self.layer_ids), self.slots, *tensor.shape),
            (*(stride // item for stride in strides), *inner),
        )


def listed_state(copied: object) -> list[torch.Tensor]:
    """The tensors of a copy of states: the convolutions, then the temporal state if it has one.

    A temporal state without an element is none; engines keep one for layers that have only
    convolutions.

    Raises:  ShapeError: no pair of a list of convolutions and a temporal state.
    """
    if not isinstance(copied, (list, tuple)) or len(copied) != 2:
        raise ShapeError(
            f"the copy of states is {kind_of(copied)}; a pair of the list of convolutions and the "
            "temporal state is needed, as get_cpu_copy gives it"
        )
    conv, temporal = copied
    if not isinstance(conv, (list, tuple)):
        raise ShapeError(f"the convolutions of the copy are {kind_of(conv)}; a list is needed")
    listed = [*conv] if temporal is None else [*conv, temporal]
    for number, tensor in enumerate(listed):
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(
                f"state tensor {number} of the copy is {kind_of(tensor)}; a tensor is needed"
            )
    return listed if temporal is None or temporal.numel() else listed[:-1]

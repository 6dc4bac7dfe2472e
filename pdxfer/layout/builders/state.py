"""Layouts of recurrent state: one slot a request, moved whole; convolutions and temporal state.

A state tensor of one slot and layer is `[outer ..., axis, inner ...]`: `rows` are the outer
elements, heads the units of the axis that attention TP slices, a cell what lies inside of one unit.
Where several tensors are packed along the axis, each sliced on its own (GDN packs
`[key_dim, key_dim, value_dim]`), each is a plane of its own: a shard group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids
from pdxfer.layout.builders.entries import entry_bytes
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.groups import STATE, Group
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import WHOLE, Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the recurrent state of a request, which every layer has.

    Raises:  ConfigError: an axis or shard groups that the shape does not have.
    """

    part: str
    """Name of the part, such as `conv.0` or `temporal`."""
    shape: tuple[int, ...]
    """Sizes of the axes of one slot of one layer, on this rank."""
    dtype: str
    axis: int | None = 0
    """The axis that attention TP slices; None where every rank has the whole tensor."""
    shard_groups: tuple[int, ...] = ()
    """Elements along the axis of each tensor packed there, on this rank; empty where it is one."""
    unit: int = 1
    """How many elements along the axis always stay together; the same on both sides."""
    tp: int = 0
    """Which part of the whole axis is here: number `tp` of `tp_size`, in each shard group."""
    tp_size: int = 1

    def __post_init__(self) -> None:
        where = f"state tensor {self.part}"
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"{where} has shape {self.shape}; sizes from 1 are needed")
        if self.axis is None:
            if self.shard_groups or self.tp_size != 1:
                raise ConfigError(f"{where} is replicated (axis None); it has no shards")
            return
        if not 0 <= self.axis < len(self.shape):
            raise ConfigError(f"{where} has axis {self.axis}, its shape is {self.shape}")
        if not 0 <= self.tp < self.tp_size:
            raise ConfigError(f"{where} has tp {self.tp} of tp_size {self.tp_size}")
        sizes = self.groups
        if sum(sizes) != self.shape[self.axis] or min(sizes) < 1:
            raise ConfigError(
                f"{where} has shard_groups {sizes}; together they must be the "
                f"{self.shape[self.axis]} elements of axis {self.axis}"
            )
        if self.unit < 1 or any(size % self.unit for size in sizes):
            raise ConfigError(f"{where} has unit {self.unit}, which does not divide {sizes}")

    @property
    def groups(self) -> tuple[int, ...]:
        """Elements along the axis of each shard group."""
        if self.axis is None:
            return (1,)
        return self.shard_groups or (self.shape[self.axis],)

    @property
    def length_bytes(self) -> int:
        """Bytes of one slot of one layer, on this rank."""
        return prod(self.shape) * item_bytes(self.dtype)


def state(
    *,
    layers: Iterable[int],
    tensors: Sequence[StateTensor],
    slots: int,
    reserved_slots: int = 1,
    group: str = "state",
    model: str = "",
) -> KVLayout:
    """Recurrent state in memory of its own: one region `[slots, *shape]` for each tensor and layer.

    Args:    layers: global ids of the layers that keep state. tensors: what each of them keeps.
             slots: slots of the pool, the reserved ones included. reserved_slots: slot ids below
             this number never travel; 1 unless given. group: name of the group; `state` unless
             given. model: `name@revision`, compared where both sides give it; empty unless given.
    Raises:  ConfigError: a value that no pool has.
    """
    ids = _ids(layers, tensors)
    planes: list[Plane] = []
    regions: list[RegionSpec] = []
    for tensor in tensors:
        item = tensor.length_bytes
        for layer in ids:
            planes += _planes(tensor, layer, group, (len(regions), 0, item))
            regions.append(RegionSpec(slots * item, item))
    groups = (Group(group, 1, slots, reserved_slots, STATE),)
    return KVLayout(groups, tuple(planes), tuple(regions), tensors[0].dtype, model)


def state_entries(  # noqa: PLR0913 the shape of a pool
    *,
    layers: Iterable[int],
    tensors: Sequence[StateTensor],
    slots: int,
    reserved_slots: int = 1,
    group: str = "state",
    model: str = "",
    length_bytes: int | None = None,
    padded: bool = False,
) -> KVLayout:
    """Recurrent state in unified memory: a slot is one entry, which all tensors and layers share.

    An entry holds the first tensor of every layer, then the second of every layer, and so on.

    Args:    length_bytes: bytes of the whole buffer, where several groups share it; None, the
             default: as many as its own slots need. padded: whether the entry is padded to a
             multiple of 32 bytes, as it is where the state of a draft follows. The others: the
             arguments of `state`.
    Raises:  ConfigError: a value that no pool has.
    """
    ids = _ids(layers, tensors)
    entry = state_entry_bytes(len(ids), tensors, padded=padded)
    planes: list[Plane] = []
    base = 0
    for tensor in tensors:
        for layer in ids:
            planes += _planes(tensor, layer, group, (0, base, entry))
            base += tensor.length_bytes
    return KVLayout(
        groups=(Group(group, 1, slots, reserved_slots, STATE),),
        planes=tuple(planes),
        regions=(RegionSpec(slots * entry if length_bytes is None else length_bytes, entry),),
        dtype=tensors[0].dtype,
        model=model,
        unified_memory=True,
        relayout="never",
    )


def state_entry_bytes(layers: int, tensors: Iterable[StateTensor], *, padded: bool = False) -> int:
    """Bytes of one slot in unified memory, where `layers` layers have these tensors."""
    length = layers * sum(tensor.length_bytes for tensor in tensors)
    return entry_bytes(length) if padded else length


def _ids(layers: Iterable[int], tensors: Sequence[StateTensor]) -> tuple[int, ...]:
    ids = layer_ids(layers)
    if not tensors or len({tensor.part for tensor in tensors}) != len(tensors):
        raise ConfigError("state needs tensors of distinct parts")
    return ids


def _planes(
    tensor: StateTensor, layer: int, group: str, place: tuple[int, int, int]
) -> Iterator[Plane]:
    """The planes of one tensor and layer, one a shard group; place is region, base, page stride."""
    region, base, page_stride = place
    axis = tensor.axis
    size = item_bytes(tensor.dtype)
    inner = prod(tensor.shape) * size if axis is None else prod(tensor.shape[axis + 1 :]) * size
    cell = inner * tensor.unit
    along = 1 if axis is None else tensor.shape[axis]
    units_total = sum(tensor.groups) // tensor.unit * tensor.tp_size
    first = 0
    for elements in tensor.groups:
        units = elements // tensor.unit
        yield Plane(
            group=group,
            part=tensor.part,
            layer=layer,
            region=region,
            base=base,
            page_stride=page_stride,
            row_stride=along * inner,
            head_stride=cell,
            head_first=first + tensor.tp * units,
            heads=units,
            heads_total=units_total,
            cell_bytes=cell,
            rows=1 if axis is None else prod(tensor.shape[:axis]),
            dtype=tensor.dtype,
            row_kind=WHOLE,
        )
        base += elements * inner
        first += units * tensor.tp_size

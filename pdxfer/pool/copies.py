"""Copies of some tokens of a pool on the host, and back into it or into another pool.

A copy is a nested list, `[layer][chunk]` of K and V (of every unit the layer has; of one unit the
tensor itself), rows `[n, heads, dim]` in the order of the indices. It says nothing of where the
rows lay, so that what was copied out of one layout loads into another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch

from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import PartRows, last_of_each

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_SLOTS: Final = 8192
"""Rows that are gathered at a time, so that a copy needs little memory on the device."""

Chunk = torch.Tensor | list[torch.Tensor]
"""The copied rows of one layer: a tensor where a row has one unit (MLA), else a tensor for each
unit."""
_SCALE: Final = "_scale"
"""Ends the name of a part that has one scale byte for some elements of another part."""


class HostCopy(list[list[Chunk]]):
    """Tokens of a pool on the host: `[layer][chunk]`, and the element type the bytes stand for."""

    def __init__(self, layers: Sequence[list[Chunk]], dtype: str) -> None:
        """A copy of `layers`, of elements of `dtype` (8-bit floats lie in it as uint8)."""
        super().__init__(layers)
        self.dtype = dtype


def copy_out(
    layers: Sequence[Sequence[PartRows]], loc: torch.Tensor, dtype: str, chunk_slots: int
) -> HostCopy:
    """The rows of slots `loc` of every layer, on the host.

    Args:    layers: rows of every unit, by layer. loc: checked; any order, repeats allowed.
    """
    synchronize(loc.device)
    parts = [loc[start : start + chunk_slots] for start in range(0, loc.numel(), chunk_slots)]
    copied = [
        [
            _chunk(
                [
                    rows.gather(part).to("cpu").view(shown)
                    for rows, shown in zip(units, _shown_dtypes(units), strict=True)
                ]
            )
            for part in parts
        ]
        for units in layers
    ]
    synchronize(loc.device)
    return HostCopy(copied, dtype)


def copy_in(
    layers: Sequence[Sequence[PartRows]],
    loc: torch.Tensor,
    copied: Sequence[Sequence[Chunk]],
    dtype: str,
) -> None:
    """Write a copy to slots `loc`; where one appears twice its last row stays.

    Raises:  ShapeError: layers, units, rows, shapes or element types that are not these; nothing
             was written.
    """
    chunks = check_copy(layers, loc.numel(), copied, dtype)
    synchronize(loc.device)
    kept = last_of_each(loc)
    for units, layer_chunks in zip(layers, chunks, strict=True):
        if kept is None:
            _write(units, loc, layer_chunks)
        elif layer_chunks:
            whole = [torch.cat(tensors) for tensors in zip(*layer_chunks, strict=True)]
            at = kept.to(whole[0].device)
            _write(units, loc[kept], [[tensor[at] for tensor in whole]])
    synchronize(loc.device)


def check_copy(
    layers: Sequence[Sequence[PartRows]], count: int, copied: Sequence[Sequence[Chunk]], dtype: str
) -> list[list[list[torch.Tensor]]]:
    """The tensors of a copy by layer, chunk and unit, of the dtypes in which they are stored.

    Raises:  ShapeError: the copy is not of `count` rows of these layers.
    """
    if isinstance(copied, HostCopy) and copied.dtype != dtype:
        raise ShapeError(f"the copy is of {copied.dtype} elements, the pool of {dtype}")
    given = _listed(copied, "the copy", "a list of layers")
    if len(given) != len(layers):
        raise ShapeError(f"the copy has {len(given)} layers, the pool {len(layers)}")
    found = []
    for units, layer_chunks in zip(layers, given, strict=True):
        name = f"layer {units[0].layer} of the copy"
        chunks = [
            _tensors(chunk, f"chunk {number} of {name}")
            for number, chunk in enumerate(_listed(layer_chunks, name, "a list of chunks"))
        ]
        rows = sum(len(chunk[0]) for chunk in chunks if chunk)
        if rows != count:
            raise ShapeError(f"{name} has {rows} rows for {count} indices")
        found.append([_checked_chunk(units, chunk) for chunk in chunks])
    return found


def take_rows(copied: Sequence[Sequence[Chunk]], kept: torch.Tensor) -> list[list[Chunk]]:
    """The rows of a checked copy for which the mask `kept` is set; a `HostCopy` of one."""
    rows = torch.nonzero(kept.to("cpu")).flatten()
    layers: list[list[Chunk]] = []
    for chunks in copied:
        if not chunks:
            layers.append([])
            continue
        columns = [[_bytes(t) for t in ([c] if isinstance(c, torch.Tensor) else c)] for c in chunks]
        whole = [torch.cat(tensors)[rows] for tensors in zip(*columns, strict=True)]
        layers.append([_chunk(whole)] if len(rows) else [])
    return HostCopy(layers, copied.dtype) if isinstance(copied, HostCopy) else layers


def synchronize(device: torch.device) -> None:
    """Wait for what the device still does to the pool."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write(
    units: Sequence[PartRows], loc: torch.Tensor, chunks: Sequence[Sequence[torch.Tensor]]
) -> None:
    start = 0
    for chunk in chunks:
        end = start + len(chunk[0])
        for rows, tensor in zip(units, chunk, strict=True):
            rows.scatter(loc[start:end], tensor.to(loc.device, non_blocking=True))
        start = end


def _checked_chunk(units: Sequence[PartRows], chunk: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a chunk as they are stored."""
    if len(chunk) != len(units):
        raise ShapeError(
            f"layer {units[0].layer} of the copy has {len(chunk)} tensors, the pool {len(units)}: "
            f"{', '.join(rows.part for rows in units)}"
        )
    for rows, tensor in zip(units, chunk, strict=True):
        wanted = (len(chunk[0]), rows.heads, rows.width)
        if tuple(tensor.shape) != wanted or tensor.dtype not in _taken_dtypes(rows):
            raise ShapeError(
                f"{rows.part} of layer {rows.layer} of the copy has {tensor.dtype} "
                f"{tuple(tensor.shape)}, the pool {rows.dtype} {wanted}"
            )
    return [tensor.view(rows.dtype) for rows, tensor in zip(units, chunk, strict=True)]


def _shown_dtypes(units: Sequence[PartRows]) -> list[torch.dtype]:
    """The dtypes of the tensors of a copy of these units.

    Rows that have scales, and the scales, show what they are, as MXFP8 caches of engines do; other
    floats of 8 bits are bytes there, and so they are here.
    """
    scaled = {rows.part.removesuffix(_SCALE) for rows in units if rows.part.endswith(_SCALE)}
    return [
        torch.float8_e8m0fnu
        if _is_scale(rows)
        else rows.element
        if rows.part in scaled
        else rows.dtype
        for rows in units
    ]


def _taken_dtypes(rows: PartRows) -> set[torch.dtype]:
    """The dtypes that tensors of a unit may have: as it is stored, or what the bytes stand for."""
    return {rows.dtype, torch.float8_e8m0fnu if _is_scale(rows) else rows.element}


def _is_scale(rows: PartRows) -> bool:
    return rows.part.endswith(_SCALE) and rows.dtype == torch.uint8


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of 8 bits as bytes: torch has no indexed read of all of them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _listed(value: object, name: str, needed: str) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise ShapeError(
            f"{name} is {kind_of(value)}; {needed} is needed, as get_cpu_copy gives it"
        )
    return list(value)


def _tensors(chunk: object, name: str) -> list[torch.Tensor]:
    """The tensors of a chunk, one a unit."""
    if isinstance(chunk, torch.Tensor):
        chunk = [chunk]
    found = _listed(chunk, name, "a list of tensors")
    for number, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            raise ShapeError(
                f"tensor {number} of {name} is {kind_of(tensor)}; a tensor of rows is needed, as "
                "get_cpu_copy gives it"
            )
    return cast("list[torch.Tensor]", found)


def kind_of(value: object) -> str:
    """What was given in the place of something else, for a text."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _chunk(tensors: list[torch.Tensor]) -> Chunk:
    return tensors[0] if len(tensors) == 1 else tensors

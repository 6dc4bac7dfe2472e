"""What a cache holds, before an order of axes says where: parts, layers and one group of pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NotRequired, TypedDict

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, natural, positive
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.groups import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """One part of one layer: in every row, `heads` cells of `cell_bytes`."""

    name: str
    heads: int
    """Heads that are here."""
    heads_total: int
    """Heads of the whole model; 1 where every rank has the same."""
    head_first: int
    """Global number of the first head that is here."""
    cell_bytes: int
    dtype: str
    tile: str = ""
    """Name of the inner order of a tile; its cell is a whole page of one head, in one row."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The parts of one layer whose cells of the same row and head lie side by side.

    Its parts have the same heads, and are all tiles or none.
    """

    number: int
    """The place of this tensor among the tensors of a layer."""
    layer: int
    parts: tuple[Part, ...]

    @property
    def heads(self) -> int:
        """How many heads of this tensor are here."""
        return self.parts[0].heads

    @property
    def head_first(self) -> int:
        """Global number of the first head that is here."""
        return self.parts[0].head_first

    @property
    def tile(self) -> str:
        """Name of the inner order of its tiles; empty where it has token rows."""
        return self.parts[0].tile

    @property
    def cell_bytes(self) -> int:
        """Bytes of one row and head, of all its parts together."""
        return sum(part.cell_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cache of one group holds: tensors of layers, wherever they lie."""

    layers: tuple[int, ...]
    """Global ids of the layers, in the order in which they lie."""
    tensors: tuple[Tensor, ...]
    group: Group
    dtype: str
    """Element type of the layout; each part has its own besides."""
    model: str

    def renamed(self, names: Mapping[str, str]) -> Shape:
        """A shape of only some parts, under other names.

        Args:    names: the new name of each part that stays; each must be a tensor of its own.
        """
        kept = [tensor for tensor in self.tensors if tensor.parts[0].name in names]
        numbers = sorted({tensor.number for tensor in kept})
        tensors = tuple(
            replace(
                tensor,
                number=numbers.index(tensor.number),
                parts=tuple(replace(part, name=names[part.name]) for part in tensor.parts),
            )
            for tensor in kept
        )
        return replace(self, tensors=tensors)

    def tiled(self, parts: Iterable[str], name: str) -> Shape:
        """A shape in which these parts are tiles of that name: a page of one head is one cell."""
        tiles = set(parts)
        tensors = tuple(
            replace(tensor, parts=tuple(self._tile(p, name) for p in tensor.parts))
            if tensor.parts[0].name in tiles
            else tensor
            for tensor in self.tensors
        )
        return replace(self, tensors=tensors)

    def beside(self, other: Shape) -> Shape:
        """A shape with the tensors of this one, then those of another of the same group."""
        first = 1 + max(tensor.number for tensor in self.tensors)
        moved = (replace(tensor, number=first + tensor.number) for tensor in other.tensors)
        return replace(self, tensors=(*self.tensors, *moved))

    def _tile(self, part: Part, name: str) -> Part:
        return replace(part, cell_bytes=part.cell_bytes * self.group.page_size, tile=name)


def of_units(
    layers: tuple[int, ...], units: Sequence[tuple[Part, ...]], group: Group, dtype: str, model: str
) -> Shape:
    """The shape of a cache whose layers are all alike.

    Args:    units: the parts of each tensor of a layer; parts of one tensor share their rows.
    """
    tensors = tuple(
        Tensor(number, layer, parts) for number, parts in enumerate(units) for layer in layers
    )
    return Shape(layers, tensors, group, dtype, model)


class KVShape(TypedDict):
    """The arguments of the builders of keys and values."""

    layers: Iterable[int]
    """Global ids of the layers that are here; a pipeline stage gives its own."""
    kv_heads: int
    """KV heads that are here."""
    head_dim: int
    """Elements of a head of K."""
    v_head_dim: NotRequired[int | None]
    """Elements of a head of V; None, the default, means `head_dim`."""
    page_size: int
    """Tokens of a page."""
    pages: int
    """Pages of the pool, the reserved ones included."""
    dtype: str
    """Name of an element's type, such as `bfloat16`."""
    total_kv_heads: NotRequired[int | None]
    """KV heads of the whole model; None, the default, means `kv_heads`."""
    head_first: NotRequired[int]
    """Global number of the first head that is here; 0 unless given."""
    reserved_pages: NotRequired[int]
    """Page ids below this number never travel; 1 unless given."""
    group: NotRequired[str]
    """Name of the group of pages; `full` unless given."""
    model: NotRequired[str]
    """`name@revision`, compared where both sides give it; empty unless given."""


def kv_shape(  # noqa: PLR0913 one per field of KVShape
    *,
    layers: Iterable[int],
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    v_head_dim: int | None = None,
    total_kv_heads: int | None = None,
    head_first: int = 0,
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> Shape:
    """What the arguments of a builder of keys and values describe: a tensor of K, and one of V.

    Raises:  ConfigError: a value that no pool has; the text names argument and value.
    """
    width = head_dim if v_head_dim is None else v_head_dim
    total = kv_heads if total_kv_heads is None else total_kv_heads
    positive(
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=width,
        total_kv_heads=total,
        page_size=page_size,
        pages=pages,
    )
    natural(head_first=head_first, reserved_pages=reserved_pages)
    if head_first + kv_heads > total:
        raise ConfigError(
            f"heads {head_first} to {head_first + kv_heads - 1} are not of total_kv_heads={total}; "
            "give total_kv_heads of the whole model",
            fields={"head_first": str(head_first), "total_kv_heads": str(total)},
        )
    size = item_bytes(dtype)
    k = Part("k", kv_heads, total, head_first, head_dim * size, dtype)
    v = Part("v", kv_heads, total, head_first, width * size, dtype)
    group_of_pages = Group(group, page_size, pages, reserved_pages)
    return of_units(layer_ids(layers), [(k,), (v,)], group_of_pages, dtype, model)


def latent_shape(  # noqa: PLR0913 the arguments of the builders of latent attention
    *,
    layers: Iterable[int],
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> Shape:
    """What the arguments of `mla` describe: one tensor of `latent` and `rope`, with one head.

    Raises:  ConfigError: a value that no pool has; the text names argument and value.
    """
    positive(page_size=page_size, pages=pages)
    ids = layer_ids(layers)
    positive(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    size = item_bytes(dtype)
    row = (
        Part("latent", 1, 1, 0, kv_lora_rank * size, dtype),
        Part("rope", 1, 1, 0, qk_rope_head_dim * size, dtype),
    )
    return of_units(ids, [row], Group(group, page_size, pages, reserved_pages), dtype, model)

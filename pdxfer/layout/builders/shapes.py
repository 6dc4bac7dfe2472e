"""What builders turn into layouts: parts of a layer, layers of a rank, one group of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, natural, positive
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.groups import Group
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one layer: `heads` vectors of `cell_bytes` in every row."""

    name: str
    heads: int
    heads_total: int
    head_first: int
    cell_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of all heads of one row."""
        return self.heads * self.cell_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What all builders share."""

    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    group: Group
    dtype: str
    model: str

    def plane(
        self,
        part: Part,
        layer: int,
        *,
        region: int,
        base: int,
        page_stride: int,
        row_stride: int,
        head_stride: int | None = None,
    ) -> Plane:
        """The plane of one part and layer; heads of a row lie together unless said otherwise."""
        return Plane(
            group=self.group.name,
            part=part.name,
            layer=layer,
            region=region,
            base=base,
            page_stride=page_stride,
            row_stride=row_stride,
            head_stride=part.cell_bytes if head_stride is None else head_stride,
            head_first=part.head_first,
            heads=part.heads,
            heads_total=part.heads_total,
            cell_bytes=part.cell_bytes,
            rows=self.group.page_size,
            dtype=self.dtype,
        )

    def layout(
        self, planes: Iterable[Plane], regions: Iterable[RegionSpec], *, unified: bool
    ) -> KVLayout:
        """These planes and regions as a layout of this group."""
        return KVLayout(
            groups=(self.group,),
            planes=tuple(planes),
            regions=tuple(regions),
            dtype=self.dtype,
            model=self.model,
            unified_memory=unified,
            relayout="never" if unified else "allow",
        )


class KVShape(TypedDict):
    """The arguments of the builders of K and V."""

    layers: Iterable[int]
    """Global ids; a pipeline stage gives its own."""
    kv_heads: int
    """Heads that are here."""
    head_dim: int
    v_head_dim: NotRequired[int | None]
    """None: `head_dim`."""
    page_size: int
    """Tokens of a page."""
    pages: int
    """The reserved ones included."""
    dtype: str
    total_kv_heads: NotRequired[int | None]
    """Of the whole model; None: `kv_heads`."""
    head_first: NotRequired[int]
    """Global number of the first head that is here; 0."""
    reserved_pages: NotRequired[int]
    """Ids below it never travel; 1."""
    group: NotRequired[str]
    """`full`."""
    model: NotRequired[str]
    """`name@revision`; empty: not compared."""


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
    """The arguments of a builder of K and V, checked.

    Raises:  ConfigError: a value that no pool has.
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
    return Shape(
        layers=layer_ids(layers),
        parts=(
            Part("k", kv_heads, total, head_first, head_dim * size),
            Part("v", kv_heads, total, head_first, width * size),
        ),
        group=Group(group, page_size, pages, reserved_pages),
        dtype=dtype,
        model=model,
    )

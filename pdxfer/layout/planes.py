"""Planes and regions: where every cell of a pool is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKEN: Final = "token"
WHOLE: Final = "whole"
TILE: Final = "tile"


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One contiguous range of memory that a layout needs."""

    length_bytes: int
    item_len: int
    """Bytes of one page in this region, of the first group that lies there."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of the cache, as an address formula.

    The cell at (page, row, head) is `cell_bytes` contiguous bytes at

        base + page * page_stride + row * row_stride + (head - head_first) * head_stride

    in region `region`. Offsets and strides are in bytes and not negative.
    """

    group: str
    part: str
    """Name of the part, such as `k`, `latent`, `rope`, `k_scale`, `conv.0` or `draft.k`."""
    layer: int
    """Number of the layer in the model."""
    region: int
    base: int
    page_stride: int
    row_stride: int
    head_stride: int
    head_first: int
    """Global number of the first head that is here."""
    heads: int
    heads_total: int
    """Heads of this part and layer in the whole model; 1 where every rank has the same."""
    cell_bytes: int
    rows: int
    """Rows of one page: the page size of the group for `token`, the count of the outer axes for
    `whole`, 1 for `tile`."""
    dtype: str
    row_kind: str = TOKEN
    """What a row is: `token` for a token, `whole` for a part of recurrent state, `tile` for one
    opaque cell that moves whole."""
    tile: str = ""
    """Name of the order inside of a tile, the same on both sides; empty where there is none."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The group, part and layer, by which planes of two layouts are matched."""
        return (self.group, self.part, self.layer)

    @property
    def head_end(self) -> int:
        """One past the last global head that is here."""
        return self.head_first + self.heads

    def places(self, pages: int) -> dict[str, object]:
        """The base and the strides, so told that the number of pages of the pool does not enter.

        A base behind other tensors is -1, since how far it lies depends on the number of pages
        alone. A stride that steps over all pages, of an axis outside of them, is told as how many
        times it does so and what is left.
        """
        span = self.page_stride * pages

        def step(stride: int) -> object:
            if pages == 1 or span == 0 or stride < span:
                return stride
            return {"page_spans": stride // span, "bytes": stride % span}

        return {
            "base": -1 if self.base >= self.page_stride else self.base,
            "page_stride": self.page_stride,
            "row_stride": step(self.row_stride),
            "head_stride": step(self.head_stride),
        }

    def offset(self, page: int, row: int, head: int) -> int:
        """Offset in bytes of the cell of a global head, from the start of the region."""
        return (
            self.base
            + page * self.page_stride
            + row * self.row_stride
            + (head - self.head_first) * self.head_stride
        )

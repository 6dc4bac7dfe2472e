"""Layouts of MXFP8 caches: quantised rows, and one scale byte for each 32 elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import token_major
from pdxfer.layout.builders.parts import join_parts, select_parts
from pdxfer.layout.builders.tiles import as_tile

if TYPE_CHECKING:
    from pdxfer.layout.builders.shapes import KVShape
    from pdxfer.layout.kv_layout import KVLayout

SCALE_BLOCK: Final = 32
"""Elements that share one scale byte (UE8M0) of an MXFP8 row."""
INTERLEAVED_PAGE_SIZE: Final = 128
"""The page size whose scales kernels read interleaved."""
MXFP8_TILE: Final = "mxfp8_interleaved_32"
"""Scales of a page and head, `[32, page_size / 32, blocks]`: token o is at
`(o % 32) * (page_size / 32) + o / 32`."""


@named
def mxfp8(*, interleaved: bool | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """MXFP8 rows as `token_major`, and one scale byte for each 32 elements of a head.

    Regions: K, V, then `k_scale` and `v_scale` of every layer. Flat scales are token rows
    `[slots, H, D / 32]`; interleaved ones opaque tiles a page and head.

    Args:    interleaved: None: where `page_size` is 128, as kernels read them.
             shape: those of `token_major`; `dtype` is of the rows.
    Raises:  ConfigError: a head dim that 32 does not divide, tiles of another page size, or a value
             that no pool has.
    """
    widths = {"head_dim": shape["head_dim"], "v_head_dim": shape.get("v_head_dim")}
    for name, width in widths.items():
        if width is None:
            continue
        positive(**{name: width})
        if width % SCALE_BLOCK:
            raise ConfigError(
                f"MXFP8 KV cache requires {name} divisible by {SCALE_BLOCK}, got {width}.",
                fields={name: str(width)},
            )
    rows = token_major(**shape)
    v_width = widths["v_head_dim"]
    scale_shape: KVShape = {**shape, "dtype": "uint8", "head_dim": shape["head_dim"] // SCALE_BLOCK}
    scale_shape["v_head_dim"] = None if v_width is None else v_width // SCALE_BLOCK
    scales = select_parts(token_major(**scale_shape), {"k": "k_scale", "v": "v_scale"})
    if interleaved or (interleaved is None and shape["page_size"] == INTERLEAVED_PAGE_SIZE):
        scales = _as_tiles(scales)
    return join_parts(rows, scales)


def _as_tiles(scales: KVLayout) -> KVLayout:
    """Flat scales as one tile a page and head, in the same regions."""
    page_size = scales.groups[0].page_size
    if page_size % SCALE_BLOCK:
        raise ConfigError(
            f"page_size={page_size}: interleaved scales need a multiple of {SCALE_BLOCK}",
            fields={"page_size": str(page_size)},
        )
    planes = tuple(as_tile(plane, page_size, MXFP8_TILE) for plane in scales.planes)
    return dataclasses.replace(scales, planes=planes)

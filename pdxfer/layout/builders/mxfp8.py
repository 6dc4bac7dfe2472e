"""Builder of layouts of MXFP8 caches: quantised rows, and one scale byte for each 32 elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders import table
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import KVShape, kv_shape

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout

SCALE_BLOCK: Final = 32
"""Elements that share one scale byte (UE8M0) of an MXFP8 row."""
INTERLEAVED_PAGE_SIZE: Final = 128
"""The page size whose scales kernels read interleaved."""
MXFP8_TILE: Final = "mxfp8_interleaved_32"
"""Name of the tile of interleaved scales.

A tile has the scales of a page and head, `[32, page_size / 32, blocks]`: those of token o are at
`(o % 32) * (page_size / 32) + o / 32`."""


@named
def mxfp8(*, interleaved: bool | None = None, **shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values in MXFP8: rows as in `token_major`, and a scale byte for each 32 elements.

    Its regions are K, V, `k_scale` and `v_scale` of every layer. Flat scales are token rows
    `[slots, heads, head_dim / 32]`; interleaved ones are opaque tiles of a page and head.

    Args:    interleaved: whether the scales are tiles; None, the default: where `page_size` is 128,
             as kernels read them. shape: the arguments of `token_major`; `dtype` is of the rows.
    Raises:  ConfigError: a head dim that 32 does not divide, tiles of another page size, a value
             that no pool has, an unknown or a missing argument.
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
    rows = kv_shape(**shape)
    v_width = widths["v_head_dim"]
    scale_shape: KVShape = {**shape, "dtype": "uint8", "head_dim": shape["head_dim"] // SCALE_BLOCK}
    scale_shape["v_head_dim"] = None if v_width is None else v_width // SCALE_BLOCK
    # the layers were read once already: they may be an iterator
    scale_shape["layers"] = rows.layers
    scales = kv_shape(**scale_shape).renamed({"k": "k_scale", "v": "v_scale"})
    page_size = rows.group.page_size
    if interleaved or (interleaved is None and page_size == INTERLEAVED_PAGE_SIZE):
        if page_size % SCALE_BLOCK:
            raise ConfigError(
                f"page_size={page_size}: interleaved scales need a multiple of {SCALE_BLOCK}",
                fields={"page_size": str(page_size)},
            )
        scales = scales.tiled(("k_scale", "v_scale"), MXFP8_TILE)
    return table.ROWS["token_major"].layout(rows.beside(scales))

"""Builder of a vendor's 5-D layout, whose kernels read a page of a head as one block.

Such a block is a tile: opaque, named, moved whole, and only into a layout with the same tile and
page size. What its name does not say (the width of the dtype) is compared apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders import table
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.shapes import KVShape, kv_shape
from pdxfer.layout.dtypes import item_bytes

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout

VECTOR_BYTES: Final = 16
"""Bytes of the innermost run of the 5-D layout."""


@named
def vectorized_5d(**shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values with one 5-D tensor for each layer and part, x elements being 16 bytes.

    K is `[pages, heads, head_dim / x, page_size, x]`, V is `[pages, heads, page_size / x,
    v_head_dim, x]`. A page of a head is one tile, which moves whole. Its regions are those of
    `token_major`.

    Args:    shape: the arguments of `token_major`.
    Raises:  ConfigError: a `head_dim` or `page_size` that x does not divide, a value that no pool
             has, an unknown or a missing argument.
    """
    held = kv_shape(**shape)
    x = VECTOR_BYTES // item_bytes(shape["dtype"])
    for name in ("head_dim", "page_size"):
        value = shape["head_dim"] if name == "head_dim" else shape["page_size"]
        if value % x:
            raise ConfigError(
                f"{name} is {value}; the 5-D layout of {shape['dtype']} needs a multiple of {x}",
                fields={name: str(value)},
            )
    return table.ROWS["token_major"].layout(held.tiled(("k", "v"), "vectorized_5d"))

"""Layouts of kernels that read a page of a head as one block of their own inner order.

Such a block is a tile: opaque, named, moved whole, and only into a layout with the same tile and
page size. What its name does not say (the width of the dtype) is compared apart.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import token_major
from pdxfer.layout.builders.shapes import KVShape
from pdxfer.layout.builders.vllm import vllm_blocks
from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.planes import TILE, Plane

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout

CPU_ISAS: Final = {"vec": ("k",), "vec16": ("k",), "amx": ("k", "v")}
"""Parts that the CPU kernels of vLLM keep in an order of their own, by instruction set."""
VECTOR_BYTES: Final = 16
"""Innermost run of the 5-D layout."""


@named
def vllm_cpu(*, isa: str, order: str = "LBHNC", **shape: Unpack[KVShape]) -> KVLayout:
    """VLLM on a CPU: in each (block, head) first K, transposed to `[D, N]`, then V.

    K is a tile named by the instruction set; V is `[N, Dv]` token rows for `vec` and `vec16`, and
    a tile too for `amx`, which packs it. Only pairs of one instruction set match.

    Args:    isa: one of `CPU_ISAS`. order: as `vllm_blocks`, heads outside the tokens of a block.
             shape: those of `token_major`.
    Raises:  ConfigError: another isa, an order with tokens outside heads, a value that no pool has.
    """
    if isa not in CPU_ISAS:
        raise ConfigError(
            f"isa is {isa!r}; it must be one of {', '.join(CPU_ISAS)}", fields={"isa": repr(isa)}
        )
    if not order.endswith("NC"):
        raise ConfigError(
            f"order is {order!r}; tiles of a block and head need an order that ends in NC",
            fields={"order": repr(order)},
        )
    rows = vllm_blocks(order=order, **shape)
    page_size = rows.groups[0].page_size
    by_key = {plane.key: plane for plane in rows.planes}
    planes = []
    for plane in rows.planes:
        keys = by_key[plane.group, "k", plane.layer]
        base = keys.base if plane.part == "k" else keys.base + page_size * keys.cell_bytes
        placed = dataclasses.replace(plane, base=base, row_stride=plane.cell_bytes)
        tiled = plane.part in CPU_ISAS[isa]
        planes.append(as_tile(placed, page_size, f"vllm_cpu_{isa}") if tiled else placed)
    return dataclasses.replace(rows, planes=tuple(planes))


@named
def vectorized_5d(**shape: Unpack[KVShape]) -> KVLayout:
    """K `[pages, H, D / x, ps, x]` and V `[pages, H, ps / x, Dv, x]`, x elements being 16 bytes.

    One tensor a layer and part; regions as `token_major`. A page of a head is one tile.

    Args:    shape: those of `token_major`.
    Raises:  ConfigError: a head_dim or page_size that x does not divide, a value that no pool has.
    """
    rows = token_major(**shape)
    x = VECTOR_BYTES // item_bytes(shape["dtype"])
    for name in ("head_dim", "page_size"):
        value = shape["head_dim"] if name == "head_dim" else shape["page_size"]
        if value % x:
            raise ConfigError(
                f"{name} is {value}; the 5-D layout of {shape['dtype']} needs a multiple of {x}",
                fields={name: str(value)},
            )
    page_size = rows.groups[0].page_size
    planes = tuple(as_tile(plane, page_size, "vectorized_5d") for plane in rows.planes)
    return dataclasses.replace(rows, planes=planes)


def as_tile(plane: Plane, page_size: int, name: str) -> Plane:
    """A plane of token rows whose rows of one head become one tile, heads one after the other.

    Where the heads of a page already lie further apart than a tile they stay where they are.
    """
    length = page_size * plane.cell_bytes
    return dataclasses.replace(
        plane,
        row_stride=0,
        head_stride=max(plane.head_stride, length),
        cell_bytes=length,
        rows=1,
        row_kind=TILE,
        tile=name,
    )

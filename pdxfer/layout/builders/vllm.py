"""vLLM's block layouts, by the physical order of their axes.

Every layer is a view `[B, H, N, C]`: blocks (here pages), KV heads, tokens of a block, content. The
content of attention is K and V of one head and token, `[head_dim | v_head_dim]`; that of MLA the
latent and rope row. All layers lie in one allocation; the name of a layout is the order in which
its axes lie in memory, outermost first, L being the layers. Block 0 is the null block.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids, positive
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import mla_parts
from pdxfer.layout.builders.shapes import KVShape, Shape, kv_shape
from pdxfer.layout.groups import Group
from pdxfer.layout.planes import RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout

BLOCK_ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The first three keep the blocks of a layer together, the others all layers of a block."""


@named
def vllm_blocks(*, order: str = "LBHNC", **shape: Unpack[KVShape]) -> KVLayout:
    """K and V in one tensor, `C = head_dim + v_head_dim`, in one region.

    `item_len` is the bytes of a block in all layers, wherever they lie.

    Args:    order: one of `BLOCK_ORDERS`. shape: those of `token_major`; a block is a page.
    Raises:  ConfigError: another order, or a value that no pool has.
    """
    return _blocks(order, kv_shape(**shape))


@named
def vllm_mla_blocks(  # noqa: PLR0913 the shape of a pool
    *,
    layers: Iterable[int],
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    order: str = "LBHNC",
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> KVLayout:
    """Latent and rope in one tensor of one head, `C = kv_lora_rank + qk_rope_head_dim`."""
    positive(page_size=page_size, pages=pages)
    shape = Shape(
        layers=layer_ids(layers),
        parts=mla_parts(kv_lora_rank, qk_rope_head_dim, dtype),
        group=Group(group, page_size, pages, reserved_pages),
        dtype=dtype,
        model=model,
    )
    return _blocks(order, shape)


def check_order(order: str) -> None:
    """Refuses, by name, what is no physical order.

    Raises:  ConfigError.
    """
    if order not in BLOCK_ORDERS:
        raise ConfigError(
            f"order is {order!r}; it must be one of {', '.join(BLOCK_ORDERS)}",
            fields={"order": repr(order)},
        )


def block_strides(order: str, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes from one index of each axis to the next.

    Args:    sizes: of L, B, H and N; of C in bytes.
    """
    return {axis: prod(sizes[inner] for inner in order[at + 1 :]) for at, axis in enumerate(order)}


def _blocks(order: str, shape: Shape) -> KVLayout:
    check_order(order)
    sizes = {
        "L": len(shape.layers),
        "B": shape.group.pages,
        "H": shape.parts[0].heads,
        "N": shape.group.page_size,
        "C": sum(part.cell_bytes for part in shape.parts),
    }
    strides = block_strides(order, sizes)
    planes = []
    for number, layer in enumerate(shape.layers):
        base = number * strides["L"]
        for part in shape.parts:
            planes.append(
                shape.plane(
                    part,
                    layer,
                    region=0,
                    base=base,
                    page_stride=strides["B"],
                    row_stride=strides["N"],
                    head_stride=strides["H"],
                )
            )
            base += part.cell_bytes
    length = prod(sizes.values())
    return shape.layout(planes, [RegionSpec(length, length // sizes["B"])], unified=False)

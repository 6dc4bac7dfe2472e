"""Builders of vLLM's block layouts, by the physical order of their axes, and of its CPU kernels.

Every layer is a view `[B, H, N, C]`: blocks (here pages), KV heads, tokens of a block, content. The
content of attention is K and V of one head and token, `[head_dim | v_head_dim]`; that of latent
attention is the latent and rope row. All layers lie in one allocation; the name of a layout is the
order in which its axes lie in memory, outermost first, L being the layers. Block 0 is the null
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Unpack

from pdxfer.errors import ConfigError
from pdxfer.layout.builders import table
from pdxfer.layout.builders.axes import ROWS, TENSORS, strided
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.kv import arranged
from pdxfer.layout.builders.latent import mla
from pdxfer.layout.builders.shapes import KVShape, kv_shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout

CPU_ISAS: Final = {"vec": ("k",), "vec16": ("k",), "amx": ("k", "v")}
"""Parts that the CPU kernels of vLLM keep in an order of their own, by instruction set."""


@named
def vllm_blocks(*, order: str = "LBHNC", **shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values in vLLM's blocks: K and V of a head and token together, in one region.

    The `item_len` is the bytes of a block in all layers, wherever they lie.

    Args:    order: the physical order of the axes, one of `LBHNC`, `LBNHC`, `LHBNC`, `BLHNC`,
             `BLNHC`, `BHLNC`. shape: the arguments of `token_major`; a block is a page.
    Raises:  ConfigError: another order, a value that no pool has, an unknown or a missing argument.
    """
    table.row_of(order, table.BLOCKS, argument="order")
    return arranged(order, **shape)


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
    """Multi-head latent attention in vLLM's blocks: latent and rope together, in one region.

    Args:    order: the physical order of the axes, as for `vllm_blocks`; the one head is an axis of
             one. The others: the arguments of `mla`; a block is a page.
    Raises:  ConfigError: another order, a value that no pool has, an unknown or a missing argument.
    """
    table.row_of(order, table.BLOCKS, argument="order")
    return mla(
        layers=layers,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        pages=pages,
        dtype=dtype,
        arrangement=order,
        reserved_pages=reserved_pages,
        group=group,
        model=model,
    )


@named
def vllm_cpu(*, isa: str, order: str = "LBHNC", **shape: Unpack[KVShape]) -> KVLayout:
    """Keys and values as vLLM's CPU kernels keep them: each block and head has first K, then V.

    K is transposed to `[head_dim, tokens]`, a tile that is named after the instruction set. V is
    token rows for `vec` and `vec16`, and a tile too for `amx`, which packs it. A tile moves whole,
    so only pairs of one instruction set and one block size match.

    Args:    isa: the instruction set, one of `vec`, `vec16`, `amx`. order: the physical order of
             the axes, as for `vllm_blocks`, but with heads outside of the tokens of a block.
             shape: the arguments of `token_major`; a block is a page.
    Raises:  ConfigError: another instruction set, an order with tokens outside of heads, a value
             that no pool has, an unknown or a missing argument.
    """
    if isa not in CPU_ISAS:
        raise ConfigError(
            f"isa is {isa!r}; it must be one of {', '.join(CPU_ISAS)}", fields={"isa": repr(isa)}
        )
    row = table.row_of(order, table.BLOCKS, argument="order")
    if not row.order.endswith(ROWS):
        raise ConfigError(
            f"order is {order!r}; tiles of a block and head need an order that ends in NC",
            fields={"order": repr(order)},
        )
    tiled = kv_shape(**shape).tiled(CPU_ISAS[isa], f"vllm_cpu_{isa}")
    apart = row.order.replace(ROWS, TENSORS + ROWS)
    return strided(apart, tiled, name="vllm_cpu")

"""Every layout by its name: the rows of the table, and those that need a word of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pdxfer.layout.builders import table
from pdxfer.layout.builders.dsa import dsa
from pdxfer.layout.builders.index import k_only
from pdxfer.layout.builders.kv import arranged
from pdxfer.layout.builders.latent import mla
from pdxfer.layout.builders.mxfp8 import mxfp8
from pdxfer.layout.builders.state import state, state_entries
from pdxfer.layout.builders.tiles import vectorized_5d
from pdxfer.layout.builders.vllm import vllm_blocks, vllm_cpu, vllm_mla_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Entry:
    """One layout: what makes it, and what it is."""

    name: str
    says: str
    """What it is, in a line of the page of layouts."""
    heads: Callable[..., KVLayout] | None = None
    """Makes it of keys and values, or of keys; None where there is no such layout of them."""
    latent: Callable[..., KVLayout] | None = None
    """Makes it of latent attention; None where there is no such layout of it."""
    states: Callable[..., KVLayout] | None = None
    """Makes it of recurrent state; None where there is no such layout of it."""
    row: table.Row | None = None
    """Its row in the table of orders; None where it has a word of its own."""


_OWN: Final = (
    Entry("mla", "Latent attention in the order that `arrangement` names.", latent=mla),
    Entry("vllm_blocks", "vLLM's blocks in the order that `order` names.", heads=vllm_blocks),
    Entry(
        "vllm_mla_blocks",
        "vLLM's blocks of latent attention in the order that `order` names.",
        latent=vllm_mla_blocks,
    ),
    Entry("vllm_cpu", "vLLM on a CPU: K, or K and V, of a block and head are a tile.", vllm_cpu),
    Entry(
        "vectorized_5d", "A tensor for each layer and part; a page of a head is a tile.",
        vectorized_5d,
    ),
    Entry("mxfp8", "MXFP8 rows as `token_major`, and their scales as rows or tiles.", mxfp8),
    Entry("k_only", "Keys without values, as `token_major`: those of an index.", k_only),
    Entry("dsa", "Rows as `mla`, and quantised keys of an index with their scales.", latent=dsa),
    Entry("state", "Recurrent state: a tensor for each layer and part.", states=state),
    Entry("state_entries", "Recurrent state: one entry for each request.", states=state_entries),
)  # fmt: skip


def catalog() -> dict[str, Entry]:
    """Every layout by name, as the table has it now."""
    rows = [
        Entry(
            row.name,
            row.says,
            heads=partial(arranged, row.name),
            latent=partial(mla, arrangement=row.name) if row.latent else None,
            row=row,
        )
        for row in table.ROWS.values()
    ]
    return {entry.name: entry for entry in (*rows, *_OWN)}

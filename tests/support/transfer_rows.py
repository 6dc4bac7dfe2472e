"""Transfers that are refused, or silently wrong, between SGLang servers, and what happens here.

Each row moves such a pair's pages, compares whole pools with the cell oracle, and says in a line
what came of it. A test runs them all; `make generated` writes them to docs/transfers.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdxfer.errors import LayoutMismatchError
from pdxfer.layout import Rank, Side, check_pair, cover, page_major, plan, token_major
from pdxfer.layout import unified_entries as entries
from tests.support.fixed_cases import check, group_of, side_of

SHAPE = {"layers": range(2), "head_dim": 8, "page_size": 4, "pages": 9, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Row:
    pair: str
    there: str
    here: Callable[[], str]


def moved(group, source, destination, **changes):
    """Runs every decode rank of a pair; how many runs a page of rank 0 takes."""
    receivers = range(destination.tp_size * destination.pp_size)
    for receiver in receivers:
        check(group, source, destination, receiver, **changes)
    groups = {group.name: group}
    workers = [(rank, source.layout(groups, rank)) for rank in source.ranks()]
    first = next(iter(destination.ranks()))
    layout = destination.layout(groups, first)
    runs = [
        plan(theirs, layout, owned=part).summary().runs_per_page
        for (_, theirs), part in zip(workers, cover(workers, (first, layout)), strict=True)
        if part.cells
    ]
    senders = "one prefill rank" if len(runs) == 1 else f"each of {len(runs)} prefill ranks"
    return f"every cell once; {max(runs):g} runs a page from {senders}"


def refused(call) -> str:
    try:
        call()
    except LayoutMismatchError as error:
        return str(error)
    raise AssertionError("it was not refused")


def of_tp(family, prefill, decode, arrangements=("token_major", "token_major"), **changes):
    """A pair that differs in attention TP."""
    sizes = changes.pop("page_sizes", (8, 8))

    def run():
        group = group_of(family, **changes)
        return moved(
            group,
            side_of(group, arrangements[0], sizes[0], tp_size=prefill),
            side_of(group, arrangements[1], sizes[1], tp_size=decode),
        )

    return run


def of_pages(prefill, decode):
    """A pair that differs in page size."""

    def run():
        group = group_of("kv", first=37, end=150)
        first_token = 37 // decode * decode
        return moved(
            group,
            side_of(group, "page_major", prefill),
            side_of(group, "page_major", decode, first_token=first_token),
        )

    return run


def of_stages(prefill, decode):
    """A pair that differs in pipeline stages."""

    def run():
        group = group_of("kv", layers=(0, 1, 2, 3, 4, 5))
        return moved(
            group,
            side_of(group, "unified_entries", 8, stages=prefill),
            side_of(group, "unified_entries", 8, stages=decode),
        )

    return run


def windows_over_tp_and_stages():
    group = group_of("kv", first=16, end=41, name="swa")
    return moved(
        group,
        side_of(group, "token_major", 8, tp_size=2, stages=2, first_token=16),
        side_of(group, "page_major", 8, tp_size=4, first_token=16),
    )


def context_parallel():
    group = group_of("mla", end=77)
    return moved(
        group,
        side_of(group, "page_major", 64, cp_size=2),
        side_of(group, "token_major", 16),
        own_pages_only=True,
    )


def to_host():
    group = group_of("kv")
    return moved(group, side_of(group, "page_major", 8), side_of(group, "page_head", 16, tp_size=2))


def same_item_len():
    pair = page_major(**SHAPE, kv_heads=2), entries(**SHAPE, kv_heads=2)
    assert pair[0].item_lens == pair[1].item_lens
    refused(lambda: check_pair(*(Side(layout, 1, "never") for layout in pair)))
    group = group_of("kv")
    line = moved(group, side_of(group, "page_major", 8), side_of(group, "unified_entries", 8))
    return f"refused by its inner order with relayout=never; with allow {line}"


def other_dtype():
    pair = [token_major(**{**SHAPE, "dtype": name}, kv_heads=2) for name in ("bfloat16", "float16")]
    return refused(lambda: plan(*pair))


def decode_context_parallel():
    layout = token_major(**SHAPE, kv_heads=2)
    return refused(lambda: cover([(Rank(), layout)], (Rank(cp_size=2), layout)))


ROWS = (
    Row(
        "attention TP 4 to 2 with head_dim 8, v_head_dim 16",
        "wrong: values are cut by the width of keys",
        of_tp("kv", 4, 2, heads=8),
    ),
    Row(
        "attention TP 2 to 4 with 2 KV heads",
        "one write a token, layer, K and V",
        of_tp("kv", 2, 4, ("page_major", "token_major"), heads=2),
    ),
    Row(
        "attention TP 3 to 2", "assumed away: one must divide the other", of_tp("kv", 3, 2, heads=6)
    ),
    Row(
        "page size 64 to 16, a 37-token prefix",
        "Page size mismatch: prefill server has page_size=64, but decode server has page_size=16.",
        of_pages(64, 16),
    ),
    Row(
        "page size 16 to 64, a 37-token prefix",
        "Page size mismatch: prefill server has page_size=16, but decode server has page_size=64.",
        of_pages(16, 64),
    ),
    Row(
        "HND to NHD",
        "PD-disaggregation KV transfer assumes NHD slot-row layout",
        of_tp("kv", 1, 1, ("head_major", "token_major")),
    ),
    Row(
        "equal item_len, another inner order (0.5.21 to 0.5.22)",
        "wrong: it is not seen",
        same_item_len,
    ),
    Row(
        "MXFP8 with scales, attention TP 2 to 1",
        "PD Disaggregation does NOT support different attention TP sizes with MXFP8 KV cache",
        of_tp("mxfp8", 2, 1, ("device", "device")),
    ),
    Row(
        "a window group, attention TP 2 to 4, two stages to one",
        "PD Disaggregation does NOT support PD different TP sizes for non-MLA SWA hybrid models "
        "with pipeline parallelism yet.",
        windows_over_tp_and_stages,
    ),
    Row(
        "mamba state, sharded and replicated tensors, attention TP 4 to 2",
        "Replicated Mamba PD state transfer currently requires matching prefill/decode attention "
        "TP sizes",
        of_tp("state", 4, 2, ("state", "state_entries"), page_sizes=(1, 1)),
    ),
    Row(
        "three stages to two, unified memory",
        "Decode pp size (2) should be equal to prefill pp size (3) or 1",
        of_stages(3, 2),
    ),
    Row(
        "prefill context parallel 2, page size 64 to 16",
        "Page size mismatch",
        context_parallel,
    ),
    Row(
        "draft lanes in unified entries, attention TP 1 to 2",
        "--enable-unified-memory with PD disaggregation does not support speculative decoding with "
        "the Mooncake transfer backend.",
        of_tp("draft", 1, 2, ("unified_entries", "unified_entries")),
    ),
    Row(
        "a page-major pool into host memory of another layout, page size and TP",
        "Transfer backend does not support decode host KV destinations",
        to_host,
    ),
    Row("bfloat16 to float16", "KV cache dtype mismatch", other_dtype),
    Row(
        "decode context parallel",
        "needs an MLA pool and prefill context parallel 1",
        decode_context_parallel,
    ),
)


def table():
    """docs/transfers.md."""
    lines = [
        "# Transfers between unlike sides",
        "",
        "Pairs that SGLang 0.5.23 refuses or gets wrong, and what they come to here: whole pools "
        "compared cell by cell, or the text of the refusal. Made by running them (`make "
        "generated`); do not edit.",
        "",
        "| pair | there | here |",
        "| --- | --- | --- |",
    ]
    lines += (f"| {row.pair} | {row.there} | {row.here()} |" for row in ROWS)
    return "\n".join(lines) + "\n"

"""Over real daemons: any layout into any other, several ranks a side, whole pools compared.

Source pools hold, for each token of the request, bytes that depend only on (group, part, layer,
token, global head): so what a destination cell must become is known without any plan.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass

import numpy as np
import pytest

from pdxfer.client import DecodeClient, Pages, PrefillClient, Rank
from pdxfer.launch.daemons import DaemonProcess
from pdxfer.layout import (
    StateTensor,
    combine,
    head_major,
    host_layout,
    mla,
    page_major,
    state,
    token_major,
    unified_entries,
)
from tests.support.caches import SeededCache

pytestmark = pytest.mark.ucx
WAIT_S = 30.0
LAYERS = 4
HEADS = 8


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relayout")
    with contextlib.ExitStack() as stack:
        facts = []
        for role in ("prefill", "decode"):
            process = stack.enter_context(DaemonProcess(role, folder, ["--lanes", "tcp"]))
            facts.append(process.wait_ready())
        yield facts


_RANDOM = np.random.default_rng(0).integers(0, 256, size=1 << 20, dtype=np.uint8)


def cell_bytes(group, part, layer, token, head, length):
    """A place in random bytes that hardly any other cell has."""
    place = zlib.crc32(repr((group, part, layer, token, head)).encode()) % (len(_RANDOM) - length)
    return _RANDOM[place : place + length]


@dataclass
class Side:
    """One instance: a layout per rank, page ids per group, where those begin."""

    layouts: list
    ranks: list[Rank]
    pages: dict[str, Pages]

    def caches(self, seed):
        return [SeededCache(layout, seed + index) for index, layout in enumerate(self.layouts)]

    def cells(self, layout, first, end):
        """(region, offset, bytes, identity) of every cell of the tokens [first, end)."""
        for group in layout.groups:
            listed = self.pages[group.name]
            for plane in layout.planes:
                if plane.group != group.name:
                    continue
                if group.kind == "state":
                    yield from self.state_cells(layout, plane, listed)
                    continue
                for token in range(first, end):
                    index = token // group.page_size - listed.first_token // group.page_size
                    if not 0 <= index < len(listed.ids):
                        continue
                    slot = int(listed.ids[index]) * group.page_size + token % group.page_size
                    for head in range(plane.head_first, plane.head_first + plane.heads):
                        where = layout.locate(plane.part, plane.layer, slot, head, group.name)
                        yield (
                            where,
                            plane.cell_bytes,
                            (group.name, plane.part, plane.layer, token, head),
                        )

    def state_cells(self, layout, plane, listed):
        """Ids pair by position, rows are the outer count."""
        for position, slot in enumerate(listed.ids):
            for row in range(plane.rows):
                for head in range(plane.head_first, plane.head_first + plane.heads):
                    where = layout.locate(
                        plane.part, plane.layer, int(slot), head, plane.group, row
                    )
                    identity = (plane.group, plane.part, plane.layer, position, (row, head))
                    yield where, plane.cell_bytes, identity

    def fill(self, caches, tokens):
        for cache in caches:
            for (region, offset), length, identity in self.cells(cache.layout, 0, tokens):
                cache.regions[region][offset : offset + length] = cell_bytes(*identity, length)


def shuffled(layout, tokens, seed, first=0):
    rng = np.random.default_rng(seed)
    pages = {}
    for group in layout.groups:
        if group.kind == "state":
            pages[group.name] = Pages(
                rng.permutation(np.arange(group.reserved_pages, group.pages))[:1]
            )
            continue
        begin = first // group.page_size * group.page_size
        count = -(-(tokens - begin) // group.page_size)
        ids = rng.permutation(np.arange(group.reserved_pages, group.pages))[:count]
        pages[group.name] = Pages(ids, begin)
    return pages


def heads_of(tp, tp_size, total):
    """(head_first, heads) of a rank; replicated where ranks outnumber heads."""
    if tp_size <= total:
        share = total // tp_size
        return tp * share, share
    return tp * total // tp_size, 1


def instance(builder, *, tp=1, pp=1, total=HEADS, tokens=0, seed=0, first=0, **shape):
    """A side of tp * pp ranks."""
    settings = {"head_dim": 16, "page_size": 16, "pages": 24, "dtype": "bfloat16", **shape}
    layouts, ranks = [], []
    for stage in range(pp):
        layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
        for rank in range(tp):
            begin, heads = heads_of(rank, tp, total)
            layouts.append(
                builder(
                    layers=layers,
                    kv_heads=heads,
                    total_kv_heads=total,
                    head_first=begin,
                    **settings,
                )
            )
            ranks.append(Rank(tp=rank, tp_size=tp, pp=stage, pp_size=pp))
    return Side(layouts, ranks, shuffled(layouts[0], tokens, seed, first))


def transfer(daemons, source, destination, tokens, *, prefix=0, room=1):
    """Move one request; compare every byte of every destination pool."""
    prefill, decode = daemons
    sources, destinations = source.caches(1), destination.caches(100)
    source.fill(sources, tokens)
    befores = [cache.snapshot() for cache in destinations]
    name = f"i{room}"
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(
                PrefillClient(prefill.socket, cache, rank=rank, instance=name, relayout="allow")
            )
            for cache, rank in zip(sources, source.ranks, strict=True)
        ]
        receivers = [
            stack.enter_context(
                DecodeClient(decode.socket, cache, rank=rank, instance=name, relayout="allow")
            )
            for cache, rank in zip(destinations, destination.ranks, strict=True)
        ]
        receivings = [
            client.receive(
                room, senders[0].addresses, destination.pages, tokens=tokens, prefix_tokens=prefix
            )
            for client in receivers
        ]
        sendings = [client.send(room, source.pages, tokens=tokens) for client in senders]
        commits = [receiving.wait(WAIT_S) for receiving in receivings]
        for sending in sendings:
            sending.wait(WAIT_S)
    for cache, before in zip(destinations, befores, strict=True):
        same_pages = {group.name: _ends_with_source(source, group) for group in cache.layout.groups}
        for (region, offset), length, identity in destination.cells(cache.layout, prefix, tokens):
            before[region][offset : offset + length] = cell_bytes(*identity, length)
        for region, wanted in enumerate(before):
            got = cache.regions[region]
            if all(same_pages.values()):
                _ignore_rounded_end(destination, cache, before, tokens)
            assert np.array_equal(got, wanted), f"region {region}"
    return commits


def _ends_with_source(source, group):
    return all(
        other.page_size == group.page_size
        for layout in source.layouts
        for other in layout.groups
        if other.name == group.name
    )


def _ignore_rounded_end(destination, cache, before, tokens):
    """Where pages cover the same tokens, the rest of the last page travels too."""
    size = cache.layout.groups[0].page_size
    end = -(-tokens // size) * size
    for (region, offset), length, identity in destination.cells(cache.layout, tokens, end):
        if identity[0] == "state":
            continue
        before[region][offset : offset + length] = cache.regions[region][offset : offset + length]


TOKENS = 75
CASES = {
    "page-major TP 4 to token-major TP 2": (
        {"builder": page_major, "tp": 4},
        {"builder": token_major, "tp": 2},
    ),
    "TP 2 to TP 4 with 2 KV heads": (
        {"builder": token_major, "tp": 2, "total": 2},
        {"builder": token_major, "tp": 4, "total": 2},
    ),
    "unified to page-major": ({"builder": unified_entries}, {"builder": page_major}),
    "page-major to unified, D != Dv": (
        {"builder": page_major, "v_head_dim": 8},
        {"builder": unified_entries, "v_head_dim": 8},
    ),
    "page size 64 to 16": (
        {"builder": token_major, "page_size": 64},
        {"builder": token_major, "page_size": 16},
    ),
    "page size 16 to 64": (
        {"builder": page_major, "page_size": 16},
        {"builder": head_major, "page_size": 64},
    ),
    "PP 2 to PP 1": ({"builder": page_major, "pp": 2}, {"builder": page_major}),
    "PP 1 to PP 2, TP 1 to TP 2": (
        {"builder": token_major},
        {"builder": page_major, "pp": 2, "tp": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_relayout(daemons, name):
    source_shape, destination_shape = CASES[name]
    source = instance(tokens=TOKENS, seed=1, **source_shape)
    destination = instance(tokens=TOKENS, seed=2, **destination_shape)
    transfer(daemons, source, destination, TOKENS, room=10 + list(CASES).index(name))


@pytest.mark.parametrize("page_sizes", [(16, 16), (64, 16), (16, 64)])
def test_a_prefix_of_37_tokens(daemons, page_sizes):
    source = instance(page_major, tokens=TOKENS, seed=3, page_size=page_sizes[0])
    destination = instance(token_major, tokens=TOKENS, seed=4, first=37, page_size=page_sizes[1])
    transfer(daemons, source, destination, TOKENS, prefix=37, room=sum(page_sizes))


def test_mla_from_many_ranks_to_one(daemons):
    def side(arrangement, tp, seed):
        layout = mla(
            layers=range(LAYERS),
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            page_size=16,
            pages=24,
            dtype="bfloat16",
            arrangement=arrangement,
        )
        ranks = [Rank(tp=rank, tp_size=tp) for rank in range(tp)]
        return Side([layout] * tp, ranks, shuffled(layout, TOKENS, seed))

    transfer(daemons, side("page_major", 4, 1), side("token_major", 2, 2), TOKENS, room=200)


def test_hybrid_window(daemons):
    def side(builder, seed):
        shape = {"kv_heads": 2, "head_dim": 16, "page_size": 16, "dtype": "bfloat16"}
        layout = combine(
            builder(layers=[0, 2], pages=24, **shape),
            builder(layers=[1, 3], pages=12, group="swa", **shape),
        )
        pages = shuffled(layout, TOKENS, seed)
        pages["swa"] = Pages(pages["swa"].ids[3:], 48)
        return Side([layout], [Rank()], pages)

    transfer(daemons, side(page_major, 1), side(token_major, 2), TOKENS, room=201)


def test_hybrid_mamba_state_at_another_tp(daemons):
    def side(builder, tp, seed):
        layouts, ranks = [], []
        for rank in range(tp):
            full = builder(
                layers=[1, 3],
                kv_heads=4 // tp,
                total_kv_heads=4,
                head_first=rank * 4 // tp,
                head_dim=16,
                page_size=16,
                pages=24,
                dtype="bfloat16",
            )
            part = {"tp": rank, "tp_size": tp}
            tensors = [
                StateTensor("conv.0", (48 // tp, 3), "bfloat16", 0, (16 // tp,) * 3, **part),
                StateTensor("temporal", (4 // tp, 8, 16), "float32", 0, **part),
            ]
            layouts.append(combine(full, state(layers=[0, 2], tensors=tensors, slots=5)))
            ranks.append(Rank(tp=rank, tp_size=tp))
        return Side(layouts, ranks, shuffled(layouts[0], TOKENS, seed))

    transfer(daemons, side(page_major, 2, 1), side(token_major, 1, 2), TOKENS, room=202)
    transfer(daemons, side(token_major, 1, 3), side(unified_entries, 2, 4), TOKENS, room=203)


@pytest.mark.parametrize(
    "arrangement", ["layer_first", "page_first", "page_first_direct", "page_head"]
)
@pytest.mark.parametrize("v_head_dim", [16, 8])
def test_a_host_pool_as_destination(daemons, arrangement, v_head_dim):
    source = instance(page_major, tp=2, tokens=TOKENS, seed=5, v_head_dim=v_head_dim)
    like = instance(token_major, tokens=TOKENS, v_head_dim=v_head_dim).layouts[0]
    layout = host_layout(like, arrangement, pages=12)
    destination = Side([layout], [Rank()], shuffled(layout, TOKENS, 6))
    room = 300 + v_head_dim + zlib.crc32(arrangement.encode()) % 1000
    transfer(daemons, source, destination, TOKENS, room=room)


@pytest.mark.parametrize("prefix", [0, 37])
def test_context_parallel_ranks_send_their_pages(daemons, prefix):
    shape = {"tokens": TOKENS, "page_size": 16}
    whole = instance(page_major, seed=7, **shape)
    ranks = [Rank(cp=cp, cp_size=3) for cp in range(3)]
    source = Side(whole.layouts * 3, ranks, whole.pages)
    destination = instance(token_major, seed=8, first=prefix, **shape)
    transfer(daemons, source, destination, TOKENS, prefix=prefix, room=400 + prefix)

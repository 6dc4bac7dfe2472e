"""Instances of several ranks whose pools are SGLang's, into one of ours and the reverse.

Attention TP 2 and 4, pipeline stages, prefixes and last pages that are not full; every rank's share
by `cover`. `make test-sglang` runs it.
"""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here: run `make test-sglang`", allow_module_level=True)

from pdxfer.layout import Rank, cover, plan
from pdxfer.pool import (
    DSAPool,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    SparsePool,
    TokenMajorPool,
    UnifiedPool,
)
from tests.peers.sglang_side import memory_pool, ours, run, theirs

pytestmark = pytest.mark.filterwarnings("default")
HEADS, DIM, LAYERS = 4, 32, (0, 1, 2, 3)
KV = {"head_dim": DIM, "v_head_dim": 64}
LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 64}
SIZES = [(2, 1, 1, 1), (1, 1, 4, 1), (2, 2, 1, 1), (1, 1, 2, 2), (2, 2, 4, 2)]
"""TP and stages of prefill, then of decode."""


def ranks(tp_size, pp_size):
    for pp in range(pp_size):
        layers = LAYERS[4 // pp_size * pp : 4 // pp_size * (pp + 1)]
        for tp in range(tp_size):
            rank = Rank(tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size)
            heads = HEADS // tp_size
            yield rank, layers, heads, tp * heads


def common(page, layers, size, dtype=torch.bfloat16):
    return {
        "size": size,
        "page_size": page,
        "dtype": dtype,
        "layer_num": len(layers),
        "start_layer": layers[0],
    }


CPU = {"device": "cpu", "enable_memory_saver": False}


def their_kv(layers, heads, first):
    pool = memory_pool.MHATokenToKVPool(**common(4, layers, 40), **CPU, head_num=heads, **KV)
    return theirs(pool, total_kv_heads=HEADS, head_first=first)


def our_kv(kind):
    def make(layers, heads, first):
        options = {"head_num": heads, "total_kv_heads": HEADS, "head_first": first, **KV}
        return ours(kind(**common(8, layers, 48), **options))

    return make


def their_scaled(layers, heads, first):
    fp8 = torch.float8_e4m3fn
    pool = memory_pool.MHATokenToKVPoolMXFP8(
        **common(4, layers, 40, fp8), **CPU, head_num=heads, **KV
    )
    return theirs(pool, total_kv_heads=HEADS, head_first=first)


def our_scaled(layers, heads, first):
    options = {"head_num": heads, "total_kv_heads": HEADS, "head_first": first, **KV}
    return ours(MXFP8Pool(**common(8, layers, 48, torch.float8_e4m3fn), **options))


def their_latent(layers, heads, first):
    return theirs(memory_pool.MLATokenToKVPool(**common(4, layers, 40), **CPU, **LATENT))


def our_latent(layers, heads, first):
    options = {**LATENT, "arrangement": "page_major"}
    return ours(MLAPool(**common(8, layers, 48), **options))


def their_index(layers, heads, first):
    pool = memory_pool.DSATokenToKVPool(
        **common(64, layers, 256), **CPU, **LATENT, index_head_dim=128, kv_cache_dim=192,
        skip_topk_layers=[layer % 2 == 1 for layer in layers],
    )  # fmt: skip
    return theirs(pool)


def our_index(layers, heads, first):
    skipped = [layer % 2 == 1 for layer in layers]
    return ours(DSAPool(**common(32, layers, 256), **LATENT, skip_topk_layers=skipped))


def their_sparse(layers, heads, first):
    pool = memory_pool.MiniMaxSparseKVPool(
        size=40, page_size=4, dtype=torch.bfloat16, head_num=heads, head_dim=DIM, idx_head_dim=12,
        dense_layer_ids=[1, 3], sparse_layer_ids=[0, 2], disable_value_sparse_layer_ids=[0, 2],
        device="cpu", start_layer=layers[0], end_layer=layers[-1] + 1,
    )  # fmt: skip
    return theirs(pool, total_kv_heads=HEADS, head_first=first)


def our_sparse(layers, heads, first):
    return ours(
        SparsePool(
            **common(8, layers, 48), head_num=heads, head_dim=DIM, total_kv_heads=HEADS,
            head_first=first, index_head_dim=12, index_layer_ids=[n for n in layers if n % 2 == 0],
        )
    )  # fmt: skip


KINDS = {
    "token_major": (their_kv, our_kv(TokenMajorPool)),
    "page_major": (their_kv, our_kv(PageMajorPool)),
    "unified": (their_kv, our_kv(UnifiedPool)),
    "mxfp8": (their_scaled, our_scaled),
    "latent": (their_latent, our_latent),
    "dsa": (their_index, our_index),
    "sparse": (their_sparse, our_sparse),
}


def instance(make, tp_size, pp_size):
    return [
        (rank, first, make(layers, heads, first))
        for rank, layers, heads, first in ranks(tp_size, pp_size)
    ]


def held(key, first, side):
    """Which heads of a tensor a rank has: all where they are the same on every rank."""
    replicated = key[1] in (("latent", "rope"), "index_k", "index_k_scale")
    return slice(0, 1) if replicated else slice(first, first + side.rows[key].heads)


def fill(sources, places, tokens, generator):
    """Content by tensor, `[tokens, heads, width]`, in the sources' pages."""
    content = {}
    for (_, first, side), (_, slots) in zip(sources, places, strict=True):
        for key, rows in side.rows.items():
            of = held(key, first, side)
            if key not in content:
                shape = (tokens, HEADS, rows.get(slots[:1]).shape[2])
                content[key] = torch.from_numpy(generator.integers(0, 256, shape, np.uint8))
            rows.put(slots[:tokens], content[key][:, of])
    return content


@pytest.mark.parametrize("case", [(13, 0), (15, 5)], ids=["part of a page", "and a prefix"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ours_receives", [True, False])
def test_every_rank_gets_its_heads_and_layers(kind, sizes, case, ours_receives):
    generator = np.random.default_rng(6)
    tokens, prefix = case
    source_tp, source_pp, tp, pp = sizes
    made = KINDS[kind] if ours_receives else KINDS[kind][::-1]
    sources = instance(made[0], source_tp, source_pp)
    places = [side.pages_for("full", generator, 0, tokens) for _, _, side in sources]
    content = fill(sources, places, tokens, generator)
    workers = [(rank, side.layout) for rank, _, side in sources]
    for rank, first, target in instance(made[1], tp, pp):
        owned = cover(workers, (rank, target.layout))
        pages, slots = target.pages_for("full", generator, prefix, tokens)
        before = target.snapshot()
        for (_, _, source), (ids, _), share in zip(sources, places, owned, strict=True):
            if share:
                runs = plan(source.layout, target.layout, owned=share).runs(
                    ids, pages, (prefix, tokens)
                )
                run(runs, source, target)
        for key, wanted in before.items():
            got = target.rows[key].get(target.slots_of("full"))
            moved = slots[: tokens - prefix]
            wanted[moved] = content[key][prefix:tokens, held(key, first, target)]
            assert torch.equal(got, wanted), key

"""Heads of one cache over the pools of several ranks, and back; no model and no transfer."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from pdxfer.demo.model import Geometry  # noqa: E402
from pdxfer.demo.options import DEVICE_LAYOUTS, HOST_LAYOUTS, KV_HEADS, Side  # noqa: E402
from pdxfer.demo.paging import digest  # noqa: E402
from pdxfer.demo.rank_pools import RankPools, heads_of  # noqa: E402
from pdxfer.errors import ConfigError  # noqa: E402

TOKENS = 37
HEADS = Geometry(layers=3, kv_heads=4, key_dim=8, value_dim=8, dtype="float32")
NARROW = Geometry(layers=3, kv_heads=4, key_dim=16, value_dim=8, dtype="bfloat16")
LATENT = Geometry(layers=3, kv_heads=1, key_dim=32, value_dim=8, dtype="float32", latent=True)


def filled(geometry):
    """A cache in which no two numbers are alike by chance."""
    generator = torch.Generator().manual_seed(7)
    cache = DynamicCache()
    for layer in range(geometry.layers):
        keys, values = (
            torch.randn(1, geometry.kv_heads, TOKENS, dim, generator=generator).to(
                getattr(torch, geometry.dtype)
            )
            for dim in (geometry.key_dim, geometry.value_dim)
        )
        cache.update(keys, values, layer)
    return cache


@pytest.mark.parametrize("layout", DEVICE_LAYOUTS + HOST_LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("geometry", [HEADS, NARROW, LATENT], ids=["heads", "narrow", "latent"])
def test_what_is_scattered_is_gathered_from_every_replica(geometry, tp, layout):
    cache = filled(geometry)
    pools = RankPools(geometry, Side(layout, tp, page_size=8), TOKENS, "model@1")
    ids = pools.pick_pages(TOKENS, seed=3)
    pools.scatter(cache, ids)
    assert len(pools.pools) == len(pools.ranks) == tp
    assert pools.replicas == max(1, tp // geometry.kv_heads)
    for replica in range(pools.replicas):
        read = pools.gather(DynamicCache(), ids, TOKENS, replica)
        assert digest(read) == digest(cache)


@pytest.mark.parametrize("layout", ["page-major", "token-major", "unified", "page-head"])
@pytest.mark.parametrize("tp", [2, 8])
def test_a_rank_has_its_heads_and_no_others(layout, tp):
    cache = filled(HEADS)
    pools = RankPools(HEADS, Side(layout, tp, page_size=8), TOKENS, "")
    ids = pools.pick_pages(TOKENS, seed=3)
    pools.scatter(cache, ids)
    slot = int(ids[1]) * 8 + 2  # token 10
    for rank, pool in enumerate(pools.pools):
        first = rank * 4 // tp
        count = max(4 // tp, 1)
        rows = pool.rows("v", 2).gather(torch.tensor([slot]))
        assert torch.equal(rows[0], cache.layers[2].values[0, first : first + count, 10])
        planes = [plane for plane in pool.layout.planes if plane.part == "v"]
        assert {(plane.head_first, plane.heads) for plane in planes} == {(first, count)}


def test_a_wrong_byte_in_one_replica_is_seen():
    cache = filled(HEADS)
    pools = RankPools(HEADS, Side("token-major", 8, page_size=8), TOKENS, "")
    ids = pools.pick_pages(TOKENS, seed=3)
    pools.scatter(cache, ids)
    pools.pools[5].get_key_buffer(1)[int(ids[0]) * 8, 0, 0] += 1
    digests = [digest(pools.gather(DynamicCache(), ids, TOKENS, replica)) for replica in (0, 1)]
    assert digests[0] == digest(cache)
    assert digests[1] != digest(cache)


def test_the_reserved_page_stays_zero_and_the_name_is_in_the_layout():
    pools = RankPools(HEADS, Side(tp=2), TOKENS, "model@1")
    ids = pools.pick_pages(TOKENS, seed=3)
    pools.scatter(filled(HEADS), ids)
    assert 0 not in ids
    for pool, cache in zip(pools.pools, pools.caches, strict=True):
        assert not pool.get_key_buffer(0)[0].any()
        assert cache.layout.model == "model@1"


def test_every_head_has_the_same_number_of_ranks():
    for tp, heads in ((1, 4), (2, 4), (4, 4), (8, 4), (3, 3), (4, 1)):
        owned = [
            head
            for rank in range(tp)
            for head in range(heads_of(rank, tp, heads)[0], sum(heads_of(rank, tp, heads)))
        ]
        assert sorted(owned) == sorted(list(range(heads)) * max(1, tp // heads))


@pytest.mark.parametrize(("model", "tp"), [("llama", 3), ("smollm2", 2), ("qwen3", 0)])
def test_a_tp_that_heads_cannot_be_shared_by(model, tp):
    with pytest.raises(ConfigError, match=f"--decode-tp is {tp}, and {model} has") as refused:
        Side(tp=tp).check("decode", model)
    assert refused.value.fields == {"tp": str(tp), "kv_heads": str(KV_HEADS[model])}


def test_pools_of_such_a_tp_are_not_made():
    with pytest.raises(ConfigError, match="3 ranks cannot share 4 KV heads"):
        RankPools(HEADS, Side(tp=3), TOKENS, "")


@pytest.mark.parametrize("tp", [4100, 4_000_000_000])
def test_more_ranks_than_are_served(tp):
    with pytest.raises(ConfigError, match=f"--prefill-tp is {tp}; at most 4096 ranks are served"):
        Side(tp=tp).check("prefill", "llama")


def test_a_page_of_no_tokens():
    with pytest.raises(ConfigError, match="prefill pages of 0 tokens"):
        Side(page_size=0).check("prefill", "llama")

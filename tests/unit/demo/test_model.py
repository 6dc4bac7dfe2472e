"""The demo's model logic in one process, without a transfer: pages in, pages out, same tokens."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pdxfer.demo import paging, prompts  # noqa: E402
from pdxfer.demo.model import BUILDERS, VOCABULARY, build_llama  # noqa: E402
from pdxfer.demo.options import KV_HEADS, PAGE_SIZE, Side  # noqa: E402
from pdxfer.demo.rank_pools import RankPools  # noqa: E402

PAGES = 80
CHUNK = 256
TOKENS_MAX = max(prompts.PROMPT_TOKENS)


@pytest.fixture(scope="module")
def model():
    return build_llama(seed=0)


@pytest.fixture(scope="module")
def asked():
    return prompts.seeded(VOCABULARY)


def carried(model, prompt, spoil=None):
    """Prefill into one pool, copy its rows to other slots of another, read them back from there."""
    tokens = len(prompt.tokens)
    source, destination = (RankPools(model.geometry, Side(), TOKENS_MAX, "") for _ in range(2))
    source_ids, ids = source.pick_pages(tokens, seed=1), destination.pick_pages(tokens, seed=2)
    cache, first = model.prefill(prompt.tokens, CHUNK)
    source.scatter(cache, source_ids)
    copy = source.pools[0].get_cpu_copy(paging.slots(source_ids, PAGE_SIZE, tokens))
    destination.pools[0].load_cpu_copy(copy, paging.slots(ids, PAGE_SIZE, tokens))
    if spoil is not None:
        spoil(destination.pools[0], torch.from_numpy(ids))
    read = destination.gather(model.new_cache(), ids, tokens)
    return paging.digest(cache), paging.digest(read), read, first


def through_pages(model, prompt, spoil=None):
    *_, read, first = carried(model, prompt, spoil)
    return model.decode(read, first, prompts.ANSWER_TOKENS)


def one_process(model, prompt):
    cache, first = model.prefill(prompt.tokens, CHUNK)
    return model.decode(cache, first, prompts.ANSWER_TOKENS)


@pytest.fixture(scope="module")
def expected(model, asked):
    return [one_process(model, prompt) for prompt in asked]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_pages_carry_the_cache(model, asked, expected, index):
    assert through_pages(model, asked[index]) == expected[index]


def _zero_a_page(pool, ids):
    """Page 0 is all zero: nobody has written to it."""
    pool.move_pages(ids[1:2], torch.tensor([0]))


def _zero_the_last_page(pool, ids):
    pool.move_pages(ids[-1:], torch.tensor([0]))


def _swap_two_pages(pool, ids):
    pool.move_pages(ids[[0, 1]], ids[[1, 0]])


@pytest.mark.parametrize("spoil", [_zero_a_page, _zero_the_last_page])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_lost_page_changes_the_tokens(model, asked, expected, index, spoil):
    assert through_pages(model, asked[index], spoil) != expected[index]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_other_models_keep_what_they_say_and_need_every_page(name, asked):
    model, prompt = BUILDERS[name](0, "float32"), asked[1]
    expected = one_process(model, prompt)
    assert len(set(expected)) > prompts.ANSWER_TOKENS // 2
    assert through_pages(model, prompt) == expected
    for spoil in (_zero_a_page, _zero_the_last_page):
        assert through_pages(model, prompt, spoil) != expected


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_geometry_is_what_the_model_caches(name):
    model = BUILDERS[name](0, "bfloat16")
    cache, _ = model.prefill(range(5), CHUNK)
    geometry = model.geometry
    assert len(cache.layers) == geometry.layers
    assert geometry.kv_heads == KV_HEADS[name]
    for layer in cache.layers:
        assert layer.keys.shape == (1, geometry.kv_heads, 5, geometry.key_dim)
        assert layer.values.shape == (1, geometry.kv_heads, 5, geometry.value_dim)
        assert str(layer.keys.dtype) == f"torch.{geometry.dtype}" == "torch.bfloat16"
    assert (name == "deepseek-v3") == geometry.latent
    if geometry.latent:
        assert (geometry.key_dim, geometry.value_dim) == (512, 64)


def test_the_digest_sees_what_tokens_cannot(model, asked):
    before, after, *_ = carried(model, asked[0])
    assert before == after
    before, after, *_ = carried(model, asked[0], _swap_two_pages)
    assert before != after


def test_other_weights_give_other_tokens(asked, expected):
    assert one_process(build_llama(seed=1), asked[0]) != expected[0]


def test_the_seed_decides_the_weights(asked, expected):
    assert one_process(build_llama(seed=0), asked[0]) == expected[0]


def test_prompts_are_stable_and_have_the_promised_lengths(asked):
    assert [len(prompt.tokens) for prompt in asked] == [40, 300, 1000]
    assert asked == prompts.seeded(VOCABULARY)


def test_pages_are_different_and_never_reserved():
    ids = paging.pick_pages(PAGES, 1, 63, seed=5)
    assert len(set(ids.tolist())) == 63
    assert ids.min() >= 1
    assert ids.max() < PAGES
    assert not np.array_equal(ids, np.sort(ids))


@pytest.mark.parametrize("pages", [1, 3, 4, 19, 63])
def test_sends_cover_every_page_once(pages):
    ranges = prompts.send_ranges(pages)
    assert [page for part in ranges for page in range(pages)[part]] == list(range(pages))
    assert 1 <= len(ranges) <= 4

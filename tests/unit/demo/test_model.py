"""The demo's model logic in one process, without a transfer: pages in, pages out, same tokens."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pdxfer.demo import paging, prompts  # noqa: E402
from pdxfer.demo.model import VOCABULARY, build_llama  # noqa: E402

PAGE_SIZE = 16
PAGES = 80
CHUNK = 256


class PlainPool:
    """The shape of a page-major pool over one ordinary tensor."""

    def __init__(self, layers, heads, dim):
        self.buffer = torch.zeros(PAGES, layers, 2, PAGE_SIZE, heads, dim)

    def get_key_buffer(self, layer):
        return self.buffer[:, layer, 0]

    def get_value_buffer(self, layer):
        return self.buffer[:, layer, 1]

    def set_kv_buffer(self, layer, loc, cache_k, cache_v):
        page, row = loc // PAGE_SIZE, loc % PAGE_SIZE
        self.buffer[page, layer, 0, row] = cache_k
        self.buffer[page, layer, 1, row] = cache_v


@pytest.fixture(scope="module")
def model():
    return build_llama(seed=0)


@pytest.fixture(scope="module")
def asked():
    return prompts.seeded(VOCABULARY)


def carried(model, prompt, spoil=None):
    """Prefill into one pool, copy the pages elsewhere in another, read them back from there."""
    geometry = model.geometry
    count = -(-len(prompt.tokens) // PAGE_SIZE)
    source_ids = paging.pick_pages(PAGES, 1, count, seed=1)
    destination_ids = paging.pick_pages(PAGES, 1, count, seed=2)
    source = PlainPool(geometry.layers, geometry.kv_heads, geometry.head_dim)
    destination = PlainPool(geometry.layers, geometry.kv_heads, geometry.head_dim)
    cache, first = model.prefill(prompt.tokens, CHUNK)
    paging.scatter(cache, source, source_ids, PAGE_SIZE)
    destination.buffer[torch.from_numpy(destination_ids)] = source.buffer[
        torch.from_numpy(source_ids)
    ]
    if spoil is not None:
        spoil(destination.buffer, destination_ids)
    tokens = len(prompt.tokens)
    read = paging.gather(destination, model.new_cache(), destination_ids, tokens, geometry.layers)
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


def _zero_a_page(buffer, ids):
    buffer[ids[1]] = 0


def _zero_the_last_page(buffer, ids):
    buffer[ids[-1]] = 0


def _swap_two_pages(buffer, ids):
    buffer[torch.tensor([ids[0], ids[1]])] = buffer[torch.tensor([ids[1], ids[0]])]


@pytest.mark.parametrize("spoil", [_zero_a_page, _zero_the_last_page])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_lost_page_changes_the_tokens(model, asked, expected, index, spoil):
    assert through_pages(model, asked[index], spoil) != expected[index]


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

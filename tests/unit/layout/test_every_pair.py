"""Every arrangement into every other, every page size into every other, one fixed case each."""

import itertools

import pytest

from tests.support.fixed_cases import check, group_of, side_of
from tests.support.layout_cases import ARRANGEMENTS, PAGE_SIZES, TILED

PAIRS = [
    (family, *pair)
    for family, known in ARRANGEMENTS.items()
    for pair in itertools.product(known, known)
]


@pytest.mark.parametrize(("family", "prefill", "decode"), PAIRS)
def test_arrangements(family, prefill, decode):
    """TP 2 to TP 4, page size 32 to 16 where pages may be cut, two stages to one."""
    group = group_of(family)
    sizes = {"state": (1, 1)}.get(family, (32, 32) if family in TILED else (32, 16))
    source = side_of(group, prefill, sizes[0], tp_size=2, stages=2)
    check(group, source, side_of(group, decode, sizes[1], tp_size=4), receiver=2)


@pytest.mark.parametrize("prefix", [0, 64, 37])
@pytest.mark.parametrize("decode", PAGE_SIZES)
@pytest.mark.parametrize("prefill", PAGE_SIZES)
def test_page_sizes(prefill, decode, prefix):
    """A partial last page, a prefix inside a page, decode's pages from the prefix on."""
    group = group_of("kv", heads=1, first=prefix, end=prefix + 150)
    first_token = prefix // decode * decode
    check(
        group,
        side_of(group, "page_major", prefill),
        side_of(group, "token_major", decode, first_token=first_token),
    )


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("prefill", [1, 2, 4, 8, 16])
def test_attention_tp(prefill, decode, heads):
    group = group_of("kv", heads=heads, layers=(5,), end=11)
    for receiver in {0, decode // 2, decode - 1}:
        check(
            group,
            side_of(group, "page_major", 8, tp_size=prefill),
            side_of(group, "token_major", 8, tp_size=decode),
            receiver,
        )


@pytest.mark.parametrize("stages", list(itertools.product([1, 2, 3, 4], repeat=2)))
def test_stages_by_global_layer(stages):
    group = group_of("kv", layers=(0, 2, 3, 5, 8, 9, 10), heads=1, end=9)
    for receiver in range(stages[1]):
        check(
            group,
            side_of(group, "unified_entries", 4, stages=stages[0]),
            side_of(group, "head_major", 8, stages=stages[1]),
            receiver,
        )


@pytest.mark.parametrize("own_pages_only", [True, False])
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_context_parallel(cp_size, own_pages_only):
    for family, sizes in (("mla", (16, 64)), ("kv", (8, 8)), ("vllm_cpu", (16, 16))):
        group = group_of(family, first=0 if family == "vllm_cpu" else 9, end=77)
        known = ARRANGEMENTS[family]
        check(
            group,
            side_of(group, known[0], sizes[0], cp_size=cp_size, tp_size=2),
            side_of(group, known[1], sizes[1]),
            own_pages_only=own_pages_only,
        )

"""Every arrangement into every other, every page size into every other, one fixed case each."""

import itertools

import pytest

from pdxfer.layout.builders_state import StateTensor
from tests.support.cell_oracle import check_case
from tests.support.layout_cases import ARRANGEMENTS, PAGE_SIZES, TILED, Case, GroupModel, Side

WIDTHS = {"mxfp8": (32, 64), "mxfp8_tiles": (32, 64), "vectorized_5d": (16, 8), "mla": (32, 16)}


def group_of(family, **changes):
    values = {
        "name": "full",
        "family": family,
        "dtype": "float8_e4m3fn" if family.startswith("mxfp8") else "bfloat16",
        "layers": (0, 3),
        "heads": 1 if family == "mla" else 4,
        "widths": WIDTHS.get(family, (8, 16)),
        "draft_layers": (40, 41) if family == "draft" else (),
        "first": 0,
        "end": 41,
    }
    if family == "state":
        values |= {"name": "state", "end": 2}
        values["tensors"] = (
            StateTensor("conv.0", (16, 3), "bfloat16", 0, (4, 4, 8)),
            StateTensor("conv.1", (3, 16), "float16", 1, (8, 8), 2),
            StateTensor("temporal", (4, 2, 4), "float32", 0),
            StateTensor("ssm", (5, 2), "float32", None),
        )
    return GroupModel(**{**values, **changes})


def side_of(group, arrangement, page_size, tp_size=1, stages=1, first_token=0, cp_size=1):
    layers = group.layers
    cuts = [len(layers) * n // stages for n in range(stages + 1)]
    return Side(
        tp_size=tp_size,
        pp_size=stages,
        cp_size=cp_size,
        arrangements={group.name: arrangement},
        page_sizes={group.name: page_size},
        first_tokens={group.name: first_token},
        pages={group.name: -(-group.end // page_size) + 4},
        reserved=1,
        stages=[layers[a:b] for a, b in itertools.pairwise(cuts)],
    )


def check(group, source, destination, receiver=0, **changes):
    values = {"layers": None, "batch_bytes": 4096, "own_pages_only": False, "seed": 7}
    check_case(Case({group.name: group}, source, destination, receiver, **{**values, **changes}))


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

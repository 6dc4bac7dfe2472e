"""Sparse latent attention: where rows and index keys lie, packed rows, what cannot be."""

import pytest

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import cover, dsa, mla, plan
from pdxfer.layout.rank import Rank
from tests.support.fixed_cases import check, group_of, side_of

SHAPE = {
    "layers": [3, 4, 5],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 64,
    "pages": 3,
    "dtype": "bfloat16",
}
PAGE = 64 * 132


def test_keys_of_a_page_come_before_its_scales():
    layout = dsa(**SHAPE)
    assert [region.item_len for region in layout.regions] == [64 * 576 * 2] * 3 + [PAGE] * 3
    assert layout.regions[3].length_bytes == 3 * PAGE
    assert layout.locate("latent", 4, 130) == (1, 130 * 1152)
    assert layout.locate("index_k", 4, 130) == (4, 2 * PAGE + 2 * 128)
    assert layout.locate("index_k_scale", 4, 130) == (4, 2 * PAGE + 64 * 128 + 2 * 4)
    assert {p.cell_bytes for p in layout.planes if p.part == "index_k_scale"} == {4}


def test_packed_rows_are_the_656_bytes_of_kernels():
    layout = dsa(**{**SHAPE, "dtype": "float8_e4m3fn"}, packed=True)
    assert layout.regions[0].item_len == 64 * 656
    assert layout.locate("rope", 3, 1) == (0, 656 + 528)
    plain = dsa(**{**SHAPE, "dtype": "float8_e4m3fn"})
    assert plain.regions[0].item_len == 64 * 576
    with pytest.raises(LayoutMismatchError):
        plan(layout, plain, relayout="allow")


def test_some_layers_or_none_have_an_index():
    assert len(dsa(**SHAPE, index_layers=[4]).regions) == 4
    assert len(dsa(**SHAPE, index_layers=[4, 40]).regions) == 4
    without = mla(**SHAPE)
    assert dsa(**SHAPE, index_layers=[]).fingerprint == without.fingerprint
    with pytest.raises(LayoutMismatchError, match="index_k"):
        plan(dsa(**SHAPE), without, relayout="allow")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index_head_dim": 64}, "index_head_dim is 64; it must be a multiple of 128"),
        ({"index_head_dim": True}, "index_head_dim is True"),
        ({"packed": True}, "dtype is bfloat16: packed rows have float8_e4m3fn elements"),
        ({"packed": True, "dtype": "float8_e4m3fn", "kv_lora_rank": 500}, "kv_lora_rank is 500"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ],
)
def test_what_cannot_be(change, text):
    with pytest.raises(ConfigError, match=text):
        dsa(**{**SHAPE, **change})


def test_every_rank_has_all_of_it_and_one_sends():
    ranks = [Rank(tp=tp, tp_size=4) for tp in range(4)]
    owned = cover([(rank, dsa(**SHAPE)) for rank in ranks], (Rank(), dsa(**SHAPE)))
    assert sum(1 for cells in owned if cells) == 1


@pytest.mark.parametrize("decode", ["device", "page_first", "page_first_direct"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_moves_every_cell_over_tp_pp_and_a_prefix(decode, dtype):
    group = group_of("dsa", dtype=dtype, layers=(0, 3, 4, 7), first=37, end=150)
    source = side_of(group, "device", 64, tp_size=2, stages=2)
    check(group, source, side_of(group, decode, 32, tp_size=4, first_token=32), receiver=3)

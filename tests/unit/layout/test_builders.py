import inspect
import itertools

import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import (
    StateTensor,
    combine,
    head_major,
    k_only,
    layer_first,
    mla,
    mxfp8,
    page_first,
    page_first_direct,
    page_head,
    page_major,
    page_unified,
    state,
    token_major,
    unified_entries,
    vectorized_5d,
    vllm_blocks,
    vllm_cpu,
    vllm_mla_blocks,
)
from pdxfer.layout.builders.shapes import kv_shape

SHAPE = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}
ALL = [token_major, head_major, page_major, unified_entries]


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_heads", 0),
        ("head_dim", -1),
        ("v_head_dim", 0),
        ("page_size", 0),
        ("pages", 0),
        ("dtype", "float12"),
        ("layers", []),
        ("layers", [1, 1]),
        ("layers", [-1]),
        ("layers", 3),
        ("head_first", 1),
        ("total_kv_heads", 1),
        ("reserved_pages", 10),
        ("group", "a b"),
        ("model", "x" * 1000),
    ],
)
def test_a_value_that_no_pool_has_is_refused_by_name(build, field, value):
    with pytest.raises(ConfigError) as raised:
        build(**{**SHAPE, field: value})
    named = {"head_first": "heads", "reserved_pages": "reserves", "total_kv_heads": "heads"}
    assert named.get(field, field) in str(raised.value)


def state_of(**shape):
    tensors = [StateTensor("temporal", (2, 4), "float32")]
    return state(layers=shape["layers"], tensors=tensors, slots=4)


COUNTED = [*ALL, state_of]


@pytest.mark.parametrize("build", COUNTED)
@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([0, 1.5], "layers have 1.5; global ids are ints"),
        ([0, 1.0], "layers have 1.0"),
        (["a"], "layers have 'a'"),
        ("01", "layers have '0'"),
        ([True], "layers have True"),
        ([None], "layers have None"),
        (None, "layers is None"),
        ([-1], "distinct ids from 0"),
        ([3, 3], "distinct ids from 0"),
        ([1 << 63], "layer of plane"),
        (range(10**12), "layers are over 65536 ids"),
        (itertools.count(), "layers are over 65536 ids"),
    ],
)
def test_layers_are_a_bounded_number_of_ints(build, layers, named):
    with pytest.raises(ConfigError, match=named):
        build(**{**SHAPE, "layers": layers})


@pytest.mark.parametrize("build", COUNTED)
def test_layers_of_numpy_are_plain_ints(build):
    layout = build(**{**SHAPE, "layers": np.array([2, 7], np.uint16)})
    assert layout.layers == (2, 7)
    assert {type(plane.layer) for plane in layout.planes} == {int}
    assert len(layout.fingerprint) == 32


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", 5), ("group", ["a"]), ("model", 5), ("dtype", ["a"]), ("dtype", 5),
        ("reserved_pages", "x"), ("reserved_pages", 1.0), ("reserved_pages", True),
        ("head_first", "0"), ("head_first", 0.0), ("page_size", "x"), ("pages", 2.0),
        ("head_dim", [8]), ("total_kv_heads", "2"), ("kv_heads", True),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused_by_name(build, field, value):
    with pytest.raises(ConfigError, match={"group": "group name"}.get(field, field)):
        build(**{**SHAPE, field: value})


@pytest.mark.parametrize("build", ALL)
def test_a_stage_and_a_rank_keep_global_layers_and_heads(build):
    shape = {**SHAPE, "layers": [7, 9], "total_kv_heads": 8, "head_first": 4}
    layout = build(**shape)
    assert layout.layers == (7, 9)
    assert {(p.head_first, p.head_end, p.heads_total) for p in layout.planes} == {(4, 6, 8)}
    first, second = (layout.locate("k", 7, 5, head)[1] for head in (4, 5))
    assert second > first
    with pytest.raises(ConfigError, match="head 3"):
        layout.locate("k", 7, 5, 3)


@pytest.mark.parametrize("build", ALL)
def test_locate_refuses_what_is_not_there(build):
    layout = build(**SHAPE)
    for arguments in [("k", 3, 0), ("x", 0, 0), ("k", 0, 36), ("k", 0, -1), ("k", 0, 0, 2)]:
        with pytest.raises(ConfigError):
            layout.locate(*arguments)
    with pytest.raises(ConfigError):
        layout.locate("k", 0, 0, group="swa")


def test_unified_rows_must_be_multiples_of_16_bytes():
    with pytest.raises(ConfigError, match="row of v has 8 bytes"):
        unified_entries(**{**SHAPE, "kv_heads": 1}, v_head_dim=4)


def test_mla_names_its_arrangements():
    shape = {"layers": [0], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "page_size": 4, "pages": 2}
    with pytest.raises(ConfigError, match="arrangement"):
        mla(**shape, dtype="bfloat16", arrangement="head_major")


class TestCombine:
    def test_groups_side_by_side(self):
        full = token_major(**SHAPE, model="m@1")
        window = page_major(**{**SHAPE, "layers": [3], "page_size": 2}, group="swa")
        both = combine(full, window)
        assert list(both.group_by_name) == ["full", "swa"]
        assert len(both.regions) == 7
        assert both.locate("k", 3, 2, group="swa") == (6, window.locate("k", 3, 2)[1])
        assert both.model == "m@1"
        assert both.relayout == "never"
        assert not both.unified_memory
        with pytest.raises(ConfigError, match="group must be named"):
            both.locate("k", 3, 2)

    def test_groups_in_one_buffer(self):
        full = unified_entries(**SHAPE, length_bytes=1 << 16)
        window = unified_entries(**{**SHAPE, "layers": [3]}, group="swa", length_bytes=1 << 16)
        both = combine(full, window, one_region=True)
        assert len(both.regions) == 1
        assert both.unified_memory
        assert both.item_lens == full.item_lens
        assert both.locate("v", 3, 1, group="swa") == (0, 64 + 32)

    def test_what_cannot_be_one_layout(self):
        full = token_major(**SHAPE)
        with pytest.raises(ConfigError, match="twice"):
            combine(full, full)
        with pytest.raises(ConfigError, match="at least one"):
            combine()
        with pytest.raises(ConfigError, match="two models"):
            combine(full.with_model("a"), token_major(**SHAPE, group="swa", model="b"))
        with pytest.raises(ConfigError, match="not one"):
            combine(full, page_major(**SHAPE, group="swa"), one_region=True)
        with pytest.raises(ConfigError, match="buffers of"):
            combine(
                page_major(**SHAPE),
                page_major(**{**SHAPE, "layers": [5]}, group="swa"),
                one_region=True,
            )


KV_BUILDERS = (
    head_major, layer_first, mxfp8, page_first, page_first_direct, page_head, page_major,
    page_unified, token_major, unified_entries, vectorized_5d, vllm_blocks, vllm_cpu,
)  # fmt: skip
KEYWORDS = (*KV_BUILDERS, mla, vllm_mla_blocks, k_only)


class TestKeywords:
    @pytest.mark.parametrize("build", KEYWORDS)
    def test_an_unknown_one_is_refused_by_the_name_that_was_called(self, build):
        with pytest.raises(ConfigError) as raised:
            build(page_sise=4)
        text = f"{build.__name__}() takes no page_sise; did you mean page_size?"
        assert str(raised.value) == text
        assert raised.value.fields == {"page_sise": "unknown"}

    @pytest.mark.parametrize("build", KEYWORDS)
    def test_missing_ones_are_named_together(self, build):
        with pytest.raises(ConfigError, match=rf"^{build.__name__}\(\) needs .*page_size, pages"):
            build()

    @pytest.mark.parametrize(
        ("given", "near"),
        [
            ("head_num", "kv_heads"),
            ("num_kv_heads", "kv_heads"),
            ("layer_num", "layers"),
            ("block_size", "page_size"),
            ("size", "pages"),
            ("reserved", "reserved_pages"),
        ],
    )
    def test_names_of_pools_and_engines_lead_to_ours(self, given, near):
        with pytest.raises(ConfigError, match=rf"takes no {given}; did you mean {near}\?"):
            token_major(**SHAPE, **{given: 1})

    def test_a_name_like_none_gets_the_list(self):
        with pytest.raises(ConfigError, match=r"takes no xyz; it takes layers, kv_heads, head_dim"):
            token_major(**SHAPE, xyz=1)

    def test_every_argument_is_in_the_docstring(self):
        for name in inspect.signature(kv_shape).parameters:
            assert f"\n    {name}: " in inspect.getdoc(token_major)

    @pytest.mark.parametrize("build", [each for each in KV_BUILDERS if each is not token_major])
    def test_the_others_lead_there(self, build):
        assert "`token_major`" in build.__doc__

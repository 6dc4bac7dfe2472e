import dataclasses

import pytest

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import (
    Group,
    KVLayout,
    Plane,
    RegionSpec,
    Side,
    StateTensor,
    check_pair,
    combine,
    head_major,
    join_parts,
    k_only,
    mla,
    page_major,
    plan,
    state_entries,
    token_major,
    unified_entries,
)
from pdxfer.layout.builders.draft import beside_draft

SHAPE = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}
TP_TEXT = (
    "--enable-unified-memory does not support different prefill / decode attention TP sizes "
    "(prefill=4, decode=2): the whole-envelope state cannot be TP-resliced."
)
REMEDY = (
    'relayout="never" (the default of page-major and unified caches), so nothing is converted. Set '
    'relayout="allow" on both sides, that is on both clients, and the planner converts; or run the '
    "same layout on both."
)
ALL = [token_major, head_major, page_major, unified_entries]


def refusal(source, destination, relayout="allow", tp=(1, 1), **more):
    with pytest.raises(LayoutMismatchError) as raised:
        check_pair(Side(source, tp[0], relayout, **more), Side(destination, tp[1], "allow", **more))
    assert isinstance(raised.value, RuntimeError)
    return raised.value


def envelope_text(prefill, decode):
    return (
        f"PD KV layout mismatch on the whole-envelope path: prefill has {len(prefill.regions)} KV "
        f"region(s) with item_lens={list(prefill.item_lens)}, decode has {len(decode.regions)} "
        f"with item_len={decode.item_lens[0]}. With --enable-unified-memory both sides must enable "
        "it and use the same page size and model spec."
    )


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("destination", ALL)
def test_any_arrangement_becomes_any_other(source, destination):
    other = {**SHAPE, "page_size": 2, "pages": 40}
    check_pair(Side(source(**SHAPE), 1, "allow"), Side(destination(**other), 2, "allow"))


class TestMeaning:
    @pytest.mark.parametrize("build", ALL)
    @pytest.mark.parametrize(
        ("changes", "field", "values"),
        [
            ({"dtype": "float16"}, "dtype", ("bfloat16", "float16")),
            ({"layers": range(4)}, "layers", ("0-2 (3 layers)", "0-3 (4 layers)")),
            ({"layers": [0, 2, 5]}, "layers", ("0-2 (3 layers)", "0, 2, 5 (3 layers)")),
            ({"head_dim": 16}, "head_dim of full/k", ("8", "16")),
            ({"v_head_dim": 16}, "v_head_dim of full/v", ("8", "16")),
            ({"kv_heads": 4}, "total_kv_heads of full/k", ("2", "4")),
            ({"model": "m@2"}, "model", ("m@1", "m@2")),
            ({"group": "swa"}, "parts", ("full/k, full/v", "swa/k, swa/v")),
        ],
    )
    def test_a_difference_is_named_with_both_values(self, build, changes, field, values):
        source = build(**SHAPE, model="m@1")
        destination = build(**{**SHAPE, **changes})
        error = refusal(source, destination)
        assert error.fields[field] == f"prefill={values[0]}, decode={values[1]}"
        assert values[0] in str(error)
        assert values[1] in str(error)
        assert field.split(" ")[0] in str(error)
        assert "Both s" in str(error)

    def test_documented_dtype_text(self):
        error = refusal(token_major(**SHAPE), token_major(**{**SHAPE, "dtype": "float8_e5m2"}))
        assert str(error).startswith(
            "KV cache dtype mismatch: prefill server has kv_cache_dtype=bfloat16, but decode "
            "server has kv_cache_dtype=float8_e5m2. Both servers must use the same "
            "--kv-cache-dtype value."
        )

    def test_dtypes_are_compared_part_by_part(self):
        """A stage may hold one group only: what its first part is made of says nothing."""
        full = token_major(**SHAPE)
        window = token_major(**{**SHAPE, "layers": [7], "dtype": "float16"}, group="swa")
        check_pair(
            Side(combine(full, window), 1, "allow"), Side(window, 1, "allow", all_layers=False)
        )
        other = token_major(**{**SHAPE, "layers": [7], "dtype": "bfloat16"}, group="swa")
        error = refusal(combine(full, window), combine(full, other))
        assert error.fields == {
            "dtype of swa/k": "prefill=float16, decode=bfloat16",
            "dtype of swa/v": "prefill=float16, decode=bfloat16",
        }

    def test_all_differences_are_told_at_once(self):
        error = refusal(
            token_major(**SHAPE, model="a"),
            token_major(**{**SHAPE, "layers": range(2), "dtype": "float16"}, model="b"),
        )
        assert set(error.fields) == {"model", "dtype", "layers"}

    def test_model_is_compared_only_where_both_give_it(self):
        check_pair(Side(token_major(**SHAPE, model="m"), 1, "allow"),
                   Side(token_major(**SHAPE), 1, "allow"))  # fmt: skip

    def test_parts_on_one_side_only(self):
        latent = mla(layers=range(3), kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, pages=9,
                     dtype="bfloat16")  # fmt: skip
        error = refusal(token_major(**SHAPE), latent)
        assert "ignore_parts" in str(error)
        assert error.fields["parts"] == "prefill=full/k, full/v, decode=full/latent, full/rope"

    def test_ignored_parts_that_nobody_has_are_named_where_parts_differ(self):
        source, destination = token_major(**SHAPE), token_major(**SHAPE, group="swa")
        with pytest.raises(LayoutMismatchError, match="zz, named there, is on neither side"):
            check_pair(Side(source, 1, "allow", ("zz",)), Side(destination, 1, "allow"))
        check_pair(Side(source, 1, "allow", ("zz",)), Side(source, 1, "allow"))

    def test_ignored_parts_are_not_compared(self):
        source, destination = token_major(**SHAPE), token_major(**SHAPE, v_head_dim=4)
        refusal(source, destination)
        check_pair(Side(source, 1, "allow", ("v",)), Side(destination, 1, "allow"))
        check_pair(Side(source, 1, "allow"), Side(destination, 1, "allow", ("v",)))

    def test_a_pipeline_stage_may_hold_less(self):
        stage = token_major(**{**SHAPE, "layers": [2]})
        whole = token_major(**SHAPE)
        check_pair(Side(stage, 1, "allow", all_layers=False), Side(whole, 1, "allow"))
        check_pair(Side(whole, 1, "allow"), Side(stage, 1, "allow", all_layers=False))
        beyond = token_major(**{**SHAPE, "layers": [2, 3]})
        with pytest.raises(LayoutMismatchError, match="layers"):
            check_pair(Side(beyond, 1, "allow", all_layers=False), Side(whole, 1, "allow"))

    def test_tiles_need_one_name_and_one_page_size(self):
        def tiled(tile, page_size=4):
            kind = "tile" if tile else "token"
            rows = 1 if tile else page_size
            plane = Plane("full", "k", 0, 0, 0, 64, 0 if tile else 16, 64, 0, 1, 1,
                          64 if tile else 16, rows, "uint8", kind, tile)  # fmt: skip
            return KVLayout(
                (Group("full", page_size, 4),), (plane,), (RegionSpec(256, 64),), "uint8"
            )

        check_pair(Side(tiled("a"), 1, "allow"), Side(tiled("a"), 1, "allow"))
        assert refusal(tiled("a"), tiled("b")).fields["tile of full/k"] == "prefill=a, decode=b"
        assert "page_size of full/k" in refusal(tiled("a"), tiled("a", 2)).fields
        assert "tile of full/k" in refusal(tiled("a"), tiled("")).fields


class TestWholeEnvelope:
    """`never` on either side: the documented refusals, to the letter."""

    def test_equal_envelopes_pass(self):
        for build in (page_major, unified_entries):
            check_pair(Side(build(**SHAPE), 2, "never"), Side(build(**SHAPE), 2, "never"))

    @pytest.mark.parametrize("sides", [("never", "allow"), ("allow", "never"), ("never", "never")])
    def test_other_page_size(self, sides):
        source, destination = page_major(**SHAPE), page_major(**{**SHAPE, "page_size": 8})
        with pytest.raises(LayoutMismatchError) as raised:
            check_pair(Side(source, 1, sides[0]), Side(destination, 1, sides[1]))
        named = {("never", "allow"): "prefill says", ("allow", "never"): "decode says"}
        assert str(raised.value) == (
            f"{envelope_text(source, destination)} page_size: prefill=4, decode=8. "
            f"{named.get(sides, 'prefill and decode say')} {REMEDY}"
        )
        assert raised.value.fields["page_size"] == "prefill=4, decode=8"
        assert "item_lens=[768], decode has 1 with item_len=1536" in str(raised.value)

    @pytest.mark.parametrize("turned", [False, True])
    def test_only_one_side_is_unified(self, turned):
        pair = [page_major(**SHAPE), token_major(**SHAPE)]
        if turned:
            pair.reverse()
        error = refusal(*pair, relayout="never")
        flags = ("False", "True") if turned else ("True", "False")
        values = f"prefill={flags[0]}, decode={flags[1]}"
        assert str(error) == (
            f"{envelope_text(*pair)} unified_memory: {values}. prefill says {REMEDY}"
        )
        assert error.fields["unified_memory"] == values
        check_pair(*(Side(layout, 1, "allow") for layout in pair))

    def test_what_no_relayout_can_mend_is_told_without_one(self):
        pair = [page_major(**SHAPE), token_major(**{**SHAPE, "head_dim": 16, "page_size": 8})]
        error = refusal(*pair, relayout="never")
        assert str(error).startswith(envelope_text(*pair))
        assert "head_dim of full/k: prefill has 8, decode has 16." in str(error)
        assert "page_size: prefill=4, decode=8." in str(error)
        assert "relayout" not in str(error)
        assert error.fields["page_size"] == "prefill=4, decode=8"

    def test_other_attention_tp_and_something_else(self):
        source = page_major(**SHAPE, total_kv_heads=8)
        other = {**SHAPE, "kv_heads": 4, "dtype": "float16", "page_size": 8}
        error = refusal(source, page_major(**other, total_kv_heads=8), relayout="never", tp=(4, 2))
        assert str(error).startswith(f"{TP_TEXT} page_size: prefill=4, decode=8. KV cache dtype")
        assert "relayout" not in str(error)
        assert set(error.fields) == {"attention_tp", "page_size", "dtype"}

    def test_only_one_side_is_unified_with_equal_numbers(self):
        source = page_major(**SHAPE)
        destination = dataclasses.replace(source, unified_memory=False)
        error = refusal(source, destination, relayout="never")
        assert error.fields["unified_memory"] == "prefill=True, decode=False"
        assert "unified_memory" in str(error)

    def test_other_attention_tp(self):
        source = page_major(**SHAPE, total_kv_heads=8)
        destination = page_major(**{**SHAPE, "kv_heads": 4}, total_kv_heads=8)
        error = refusal(source, destination, relayout="never", tp=(4, 2))
        assert str(error) == f"{TP_TEXT} prefill says {REMEDY}"
        assert error.fields["attention_tp"] == "prefill=4, decode=2"

    def test_other_layer_count_is_also_named(self):
        source, destination = page_major(**SHAPE), page_major(**{**SHAPE, "layers": range(2)})
        error = refusal(source, destination, relayout="never")
        assert str(error).startswith(envelope_text(source, destination))
        assert "layers: prefill has 0-2" in str(error)
        assert error.fields["layers"] == "prefill=0-2 (3 layers), decode=0-1 (2 layers)"

    def test_equal_item_len_with_another_inner_order(self):
        source, destination = page_major(**SHAPE), unified_entries(**SHAPE)
        assert source.item_lens == destination.item_lens
        error = refusal(source, destination, relayout="never")
        assert "inner order" in str(error)
        assert "relayout" in str(error)
        (values,) = error.fields.values()
        assert "row 32" in values
        assert "row 192" in values

    def test_keys_and_values_swapped(self):
        source = page_major(**SHAPE)
        swapped = dataclasses.replace(
            source,
            planes=tuple(
                dataclasses.replace(p, part={"k": "v", "v": "k"}[p.part]) for p in source.planes
            ),
        )
        assert "inner order" in str(refusal(source, swapped, relayout="never"))

    def test_equal_item_len_of_other_page_and_layer_counts(self):
        source = page_major(**{**SHAPE, "layers": range(2), "page_size": 4})
        destination = page_major(**{**SHAPE, "layers": range(1), "page_size": 8})
        assert source.item_lens == destination.item_lens
        error = refusal(source, destination, relayout="never")
        assert "Page size mismatch: prefill server has page_size=4, but decode server has " in str(
            error
        )
        assert {"page_size", "layers"} <= set(error.fields)

    def test_same_size_elements_of_another_dtype(self):
        error = refusal(
            page_major(**SHAPE), page_major(**{**SHAPE, "dtype": "float16"}), relayout="never"
        )
        assert error.fields == {"dtype": "prefill=bfloat16, decode=float16"}

    def test_stages_and_ranks_that_owe_each_other_nothing_are_not_refused(self):
        first = page_major(**{**SHAPE, "layers": [0, 1]})
        second = page_major(**{**SHAPE, "layers": [2]})
        check_pair(
            Side(first, 1, "never", all_layers=False), Side(second, 1, "never", all_layers=False)
        )
        ranks = [page_major(**SHAPE, total_kv_heads=4, head_first=first) for first in (0, 2)]
        check_pair(Side(ranks[0], 2, "never"), Side(ranks[1], 2, "never"))

    def test_page_counts_and_reserved_pages_may_differ(self):
        check_pair(
            Side(page_major(**SHAPE), 1, "never"),
            Side(page_major(**{**SHAPE, "pages": 100}, reserved_pages=7), 1, "never"),
        )

    def test_strict_pairs_that_are_not_unified(self):
        check_pair(Side(token_major(**SHAPE), 1, "never"), Side(token_major(**SHAPE), 1, "never"))
        error = refusal(token_major(**SHAPE), head_major(**SHAPE), relayout="never")
        assert "inner order" in str(error)
        error = refusal(
            token_major(**SHAPE), token_major(**{**SHAPE, "page_size": 2}), relayout="never"
        )
        assert str(error) == (
            "Page size mismatch: prefill server has page_size=4, but decode server has page_size=2."
            f" Both servers must use the same --page-size value. prefill says {REMEDY}"
        )
        error = refusal(token_major(**SHAPE), token_major(**SHAPE), relayout="never", tp=(2, 1))
        assert str(error).endswith(REMEDY)
        assert error.fields == {"attention_tp": "prefill=2, decode=1"}

    def test_groups_in_one_buffer_are_one_envelope(self):
        def shared(page_size):
            shape = {**SHAPE, "page_size": page_size, "pages": 20}
            parts = [
                unified_entries(**shape, length_bytes=1 << 16),
                unified_entries(**{**shape, "layers": [5]}, group="swa", length_bytes=1 << 16),
            ]
            return combine(*parts, one_region=True)

        check_pair(Side(shared(4), 1, "never"), Side(shared(4), 1, "never"))
        error = refusal(shared(4), shared(2), relayout="never")
        assert str(error) == (
            f"{envelope_text(shared(4), shared(2))} page_size of full: prefill=4, decode=2. "
            f"page_size of swa: prefill=4, decode=2. prefill says {REMEDY}"
        )


def twice_as_wide(layout):
    """The same layout, the last region of which has pages of twice the bytes."""
    last = layout.regions[-1]
    wide = RegionSpec(2 * last.length_bytes, 2 * last.item_len)
    return dataclasses.replace(layout, regions=(*layout.regions[:-1], wide))


WINDOW = {**SHAPE, "layers": [7], "group": "swa"}
DRAFT = page_major(**{**SHAPE, "layers": [9]})
INDEX = k_only(layers=[0, 2], heads=1, head_dim=8, page_size=4, pages=9, dtype="bfloat16")
STATE = state_entries(layers=[7], tensors=[StateTensor("temporal", (2, 4), "float32")], slots=5)


class TestSeveralEnvelopes:
    """Groups and joined parts lie in regions of their own; the pair is strict all the same."""

    @pytest.fixture(
        params=[
            join_parts(page_major(**SHAPE), INDEX),
            beside_draft(page_major(**SHAPE), DRAFT),
            combine(page_major(**SHAPE), page_major(**{**SHAPE, "layers": [7]}, group="swa")),
            combine(
                unified_entries(**SHAPE), unified_entries(**{**SHAPE, "layers": [7]}, group="swa")
            ),
            combine(page_major(**SHAPE), STATE),
        ],
        ids=["index", "draft", "windows of pages", "windows of entries", "state"],
    )
    def layout(self, request):
        return request.param

    def test_a_twin_is_taken_by_default(self, layout):
        assert layout.unified_memory
        assert layout.relayout == "never"
        assert len(layout.regions) > 1
        assert not plan(layout, layout, relayout=layout.relayout).empty

    def test_other_page_counts_are_taken(self, layout):
        more = dataclasses.replace(
            layout,
            groups=tuple(dataclasses.replace(g, pages=g.pages - 1) for g in layout.groups),
        )
        check_pair(Side(layout, 2, "never"), Side(more, 2, "never"))

    def test_other_attention_tp(self, layout):
        error = refusal(layout, layout, relayout="never", tp=(4, 2))
        assert str(error) == f"{TP_TEXT} prefill says {REMEDY}"

    def test_only_one_side_is_unified(self, layout):
        error = refusal(layout, dataclasses.replace(layout, unified_memory=False), relayout="never")
        assert str(error) == (
            f"{envelope_text(layout, layout)} unified_memory: prefill=True, decode=False. "
            f"prefill says {REMEDY}"
        )
        assert error.fields == {"unified_memory": "prefill=True, decode=False"}

    def test_one_envelope_against_several(self, layout):
        one = page_major(**SHAPE)
        for pair in ((layout, one), (one, layout)):
            error = refusal(*pair, relayout="never")
            assert str(error).startswith(envelope_text(*pair))
            numbers = [len(side.regions) for side in pair]
            assert error.fields["regions"] == f"prefill={numbers[0]}, decode={numbers[1]}"

    def test_envelopes_that_differ_behind_the_first_are_named(self, layout):
        other = twice_as_wide(layout)
        error = refusal(layout, other, relayout="never")
        assert str(error).startswith(envelope_text(layout, other))
        named = f"prefill has {list(layout.item_lens)}, decode has {list(other.item_lens)}."
        assert f"item_lens: {named}" in str(error)
        assert 'Set relayout="allow"' in str(error)

    def test_equal_lengths_with_another_inner_order(self):
        pair = [combine(build(**SHAPE), build(**WINDOW)) for build in (page_major, unified_entries)]
        assert pair[0].item_lens == pair[1].item_lens
        assert "inner order" in str(refusal(*pair, relayout="never"))

    def test_stages_that_hold_one_group_each(self):
        full, window = page_major(**SHAPE), page_major(**WINDOW)
        for pair in ((full, window), (combine(full, window), combine(full, window))):
            check_pair(*(Side(layout, 1, "never", all_layers=False) for layout in pair))


class TestPlanRefusesAlike:
    def test_relayout_decides(self):
        source, destination = page_major(**SHAPE), token_major(**SHAPE)
        assert not plan(source, destination).empty
        with pytest.raises(LayoutMismatchError, match="whole-envelope path"):
            plan(source, destination, relayout="never")

    def test_heads_tell_the_attention_tp(self):
        source = page_major(**SHAPE)
        destination = page_major(**{**SHAPE, "kv_heads": 1}, total_kv_heads=2)
        with pytest.raises(LayoutMismatchError, match=r"\(prefill=1, decode=2\)"):
            plan(source, destination, relayout="never")

    def test_unknown_relayout(self):
        with pytest.raises(ConfigError, match="relayout"):
            plan(page_major(**SHAPE), page_major(**SHAPE), relayout="maybe")

    def test_missing_heads_are_named(self):
        source = token_major(**{**SHAPE, "kv_heads": 1}, total_kv_heads=2)
        with pytest.raises(LayoutMismatchError, match=r"layer 0, heads 0-1.*owned"):
            plan(source, token_major(**SHAPE))

"""Host layouts, parts that are joined, renamed and fused, and states: order and refusals."""

import dataclasses

import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import (
    KVLayout,
    Rank,
    StateTensor,
    combine,
    cover,
    fuse_draft,
    host_layout,
    join_parts,
    k_only,
    layer_first,
    mla,
    mxfp8,
    page_first,
    page_first_direct,
    page_head,
    page_major,
    page_unified,
    plan,
    select_parts,
    state,
    state_entries,
    token_major,
    unified_entries,
)

SHAPE = {
    "layers": [4, 5, 6],
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 16,
    "page_size": 4,
    "pages": 5,
    "dtype": "bfloat16",
    "total_kv_heads": 4,
    "head_first": 2,
}
K, V = 16, 32  # bytes of a cell


def test_orders_of_host_layouts():
    """The cell of V at page 3, row 1, layer 5 (second), head 3 (second)."""
    slot, cell = 3 * 4 + 1, ("v", 5, 3 * 4 + 1, 3)
    assert layer_first(**SHAPE).locate(*cell) == (4, (slot * 2 + 1) * V)
    assert page_first(**SHAPE).locate(*cell) == (1, ((slot * 3 + 1) * 2 + 1) * V)
    assert page_first_direct(**SHAPE).locate(*cell) == (1, (((3 * 3 + 1) * 4 + 1) * 2 + 1) * V)
    assert page_head(**SHAPE).locate(*cell) == (1, (((3 * 2 + 1) * 4 + 1) * 3 + 1) * V)
    page, layer = 3 * 4 * 2 * (K + V), 4 * 2 * (K + V)
    unified = page_unified(**SHAPE)
    assert unified.locate(*cell) == (0, 3 * page * 1 + layer + 4 * 2 * K + (1 * 2 + 1) * V)


def test_page_unified_has_a_plane_a_head_group():
    layout = page_unified(**SHAPE, head_groups=2)
    assert len(layout.planes) == 2 * 2 * 3
    group, layer = 3 * 4 * (K + V), 4 * (K + V)
    for head in (2, 3):
        base = 3 * 2 * group + (head - 2) * group + layer
        assert layout.locate("k", 5, 13, head) == (0, base + 1 * K)
        assert layout.locate("v", 5, 13, head) == (0, base + 4 * K + 1 * V)
    assert layout.item_lens == (2 * group,)


@pytest.mark.parametrize("build", [layer_first, page_first, page_first_direct, page_head])
def test_host_layouts_have_no_sink_page_and_move_freely(build):
    layout = build(**SHAPE)
    assert layout.groups[0].reserved_pages == 0
    assert not layout.unified_memory
    assert layout.relayout == "allow"
    assert sum(layout.item_lens) == 4 * 3 * 2 * (K + V)
    assert build(**SHAPE, reserved_pages=1).groups[0].reserved_pages == 1
    assert KVLayout.from_wire(layout.to_wire()) == layout


def test_latents_stay_one_row():
    like = mla(
        layers=range(2), kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, pages=9, dtype="bfloat16"
    )
    for arrangement in ("layer_first", "page_first", "page_first_direct", "page_head"):
        layout = host_layout(like, arrangement, pages=5)
        region, offset = layout.locate("latent", 1, 6)
        assert layout.locate("rope", 1, 6) == (region, offset + 32)
        assert len(layout.regions) == (2 if arrangement == "layer_first" else 1)


def test_host_layouts_that_cannot_be():
    like = token_major(**SHAPE)
    with pytest.raises(ConfigError, match="Unsupported layout: page_last"):
        host_layout(like, "page_last", pages=2)
    with pytest.raises(ConfigError, match="head_groups=2: only page_unified"):
        host_layout(like, "page_first", pages=2, head_groups=2)
    with pytest.raises(ConfigError, match="head_group_num=3 must divide the pool's 2 kv heads"):
        page_unified(**SHAPE, head_groups=3)
    index = k_only(layers=[4], heads=1, head_dim=8, page_size=4, pages=5, dtype="bfloat16")
    with pytest.raises(ConfigError, match="must divide the pool's 1 kv heads"):
        host_layout(join_parts(like, index), "page_unified", pages=2, head_groups=2)
    with pytest.raises(ConfigError, match="2 groups"):
        host_layout(combine(like, token_major(**{**SHAPE, "group": "swa"})), "page_first", pages=2)
    tiles = mxfp8(**{**SHAPE, "head_dim": 32, "v_head_dim": 32, "dtype": "float8_e4m3fn",
                     "page_size": 32}, interleaved=True)  # fmt: skip
    with pytest.raises(ConfigError, match=r"page_size=16: tiles mxfp8_interleaved_32 .* of page_s"):
        host_layout(tiles, "page_first", pages=2, page_size=16)


def test_other_heads_in_other_layers():
    wide = token_major(**{**SHAPE, "layers": [9], "head_first": 0, "kv_heads": 4})
    both = join_parts(token_major(**SHAPE), wide)
    layout = host_layout(both, "page_first", pages=3)
    assert layout.locate("k", 9, 1, 1) == (0, (3 * 2 + 4) * K + 3 * 2 * K + 1 * K)
    with pytest.raises(ConfigError, match="page_head: part k has other heads in other layers"):
        host_layout(both, "page_head", pages=3)


def test_heads_with_a_gap_and_rows_of_other_heads():
    low = token_major(**{**SHAPE, "kv_heads": 1, "head_first": 0})
    high = token_major(**{**SHAPE, "kv_heads": 1, "head_first": 2})
    apart = dataclasses.replace(
        low,
        planes=low.planes + tuple(dataclasses.replace(p, region=p.region + 6) for p in high.planes),
        regions=low.regions * 2,
    )
    with pytest.raises(ConfigError, match="part k of layer 4 holds heads with a gap between"):
        host_layout(apart, "page_first", pages=2)
    odd = select_parts(
        join_parts(low, k_only(layers=[4, 5, 6], heads=2, head_dim=8, page_size=4, pages=5,
                               dtype="bfloat16")),
        {"k": "latent", "index_k": "rope"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="of layer 4 have not the same heads"):
        host_layout(odd, "page_first", pages=2)


class TestParts:
    def test_selected_parts_keep_their_regions_in_order(self):
        layout = select_parts(token_major(**SHAPE), {"v": "value"})
        assert [plane.part for plane in layout.planes] == ["value"] * 3
        assert [plane.region for plane in layout.planes] == [0, 1, 2]
        assert layout.item_lens == (4 * 2 * V,) * 3
        with pytest.raises(ConfigError, match="no part 'w'"):
            select_parts(layout, {"w": "x"})

    def test_joined_parts_share_page_ids(self):
        index = k_only(layers=[4, 6], heads=1, head_dim=8, page_size=4, pages=5, dtype="bfloat16")
        layout = join_parts(page_major(**SHAPE), index)
        assert len(layout.regions) == 3
        assert layout.unified_memory
        assert layout.relayout == "never"
        assert layout.locate("index_k", 6, 5) == (2, 5 * 16)
        with pytest.raises(ConfigError, match="part index_k of layer 4 is there twice"):
            join_parts(layout, index)
        with pytest.raises(ConfigError, match="cannot join"):
            join_parts(layout, k_only(layers=[9], heads=1, head_dim=8, page_size=4, pages=6,
                                      dtype="bfloat16"))  # fmt: skip

    def test_flat_scales_are_rows_and_tiles_are_pages(self):
        shape = {**SHAPE, "head_dim": 64, "v_head_dim": 32, "dtype": "float8_e4m3fn"}
        flat = mxfp8(**shape)
        assert flat.locate("k_scale", 5, 9, 3) == (7, (9 * 2 + 1) * 2)
        assert {plane.dtype for plane in flat.planes if "scale" in plane.part} == {"uint8"}
        tiles = mxfp8(**{**shape, "page_size": 128})
        assert tiles.locate("k_scale", 5, 130, 3) == (7, 128 * 2 * 2 + 128 * 2)
        assert {plane.tile for plane in tiles.planes} == {"", "mxfp8_interleaved_32"}
        assert flat.regions[6:9] == join_parts(flat).regions[6:9]
        with pytest.raises(ConfigError, match="v_head_dim divisible by 32, got 40"):
            mxfp8(**{**shape, "v_head_dim": 40})
        with pytest.raises(ConfigError, match="page_size=4: interleaved"):
            mxfp8(**shape, interleaved=True)

    def test_draft_lanes_follow_in_the_entry(self):
        target = unified_entries(**SHAPE)
        draft = unified_entries(**{**SHAPE, "layers": [40], "v_head_dim": 8})
        fused = fuse_draft(target, draft)
        used = 3 * 2 * (K + V)
        assert fused.locate("draft.k", 40, 1, 2) == (0, 352 + used)
        assert fused.locate("draft.v", 40, 0, 3) == (0, used + 2 * K + K)
        assert fused.item_lens == (4 * 352,)
        assert fused.regions[0].length_bytes == 5 * 4 * 352
        with pytest.raises(ConfigError, match="layer 4 is the target's and the draft's"):
            fuse_draft(target, unified_entries(**SHAPE))
        with pytest.raises(ConfigError, match="the target layout has no unified entries"):
            fuse_draft(page_major(**SHAPE), draft)
        with pytest.raises(ConfigError, match="cannot join"):
            fuse_draft(target, unified_entries(**{**SHAPE, "layers": [40], "pages": 6}))

    def test_a_shared_buffer_stays_as_long_as_it_is(self):
        target = unified_entries(**SHAPE, length_bytes=1 << 16)
        draft = unified_entries(**{**SHAPE, "layers": [40]}, length_bytes=1 << 16)
        assert fuse_draft(target, draft).regions[0].length_bytes == 1 << 16


class TestState:
    def test_shard_groups_are_planes(self):
        """Conv of [q 2, k 2, v 4] on rank 1 of 2; each element has 3 taps of 2 bytes."""
        conv = StateTensor("conv.0", (8, 3), "bfloat16", shard_groups=(2, 2, 4), tp=1, tp_size=2)
        layout = state(layers=[2], tensors=[conv], slots=5)
        assert [(p.head_first, p.heads, p.base) for p in layout.planes] == [
            (2, 2, 0), (6, 2, 12), (12, 4, 24),
        ]  # fmt: skip
        assert {p.heads_total for p in layout.planes} == {16}
        assert layout.groups[0].kind == "state"
        assert layout.locate("conv.0", 2, 3, 13) == (0, 3 * 48 + 24 + 6)

    def test_outer_rows_come_before_the_axis(self):
        conv = StateTensor("conv.0", (3, 4), "bfloat16", axis=1, unit=2)
        layout = state(layers=[2, 5], tensors=[conv], slots=3)
        (plane, _) = layout.planes
        assert (plane.rows, plane.row_stride, plane.heads, plane.cell_bytes) == (3, 8, 2, 4)
        assert layout.locate("conv.0", 5, 2, 1, row=2) == (1, 2 * 24 + 2 * 8 + 4)

    def test_a_replicated_tensor_is_one_cell(self):
        layout = state(layers=[0], tensors=[StateTensor("ssm", (4, 2), "float32", None)], slots=2)
        assert [(p.heads, p.heads_total, p.cell_bytes) for p in layout.planes] == [(1, 1, 32)]

    def test_entries_hold_tensor_after_tensor(self):
        tensors = [
            StateTensor("conv.0", (16, 3), "bfloat16"),
            StateTensor("temporal", (4, 8, 16), "float32"),
        ]
        layout = state_entries(layers=[3, 4], tensors=tensors, slots=5)
        assert layout.item_lens == (4288,)
        assert layout.locate("conv.0", 4, 1, 0) == (0, 4288 + 96)
        assert layout.locate("temporal", 3, 0, 1) == (0, 192 + 512)
        assert layout.unified_memory
        odd = [StateTensor("conv.0", (3,), "bfloat16")]
        assert state_entries(layers=[0], tensors=odd, slots=2, padded=True).item_lens == (32,)

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"shape": ()}, "sizes from 1"),
            ({"shape": (0, 3)}, "sizes from 1"),
            ({"axis": 2}, "has axis 2"),
            ({"axis": None, "tp_size": 2}, "is replicated"),
            ({"tp": 1}, "has tp 1 of tp_size 1"),
            ({"shard_groups": (2, 3)}, "together they must be the 8 elements"),
            ({"unit": 3}, "has unit 3"),
        ],
    )
    def test_tensors_that_cannot_be(self, fields, text):
        good = StateTensor("conv.0", (8, 3), "bfloat16")
        with pytest.raises(ConfigError, match=text):
            dataclasses.replace(good, **fields)

    def test_layers_and_parts_are_distinct(self):
        tensor = StateTensor("conv.0", (8, 3), "bfloat16")
        with pytest.raises(ConfigError, match="distinct ids"):
            state(layers=[1, 1], tensors=[tensor], slots=2)
        with pytest.raises(ConfigError, match="distinct parts"):
            state(layers=[1], tensors=[tensor, tensor], slots=2)
        with pytest.raises(ConfigError, match="distinct parts"):
            state_entries(layers=[1], tensors=[], slots=2)

    @pytest.mark.parametrize("ranks", [(1, 2), (2, 4), (4, 2), (2, 1)])
    def test_shard_groups_go_to_their_ranks_at_another_tp(self, ranks):
        """Elements of a packed axis are numbered; every rank must get its own of each group."""
        groups = (4, 4, 8)

        def held(tp, tp_size):
            starts = [0, 4, 8]
            return np.concatenate(
                [
                    start + np.arange(tp * size // tp_size, (tp + 1) * size // tp_size)
                    for start, size in zip(starts, groups, strict=True)
                ]
            ).astype(np.uint8)

        def layout(tp, tp_size):
            local = tuple(size // tp_size for size in groups)
            tensor = StateTensor(
                "conv.0", (3, sum(local)), "uint8", 1, local, tp=tp, tp_size=tp_size
            )
            return state(layers=[0], tensors=[tensor], slots=3)

        sources = [(Rank(tp=tp, tp_size=ranks[0]), layout(tp, ranks[0])) for tp in range(ranks[0])]
        for tp in range(ranks[1]):
            target = layout(tp, ranks[1])
            memory = np.full(target.regions[0].length_bytes, 255, np.uint8)
            owned = cover(sources, (Rank(tp=tp, tp_size=ranks[1]), target))
            for (rank, source), part in zip(sources, owned, strict=True):
                if not part.cells:
                    continue
                slot = np.tile(held(rank.tp, rank.tp_size), (3, 1)) + 20 * np.arange(3)[:, None]
                content = np.tile(slot.reshape(-1).astype(np.uint8), 3)
                for _, at, _, to, length in plan(source, target, owned=part).runs([1], [2]):
                    memory[to : to + length] = content[at : at + length]
            wanted = np.full((3, 3, 16 // ranks[1]), 255)
            wanted[2] = held(tp, ranks[1]) + 20 * np.arange(3)[:, None]
            assert memory.reshape(wanted.shape).tolist() == wanted.tolist()

    def test_a_static_pool_becomes_entries_slot_by_slot(self):
        tensors = [StateTensor("conv.0", (4, 3), "bfloat16")]
        source = state(layers=[0, 1], tensors=tensors, slots=4)
        runs = plan(source, state_entries(layers=[0, 1], tensors=tensors, slots=6)).runs([3], [5])
        assert runs.tolist() == [[0, 3 * 24, 0, 5 * 48, 24], [1, 3 * 24, 0, 5 * 48 + 24, 24]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pages": 0}, "pages is 0"),
        ({"pages": 1.5}, "pages is 1.5"),
        ({"page_size": 0}, "page_size is 0"),
        ({"head_groups": 0}, "head_groups is 0"),
        ({"head_groups": 1 << 40}, "head_groups=1099511627776 of 6 tensors are more than 65536"),
    ],
)
def test_host_layouts_of_impossible_counts(changes, named):
    options = {"pages": 3, **changes}
    with pytest.raises(ConfigError, match=named):
        host_layout(token_major(**SHAPE), "page_unified", **options)


def test_widths_of_scaled_rows_are_ints():
    for name in ("head_dim", "v_head_dim"):
        with pytest.raises(ConfigError, match=f"{name} is '32'"):
            mxfp8(**{**SHAPE, "head_dim": 32, "v_head_dim": 32, name: "32"})

import dataclasses
import gc
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

import pdxfer
from pdxfer import limits
from pdxfer.errors import ConfigError, LayoutMismatchError, RemoteProtocolError, ResourceError
from pdxfer.layout import (
    Group,
    KVLayout,
    Owned,
    Pages,
    Plane,
    PlanSummary,
    Rank,
    RegionSpec,
    combine,
    cover,
    head_major,
    page_major,
    plan,
    token_major,
    unified_entries,
    vllm_blocks,
)
from pdxfer.layout.builders.kv import page_head

SHAPE = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}
PAGE, TOKEN = page_major(**SHAPE), token_major(**SHAPE)


def test_the_package_loads_the_planner_when_asked():
    assert pdxfer.plan is plan
    assert pdxfer.__version__
    with pytest.raises(AttributeError):
        _ = pdxfer.no_such_name


class TestRuns:
    def test_equal_envelopes_are_one_run_a_page(self):
        made = plan(PAGE, PAGE)
        runs = made.runs([3, 5], [7, 2])
        assert runs.tolist() == [[0, 3 * 768, 0, 7 * 768, 768], [0, 5 * 768, 0, 2 * 768, 768]]
        assert runs.dtype == np.int64

    def test_neighbouring_envelopes_are_one_run(self):
        assert plan(PAGE, PAGE).runs([3, 4, 5, 7], [1, 2, 3, 4]).tolist() == [
            [0, 3 * 768, 0, 768, 3 * 768],
            [0, 7 * 768, 0, 4 * 768, 768],
        ]

    def test_page_major_to_token_major_is_two_runs_a_page_and_layer(self):
        runs = plan(PAGE, TOKEN).runs([3, 5], [7, 2])
        assert len(runs) == 2 * 2 * 3
        assert (runs[:, 4] == 128).all()

    def test_token_major_pages_that_follow_each_other_merge_over_the_whole_range(self):
        runs = plan(TOKEN, TOKEN).runs([1, 2, 3], [4, 5, 6])
        assert runs.tolist() == [[n, 128, n, 512, 384] for n in (0, 3, 1, 4, 2, 5)]

    def test_other_page_sizes_merge_where_both_sides_touch(self):
        small = token_major(**{**SHAPE, "page_size": 2, "pages": 20})
        runs = plan(TOKEN, small).runs([3, 5], [2, 3, 8, 9], layers=[0])
        assert runs.tolist() == [
            [0, 3 * 128, 0, 2 * 64, 128],
            [3, 3 * 128, 3, 2 * 64, 128],
            [0, 5 * 128, 0, 8 * 64, 128],
            [3, 5 * 128, 3, 8 * 64, 128],
        ]

    def test_a_part_of_the_heads_is_cut_at_every_row(self):
        half = token_major(**{**SHAPE, "kv_heads": 1}, total_kv_heads=2, head_first=1)
        runs = plan(TOKEN, half).runs([3], [5], layers=[1])
        assert runs[:4].tolist() == [[1, 384 + 32 * r + 16, 1, 320 + 16 * r, 16] for r in range(4)]

    def test_start_is_exact_and_end_rounded_up_in_equal_pages(self):
        runs = plan(TOKEN, TOKEN).runs([3, 5], [6, 2], (1, 5), layers=[0])
        assert [0, 416, 0, 800, 96] in runs.tolist()
        assert [3, 416, 3, 800, 96] in runs.tolist()
        assert runs[:, 4].sum() == 2 * (3 + 4) * 32

    def test_end_is_exact_in_pages_of_other_sizes(self):
        small = token_major(**{**SHAPE, "page_size": 2, "pages": 20})
        runs = plan(TOKEN, small).runs([3, 5], [6, 2, 9], (0, 5), layers=[0])
        assert runs[:, 4].sum() == 2 * 5 * 32

    def test_end_is_exact_where_pages_are_shifted(self):
        runs = plan(TOKEN, TOKEN).runs(Pages([3, 5], 0), Pages([6, 2], 2), (2, 5), layers=[0])
        assert runs[:, 4].sum() == 2 * 3 * 32

    def test_lists_may_begin_at_other_tokens(self):
        made = plan(PAGE, PAGE)
        assert made.runs(Pages([3, 4, 5]), Pages([7], 8), (8, 12)).tolist() == [
            [0, 5 * 768, 0, 7 * 768, 768]
        ]

    def test_layers_of_the_request(self):
        runs = plan(PAGE, TOKEN).runs([3], [5], layers=[2, 0])
        assert runs[:, 2].tolist() == [0, 3, 2, 5]
        with pytest.raises(ConfigError, match=r"layers name \[3\]"):
            plan(PAGE, TOKEN).runs([3], [5], layers=[3])
        with pytest.raises(ConfigError, match="nothing"):
            plan(PAGE, TOKEN).runs([3], [5], layers=[])

    def test_ids_and_ranges_are_checked_on_both_sides(self):
        made = plan(PAGE, dataclasses.replace(PAGE, groups=(Group("full", 4, 8, 3),)))
        for source, destination, named in [
            ([9], [3], "source page id 9"),
            ([0], [3], "source page id 0"),
            ([1], [2], "destination page id 2"),
            ([1], [8], "destination page id 8"),
            ([1], [1 << 40], "destination page id"),
            ([1, 2], [4, 4], "page id 4 at position 1 appeared before"),
        ]:
            with pytest.raises(ConfigError, match=named):
                made.runs(source, destination)

    def test_an_id_beyond_the_range_is_checked_too(self):
        with pytest.raises(ConfigError, match="position 1"):
            plan(PAGE, PAGE).runs([1, 100], [1], (0, 4))

    def test_lists_that_do_not_reach(self):
        made = plan(PAGE, PAGE)
        for source, destination, span, named in [
            ([1], [1, 2], (0, 5), "source pages of group full: 1 pages of 4 tokens"),
            ([1, 2], [1], (0, 5), "destination pages of group full: 1 pages"),
            (Pages([1], 4), [1, 2], (0, 8), "begin at token 4, the range at token 0"),
            ([1], [1, 2], None, "give token_range"),
            ([1], [1], (3, 1), "token range"),
            ([1], [1], (-1, 1), "token range"),
            ([1], [1], (0, 1 << 62), "token range"),
            ([1], [1], (0, (1 << 62) - 1), "do not reach"),
        ]:
            with pytest.raises(ConfigError, match=named):
                made.runs(source, destination, span)

    def test_an_empty_range_is_no_run(self):
        assert plan(PAGE, PAGE).runs([1], [1], (2, 2)).shape == (0, 5)
        assert plan(PAGE, PAGE).runs([], []).shape == (0, 5)


class TestBatches:
    def test_refused_arguments_keep_no_reference_to_the_page_ids(self):
        made = plan(PAGE, TOKEN)
        ids = np.array([3, 5], dtype=np.int64)
        held = sys.getrefcount(ids)
        for ranges, destination, text in (
            ({"full": (0, 8)}, {}, "are missing"),
            ({"full": (0, 8)}, {"full": SimpleNamespace(ids=[1.0], first_token=0)}, "no array"),
            ({"full": (0, 8), "none": (0, 8)}, {"full": Pages(ids)}, "the plan lacks"),
            ({"full": (0, 1 << 80)}, {"full": Pages(ids)}, "64 bits"),
            ({"full": (0, 8)}, {"full": SimpleNamespace(ids=ids, first_token="")}, "64 bits"),
        ):
            with pytest.raises(ValueError, match=text):
                made._core.batches(ranges, {"full": Pages(ids)}, destination, None, 1024, 1024)
        del destination
        gc.collect()
        assert sys.getrefcount(ids) == held

    def batches(self, made, pages, *arguments, **more):
        size = made.source.groups[0].page_size
        lists = {"full": Pages(pages)}
        return made.batches(lists, lists, {"full": (0, len(pages) * size)}, *arguments, **more)

    def test_one_batch_a_layer_where_runs_belong_to_one(self):
        got = self.batches(plan(PAGE, TOKEN), [3, 5, 7])
        assert got.splits.tolist() == [0, 6, 12, 18]
        assert [set(got.runs[a:b, 2] % 3) for a, b in [(0, 6), (6, 12), (12, 18)]] == [
            {0},
            {1},
            {2},
        ]
        assert got.length_bytes == 3 * 768

    def test_envelopes_are_batched_by_bytes(self):
        got = self.batches(plan(PAGE, PAGE), [1, 3, 5, 7], batch_bytes=1000)
        assert got.splits.tolist() == [0, 2, 4]
        got = self.batches(plan(PAGE, PAGE), [1, 3, 5, 7])
        assert got.splits.tolist() == [0, 4]

    def test_merged_runs_stay_within_a_batch(self):
        got = self.batches(plan(PAGE, PAGE), [1, 2, 3, 4, 5], batch_bytes=2 * 768)
        assert got.runs[:, 4].tolist() == [2 * 768, 2 * 768, 768]
        assert got.splits.tolist() == [0, 1, 2, 3]
        got = self.batches(plan(TOKEN, TOKEN), [1, 2, 3], [0], batch_bytes=256)
        assert sorted(got.runs[:, 4].tolist()) == [128, 128, 256, 256]
        assert got.splits.tolist() == [0, 4]

    def test_a_run_never_grows_into_the_next_batch(self):
        got = self.batches(plan(PAGE, PAGE), [1, 3, 4, 6], batch_bytes=2 * 768)
        assert got.runs[:, 1].tolist() == [768, 3 * 768, 4 * 768, 6 * 768]
        assert got.splits.tolist() == [0, 2, 4]

    def test_nothing_to_do_is_no_batch(self):
        got = self.batches(plan(PAGE, PAGE), [])
        assert got.splits.tolist() == [0]
        assert got.length_bytes == 0

    def test_groups_have_their_own_ranges(self):
        window = page_major(**{**SHAPE, "layers": [5], "page_size": 2}, group="swa")
        layout = combine(PAGE, window)
        made = plan(layout, layout)
        source = {"full": Pages([1, 2]), "swa": Pages([3], 6)}
        destination = {"full": Pages([4, 5]), "swa": Pages([6], 6)}
        ranges = {"full": (0, 8), "swa": (6, 8)}
        got = made.batches(source, destination, ranges)
        assert got.runs.tolist() == [[0, 768, 0, 4 * 768, 1536], [1, 3 * 128, 1, 6 * 128, 128]]
        assert got.length_bytes == made.length_bytes(ranges) == 1536 + 128
        assert made.batches(source, destination, {"swa": (6, 8)}).length_bytes == 128
        with pytest.raises(ConfigError, match="destination pages of group swa are missing"):
            made.batches(source, {"full": Pages([4, 5])}, ranges)
        with pytest.raises(ConfigError, match="no group 'other'"):
            made.batches(source, destination, {"other": (0, 1)})

    def test_any_mapping_and_any_pair_of_ints_will_do(self):
        made = plan(PAGE, PAGE)
        pages = MappingProxyType({"full": Pages([1, 2])})
        wanted = made.batches(dict(pages), dict(pages), {"full": (0, 8)}).runs.tolist()
        for span in ([0, 8], (np.int64(0), np.int32(8)), np.array([0, 8])):
            for ranges in ({"full": span}, MappingProxyType({"full": span})):
                assert made.batches(pages, pages, ranges).runs.tolist() == wanted

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"source": {}}, "source pages of group full are missing"),
            ({"destination": {"swa": Pages([1])}}, "destination pages of group full are missing"),
            ({"ranges": {"full": (0, 1 << 70)}}, "token range of group full"),
            ({"ranges": {"full": (-(1 << 70), 1)}}, "token range of group full"),
            ({"ranges": {"full": (3, 2)}}, "token range of group full"),
            ({"ranges": {"full": (0, 3.5)}}, "two integers are needed"),
            ({"ranges": {"full": (0, 1, 2)}}, "two integers are needed"),
            ({"ranges": {"full": 4}}, "two integers are needed"),
            ({"ranges": {"ful": (0, 1)}}, "no group 'ful'; the layouts have full"),
            ({"source": {"full": Pages([1], 1 << 61)}}, "begin at token 2305843009213693952"),
        ],
    )
    def test_what_is_wrong_is_named(self, change, named):
        pages = {"full": Pages([1])}
        given = {"source": pages, "destination": pages, "ranges": {"full": (0, 4)}, **change}
        with pytest.raises(ConfigError, match=named):
            plan(PAGE, PAGE).batches(given["source"], given["destination"], given["ranges"])

    def test_ids_of_a_range_that_moves_nothing_are_checked(self):
        lists = {"full": Pages([1])}, {"full": Pages([100])}
        with pytest.raises(ConfigError, match="destination page id 100") as raised:
            plan(PAGE, PAGE).batches(*lists, {"full": (0, 0)})
        assert raised.value.fields == {"page_id": "100", "position": "0", "group": "full"}

    def test_groups_that_the_pair_does_not_owe_are_left_out(self):
        both = combine(PAGE, page_major(**{**SHAPE, "layers": [5]}, group="swa"))
        made = plan(both, PAGE, owned=cover([(Rank(), PAGE)], (Rank(), PAGE))[0])
        lists = {"full": Pages([1]), "swa": Pages([2])}
        ranges = {"full": (0, 4), "swa": (0, 4)}
        assert made.batches(lists, lists, ranges).length_bytes == 768

    def test_batch_bytes_must_be_positive(self):
        with pytest.raises(ConfigError, match="batch_bytes"):
            self.batches(plan(PAGE, PAGE), [1], batch_bytes=0)


class TestStateAndTiles:
    def state(self, pages, rows_first=False):
        """Slots of 3 rows of 4 heads; the other order keeps heads outside."""
        row, head = (8, 24) if rows_first else (32, 8)
        group = Group("state", 1, pages, 1, kind="state")
        planes = tuple(
            Plane(
                "state",
                "conv.0",
                layer,
                0,
                layer * 96,
                192,
                row,
                head,
                0,
                4,
                4,
                8,
                3,
                "bfloat16",
                "whole",
            )
            for layer in range(2)
        )
        return KVLayout((group,), planes, (RegionSpec(pages * 192, 192),), "bfloat16")

    def test_states_pair_by_position_and_move_whole(self):
        made = plan(self.state(5), self.state(7))
        assert made.runs([3, 1], [6, 2]).tolist() == [[0, 576, 0, 1152, 192], [0, 192, 0, 384, 192]]
        assert made.length_bytes({"state": (0, 2)}) == 384

    def test_states_of_another_order_move_unit_by_unit(self):
        made = plan(self.state(5), self.state(7, rows_first=True))
        runs = made.runs([3], [6])
        # The last unit of layer 0 and the first of layer 1 touch on both sides.
        assert len(runs) == 2 * 3 * 4 - 1
        source = np.arange(5 * 192) % 251
        destination = np.full(7 * 192, 255)
        for _, a, _, b, n in runs.tolist():
            destination[b : b + n] = source[a : a + n]
        for layer in range(2):
            for row in range(3):
                for head in range(4):
                    a = made.source.locate("conv.0", layer, 3, head, row=row)[1]
                    b = made.destination.locate("conv.0", layer, 6, head, row=row)[1]
                    assert (destination[b : b + 8] == source[a : a + 8]).all()

    def tiled(self, pages):
        planes = (
            Plane("full", "k", 0, 0, 0, 96, 0, 32, 0, 2, 2, 32, 1, "uint8", "tile", "vnni"),
            Plane("full", "v", 0, 0, 64, 96, 8, 4, 0, 2, 2, 4, 4, "uint8"),
        )
        return KVLayout((Group("full", 4, pages),), planes, (RegionSpec(pages * 96, 96),), "uint8")

    def test_tiles_move_whole_beside_token_rows(self):
        made = plan(self.tiled(5), self.tiled(7))
        assert made.runs([3], [6]).tolist() == [[0, 288, 0, 576, 96]]
        assert made.runs([3], [6], (0, 2))[:, 4].sum() == 96
        assert made.length_bytes({"full": (0, 2)}) == 96

    def test_a_tile_is_never_cut(self):
        with pytest.raises(ConfigError, match="only move whole"):
            plan(self.tiled(5), self.tiled(7)).runs([3], [6], (1, 4))


class TestBounds:
    """Sizes at which 32 or 64 bits end."""

    def huge(self, pages, build=page_major, **changes):
        return build(**{**SHAPE, "pages": pages, **changes})

    def test_offsets_beyond_32_bits(self):
        made = plan(self.huge(1 << 50), self.huge(1 << 50))
        page = (1 << 50) - 1
        assert made.runs([page], [page - 7]).tolist() == [[0, page * 768, 0, (page - 7) * 768, 768]]

    @pytest.mark.parametrize(
        "build", [token_major, head_major, page_major, unified_entries, vllm_blocks, page_head]
    )
    def test_page_ids_beyond_31_bits(self, build):
        """Ids, offsets and bases of every order against sums that Python cannot wrap."""
        layouts = [self.huge(pages, build, page_size=2) for pages in ((1 << 33) + 9, (1 << 35) + 1)]
        made = plan(*layouts)
        pages = (1 << 33) + 5, (1 << 35) - 2
        runs = made.runs([pages[0]], [pages[1]])
        cells = {}
        for (_, part, layer), head, row in itertools.product(
            layouts[0].planes_by_key, range(2), range(2)
        ):
            a, b = (
                layout.locate(part, layer, page * 2 + row, head)
                for layout, page in zip(layouts, pages, strict=True)
            )
            cells[a] = b
        moved = {}
        for from_region, from_offset, to_region, to_offset, length in runs.tolist():
            for step in range(0, length, 16):
                moved[from_region, from_offset + step] = (to_region, to_offset + step)
        assert moved == cells
        for bad in ((1 << 33) + 9, 1 << 62, -(1 << 40)):
            with pytest.raises(ConfigError, match=f"source page id {bad} "):
                made.runs([bad], [1])

    def test_first_bad_id_of_unsigned_lists(self):
        with pytest.raises(ConfigError, match="over 63 bits"):
            plan(PAGE, PAGE).runs(np.array([1 << 63], np.uint64), [1])

    def test_lengths_beyond_31_bits(self):
        wide = self.huge(9, head_dim=1 << 28)
        made = plan(wide, wide)
        page = 768 << 25
        assert made.runs([1, 2], [3, 4]).tolist() == [[0, page, 0, 3 * page, 2 * page]]
        assert plan(wide, wide).summary().longest_run_bytes == page

    def test_pools_beyond_63_bits_are_refused(self):
        with pytest.raises(ConfigError, match=r"2\*\*63"):
            self.huge(1 << 60)
        with pytest.raises(ConfigError):
            self.huge(1 << 70)

    def test_first_tokens_near_the_end_of_64_bits(self):
        made = plan(PAGE, PAGE)
        first = (1 << 62) - 8
        near = Pages([1, 2], first)
        assert len(made.runs(near, near, (first, first + 5))) == 1

    def test_a_page_in_too_many_pieces_is_refused(self):
        wide = {**SHAPE, "page_size": 1 << 12, "kv_heads": 1 << 8, "pages": 2, "layers": [0]}
        made = plan(token_major(**wide), head_major(**wide))
        with pytest.raises(ResourceError, match="one page is cut"):
            made.runs([1], [1])
        assert limits.RUNS_PER_PAGE_MAX < 2 * (1 << 20)
        with pytest.raises(ResourceError):
            made.summary()

    def test_planes_of_the_destination_that_share_bytes_are_refused(self):
        k, *others = PAGE.planes
        shared = dataclasses.replace(PAGE, planes=(k, dataclasses.replace(others[0], base=64)))
        with pytest.raises(LayoutMismatchError):
            plan(PAGE, shared)
        source = dataclasses.replace(PAGE, planes=PAGE.planes[:2])
        with pytest.raises(ConfigError, match="share byte"):
            plan(source, shared).runs([1], [1])


class TestDigest:
    def test_equal_on_both_sides(self):
        there = plan(KVLayout.from_wire(PAGE.to_wire()), KVLayout.from_wire(TOKEN.to_wire()))
        assert there.digest == plan(PAGE, TOKEN).digest
        assert len(there.digest) == 32

    def test_everything_that_decides_runs_enters(self):
        made = [
            plan(PAGE, TOKEN),
            plan(TOKEN, PAGE),
            plan(PAGE, page_major(**{**SHAPE, "pages": 10})),
            plan(PAGE, unified_entries(**SHAPE)),
            plan(PAGE, PAGE),
            plan(PAGE, PAGE, ignore_parts=("v",)),
            plan(PAGE, PAGE, owned=Owned()),
        ]
        assert len({each.digest for each in made}) == len(made)

    def test_the_model_does_not_enter(self):
        assert plan(PAGE.with_model("m@1"), TOKEN).digest == plan(PAGE, TOKEN).digest


class TestSummary:
    def test_figures_of_a_page(self):
        whole, cut = plan(PAGE, PAGE).summary(), plan(PAGE, TOKEN).summary()
        assert (whole.runs_per_page, whole.bytes_per_page) == (1, 768)
        assert (whole.longest_run_bytes, whole.shortest_run_bytes) == (768, 768)
        assert (cut.runs_per_page, cut.bytes_per_page) == (6, 768)
        assert (cut.longest_run_bytes, cut.shortest_run_bytes) == (128, 128)

    def test_other_page_sizes_are_per_destination_page(self):
        small = token_major(**{**SHAPE, "page_size": 2, "pages": 20})
        assert plan(TOKEN, small).summary().runs_per_page == 6
        assert plan(small, TOKEN).summary().runs_per_page == 12
        assert plan(small, TOKEN).summary().bytes_per_page == 768

    def test_lane_hints(self):
        def hint(head_dim):
            return plan(*[token_major(**{**SHAPE, "head_dim": head_dim})] * 2).summary().lane_hint

        assert "near their limit" in hint(1 << 10)
        assert "pay for every write" in hint(1 << 8)
        assert "count of writes" in hint(8)
        for width in (1 << 10, 1 << 8, 8):
            assert "cma and tcp" in hint(width)
            for lane in ("rdma", "stream", "mapped", "cuda_ipc"):
                assert lane not in hint(width)

    def test_a_pair_that_owes_nothing(self):
        summary = plan(PAGE, PAGE, owned=Owned()).summary()
        assert summary.groups == ()
        assert summary.runs_per_page == summary.longest_run_bytes == summary.shortest_run_bytes == 0
        assert summary.lane_hint == "nothing to move"

    def test_wire_form_is_inverse(self):
        for made in (plan(PAGE, TOKEN), plan(PAGE, PAGE, owned=Owned())):
            summary = made.summary()
            assert PlanSummary.from_wire(summary.to_wire()) == summary

    @pytest.mark.parametrize(
        "change",
        [
            {"groups": 1},
            {"lane_hint": 3},
            {"groups": [[1]]},
            {"groups": [["g", 1, 1, "x", 1, 1, 1]]},
        ],
    )
    def test_what_is_no_summary(self, change):
        with pytest.raises(RemoteProtocolError):
            PlanSummary.from_wire({**plan(PAGE, TOKEN).summary().to_wire(), **change})
        with pytest.raises(RemoteProtocolError):
            PlanSummary.from_wire(None)


def test_threads_share_a_plan():
    shape = {**SHAPE, "pages": 200, "page_size": 16}
    made = plan(page_major(**shape), token_major(**{**shape, "page_size": 8, "pages": 400}))
    source, destination = np.arange(1, 101), np.arange(201, 1, -1)[:200]
    spans = [(first, first + 77) for first in range(0, 1400, 13)]
    alone = [plan(made.source, made.destination).runs(source, destination, span) for span in spans]

    def work(_):
        return [made.runs(source, destination, span) for span in spans]

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(work, range(4)):
            for runs, wanted in zip(got, alone, strict=True):
                np.testing.assert_array_equal(runs, wanted)

"""Prefill context parallel: ranks share a request's pages; decode context parallel is refused."""

import itertools

import pytest

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import (
    Group,
    KVLayout,
    Owned,
    PageShare,
    Plane,
    Rank,
    RegionSpec,
    combine,
    cover,
    page_major,
    plan,
    token_major,
)

SHAPE = {"layers": range(2), "head_dim": 8, "page_size": 4, "pages": 40, "dtype": "bfloat16"}


def instance(cp_size, tp_size=1, stages=((0, 1),), build=token_major, heads=2, **changes):
    workers = []
    for (pp, layers), cp, tp in itertools.product(
        enumerate(stages), range(cp_size), range(tp_size)
    ):
        layout = build(
            **{**SHAPE, **changes, "layers": layers},
            kv_heads=heads // tp_size,
            head_first=tp * heads // tp_size,
            total_kv_heads=heads,
        )
        rank = Rank(tp=tp, tp_size=tp_size, pp=pp, pp_size=len(stages), cp=cp, cp_size=cp_size)
        workers.append((rank, layout))
    return workers


def plans(source, destination):
    owned = cover(source, destination)
    return [
        plan(layout, destination[1], owned=part)
        for (_, layout), part in zip(source, owned, strict=True)
    ]


class TestShares:
    def test_balanced_with_the_first_ones_longer(self):
        assert [PageShare(n, 4).pages(10) for n in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
        assert [PageShare(n, 3).pages(2) for n in range(3)] == [(0, 1), (1, 2), (2, 2)]
        assert PageShare().pages(7) == (0, 7)

    @pytest.mark.parametrize("parts", [1, 2, 3, 8])
    def test_every_page_once(self, parts):
        for count in range(40):
            ends = [PageShare(part, parts).pages(count) for part in range(parts)]
            assert ends[0][0] == 0
            assert ends[-1][1] == count
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
            assert {b - a for a, b in ends} <= {count // parts, count // parts + 1}

    @pytest.mark.parametrize(("part", "parts"), [(1, 1), (-1, 2), (2, 2), (0, 0)])
    def test_no_such_share(self, part, parts):
        with pytest.raises(ConfigError, match="share"):
            PageShare(part, parts)


class TestCover:
    def test_every_rank_owes_all_cells_of_its_pages(self):
        owned = cover(instance(3), instance(1)[0])
        assert [part.share for part in owned] == [PageShare(n, 3) for n in range(3)]
        assert len({part.cells for part in owned}) == 1

    def test_with_tp_and_stages(self):
        source = instance(2, tp_size=2, stages=((0,), (1,)))
        owned = cover(source, instance(1, tp_size=2)[1])
        by_rank = {
            (rank.pp, rank.cp, rank.tp): part for (rank, _), part in zip(source, owned, strict=True)
        }
        for (pp, cp, tp), part in by_rank.items():
            assert part.empty is (tp == 0)
            if tp == 1:
                assert {c.layer for c in part.cells} == {pp}
                assert part.share == PageShare(cp, 2)
            else:
                assert part == Owned()

    def test_replicas_take_turns_as_whole_teams(self):
        source = [
            (Rank(tp=tp, tp_size=2, cp=cp, cp_size=2), instance(1)[0][1])
            for cp in range(2)
            for tp in range(2)
        ]
        for receiver, owners in [(0, {0}), (1, {1}), (2, {0})]:
            owned = cover(source, (Rank(tp=receiver, tp_size=4), instance(1)[0][1]))
            given = {rank.tp for (rank, _), part in zip(source, owned, strict=True) if part.cells}
            assert given == owners

    def test_ranks_that_hold_other_layers_are_refused_by_name(self):
        source = instance(2)
        source[1] = (source[1][0], token_major(**{**SHAPE, "layers": [0]}, kv_heads=2))
        with pytest.raises(LayoutMismatchError) as raised:
            cover(source, instance(1)[0])
        assert "only cp ranks [0] hold (group full, part k, layer 1" in str(raised.value)
        assert raised.value.fields["cp_size"].startswith("prefill=2")

    def test_decode_context_parallel_is_refused_by_name(self):
        with pytest.raises(LayoutMismatchError) as raised:
            cover(instance(1), instance(2)[0])
        assert str(raised.value).startswith("Decode cp size (2) should be equal to 1")
        assert raised.value.fields == {"cp_size": "prefill=1, decode=2"}


class TestRanges:
    @pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("decode_page", [1, 2, 4, 8])
    @pytest.mark.parametrize(("prefix", "tokens"), [(0, 1), (0, 37), (8, 37), (16, 17), (24, 64)])
    def test_shares_are_the_range_once(self, cp_size, decode_page, prefix, tokens):
        destination = instance(1, page_size=decode_page, pages=200)[0]
        made = plans(instance(cp_size), destination)
        whole = plan(instance(1)[0][1], destination[1])
        ranges = {"full": (prefix, tokens)}
        shares = [each.share(ranges, tokens)["full"] for each in made]
        moved = [token for first, end in shares for token in range(first, end)]
        assert moved == list(range(prefix, tokens))
        lengths = [
            each.length_bytes({"full": share}) for each, share in zip(made, shares, strict=True)
        ]
        assert sum(lengths) == whole.length_bytes(ranges)

    def test_a_share_is_of_the_source_pages_of_the_whole_request(self):
        made = plans(instance(2), instance(1, page_size=2, pages=99)[0])
        # 10 pages of 4 tokens: 5 each, whatever decode has already
        assert [each.share({"full": (0, 38)}, 38)["full"] for each in made] == [(0, 20), (20, 38)]
        assert [each.share({"full": (24, 38)}, 38)["full"] for each in made] == [(24, 24), (24, 38)]

    def test_a_rank_may_hold_its_own_pages_only(self):
        from pdxfer.layout import Pages

        made = plans(instance(2), instance(1)[0])
        first, end = made[1].share({"full": (0, 30)}, 30)["full"]
        assert (first, end) == (16, 30)
        runs = made[1].runs(Pages([5, 6, 7, 8], 16), Pages(range(1, 9)), (first, end))
        assert runs[:, 4].sum() == 2 * 2 * 2 * 16 * 16
        assert {run[3] // 128 for run in runs.tolist()} == {5}

    def test_window_groups_are_cut_at_the_same_pages(self):
        def layout():
            return combine(
                token_major(**{**SHAPE, "layers": [0]}, kv_heads=1),
                token_major(**{**SHAPE, "layers": [1]}, kv_heads=1, group="swa"),
            )

        source = [(Rank(cp=cp, cp_size=2), layout()) for cp in range(2)]
        made = plans(source, (Rank(), layout()))
        ranges = {"full": (0, 40), "swa": (16, 40)}
        first = {"swa": 16}
        assert [each.share(ranges, 40, first) for each in made] == [
            {"full": (0, 20), "swa": (16, 20)},
            {"full": (20, 40), "swa": (20, 40)},
        ]
        with pytest.raises(ConfigError, match="begin at token 17, inside a page of 4"):
            made[0].share(ranges, 40, {"swa": 17})

    def test_states_are_shared_by_position(self):
        def layout():
            plane = Plane("state", "conv.0", 0, 0, 0, 8, 0, 8, 0, 1, 1, 8, 1, "uint8", "whole")
            return KVLayout(
                (Group("state", 1, 9, kind="state"),), (plane,), (RegionSpec(72, 8),), "uint8"
            )

        source = [(Rank(cp=cp, cp_size=2), layout()) for cp in range(2)]
        made = plans(source, (Rank(), layout()))
        assert [each.share({"state": (0, 1)}, 500)["state"] for each in made] == [(0, 1), (1, 1)]
        assert [each.share({"state": (0, 3)}, 500)["state"] for each in made] == [(0, 2), (2, 3)]

    def test_nothing_is_cut_without_context_parallel(self):
        made = plan(instance(1)[0][1], instance(1)[0][1])
        assert made.share({"full": (3, 9)}, 9, {"full": 3}) == {"full": (3, 9)}


def test_the_share_enters_the_digest():
    made = plans(instance(2, build=page_major), instance(1, build=page_major)[0])
    assert made[0].digest != made[1].digest

"""Which heads move where, for every pair of attention TP sizes.

The numbers are those that head-sliced transfers between servers of other TP sizes use: source and
first head, by rank. Where several source ranks hold the same heads, exactly one of them sends.
"""

import pytest

from pdxfer.layout import Rank, cover, plan, token_major

TP_SIZES = [1, 2, 4, 8, 16]
SHAPE = {"layers": [3], "head_dim": 4, "page_size": 2, "pages": 3, "dtype": "float16"}


def heads_per_rank(total, tp_size):
    return max(1, total // tp_size)


def first_head(total, tp, tp_size):
    """Global: ranks beyond the heads are replicas of the one before."""
    replicas = max(1, tp_size // total)
    return tp // replicas * heads_per_rank(total, tp_size)


def instance(total, tp_size):
    return [
        (
            Rank(tp=tp, tp_size=tp_size),
            token_major(
                **SHAPE,
                kv_heads=heads_per_rank(total, tp_size),
                head_first=first_head(total, tp, tp_size),
                total_kv_heads=total,
            ),
        )
        for tp in range(tp_size)
    ]


def moves(total, prefill, decode, receiver):
    """(source rank, first head there, first head here, heads) of each source that sends."""
    source, (rank, layout) = instance(total, prefill), instance(total, decode)[receiver]
    found = []
    for (sender, theirs), part in zip(source, cover(source, (rank, layout)), strict=True):
        keys = [cells for cells in part.cells if cells.part == "k"]
        assert len(keys) <= 1
        if keys:
            mine, here = theirs.planes[0], layout.planes[0]
            found.append(
                (
                    sender.tp,
                    keys[0].head_first - mine.head_first,
                    keys[0].head_first - here.head_first,
                    keys[0].head_end - keys[0].head_first,
                )
            )
    return found


class TestKnownVectors:
    def test_four_to_two_of_eight_heads(self):
        # destination start by source rank: 0, 2, 0, 2; two heads each
        assert moves(8, 4, 2, 0) == [(0, 0, 0, 2), (1, 0, 2, 2)]
        assert moves(8, 4, 2, 1) == [(2, 0, 0, 2), (3, 0, 2, 2)]

    def test_two_to_four_of_eight_heads(self):
        # source start by destination rank: 0, 2, 0, 2; two heads each
        found = [moves(8, 2, 4, receiver) for receiver in range(4)]
        assert found == [[(0, 0, 0, 2)], [(0, 2, 0, 2)], [(1, 0, 0, 2)], [(1, 2, 0, 2)]]

    def test_one_to_four_of_two_heads(self):
        # source start by destination rank: 0, 0, 1, 1; one head each
        found = [moves(2, 1, 4, receiver) for receiver in range(4)]
        assert found == [[(0, 0, 0, 1)], [(0, 0, 0, 1)], [(0, 1, 0, 1)], [(0, 1, 0, 1)]]


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", TP_SIZES)
@pytest.mark.parametrize("prefill", TP_SIZES)
def test_by_the_slicing_rule(prefill, decode, total):
    for receiver in range(decode):
        found = moves(total, prefill, decode, receiver)
        here = heads_per_rank(total, decode)
        held = [head for _, _, first, count in found for head in range(first, first + count)]
        assert sorted(held) == list(range(here)), "every head from one source"
        for sender, source_first, destination_first, count in found:
            there = heads_per_rank(total, prefill)
            if prefill > decode:
                replicas = max(1, prefill // total)
                assert source_first == 0
                assert count == there
                assert destination_first == sender // replicas * there % here
            else:
                replicas = max(1, decode // total)
                assert destination_first == 0
                assert count == here
                assert source_first == receiver // replicas * here % there
        if prefill <= decode:
            # one source is enough: the one at that place in the instance, or a replica of it
            (sender,) = (move[0] for move in found)
            usual = receiver // (decode // prefill)
            assert first_head(total, sender, prefill) == first_head(total, usual, prefill)


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", TP_SIZES)
@pytest.mark.parametrize("prefill", TP_SIZES)
def test_every_source_worker_has_a_plan_and_the_bytes_are_those_of_the_destination(
    prefill, decode, total
):
    source = instance(total, prefill)
    for rank, layout in instance(total, decode):
        owned = cover(source, (rank, layout))
        assert len(owned) == prefill
        lengths = [
            plan(theirs, layout, owned=part).length_bytes({"full": (0, 4)})
            for (_, theirs), part in zip(source, owned, strict=True)
        ]
        assert sum(lengths) == 4 * 2 * heads_per_rank(total, decode) * 8
        assert [length > 0 for length in lengths] == [not part.empty for part in owned]

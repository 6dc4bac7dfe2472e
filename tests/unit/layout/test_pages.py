import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import Pages, Rank, as_group_pages, check_page_ids, combine, token_major

SHAPE = {"layers": [0], "kv_heads": 1, "head_dim": 8, "page_size": 4, "dtype": "bfloat16"}
LAYOUT = token_major(**SHAPE, pages=9, reserved_pages=2)
TWO = combine(LAYOUT, token_major(**SHAPE, pages=5, group="swa"))


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_kind(kind):
    pages = Pages(np.array([3, 5], kind), first_token=8)
    assert pages.ids.dtype == np.int64
    assert pages.ids.tolist() == [3, 5]
    assert len(pages) == 2
    assert Pages([]).ids.tolist() == []


def test_ids_are_taken_over_and_kept():
    mine = np.array([3, 5])
    pages = Pages(mine)
    mine[0] = 7
    assert pages.ids.tolist() == [3, 5]
    with pytest.raises(ValueError, match="read-only"):
        pages.ids[0] = 1


@pytest.mark.parametrize(
    "ids",
    [[1.5], ["a"], [[1]], 1.5, [None], [True], [2**64], [2**63], [[1], [1, 2]], [object()]],
)
def test_what_are_no_ids(ids):
    with pytest.raises(ConfigError):
        Pages(np.array(ids, np.uint64) if ids == [2**63] else ids)


@pytest.mark.parametrize("first", [-1, 1 << 63, 1.0, True])
def test_first_token(first):
    with pytest.raises(ConfigError, match="first_token"):
        Pages([1], first)


def test_pages_by_group():
    assert as_group_pages(LAYOUT, [3, 4])["full"].ids.tolist() == [3, 4]
    tail = Pages([3], 8)
    assert as_group_pages(LAYOUT, tail)["full"] is tail
    both = as_group_pages(TWO, {"full": [3], "swa": tail})
    assert both["swa"] is tail
    with pytest.raises(ConfigError, match="2 groups"):
        as_group_pages(TWO, [3])
    with pytest.raises(ConfigError, match="'other'"):
        as_group_pages(TWO, {"other": [3]})


@pytest.mark.parametrize(
    ("ids", "bad", "at"),
    [([2, 8, 9], 9, 2), ([1], 1, 0), ([-1], -1, 0), ([2, 1 << 40], 1 << 40, 1), ([0], 0, 0)],
)
def test_ids_outside_the_pool_are_named(ids, bad, at):
    with pytest.raises(ConfigError) as raised:
        check_page_ids(LAYOUT, "full", Pages(ids).ids)
    assert f"page id {bad} of group full at position {at}" in str(raised.value)
    assert "2 <= id < 9" in str(raised.value)


def test_good_ids_pass():
    check_page_ids(LAYOUT, "full", Pages([2, 8, 2]).ids)
    check_page_ids(LAYOUT, "full", Pages([]).ids)
    with pytest.raises(ConfigError, match="no group"):
        check_page_ids(LAYOUT, "swa", Pages([2]).ids)


@pytest.mark.parametrize("pages", [9, 1 << 40])
def test_repeated_ids(pages):
    layout = token_major(**SHAPE, pages=pages)
    check_page_ids(layout, "full", Pages([5, 3, 4]).ids, unique=True)
    with pytest.raises(ConfigError, match="page id 3 of group full at position 3 appeared before"):
        check_page_ids(layout, "full", Pages([5, 3, 4, 3, 5]).ids, unique=True)


class TestRank:
    def test_index_runs_over_tp_then_cp_then_pp(self):
        sizes = {"tp_size": 2, "pp_size": 3, "cp_size": 4}
        ranks = [
            Rank(tp=tp, pp=pp, cp=cp, **sizes)
            for pp in range(3)
            for cp in range(4)
            for tp in range(2)
        ]
        assert [rank.index for rank in ranks] == list(range(24))
        assert ranks[0].instance_size == 24

    @pytest.mark.parametrize(
        "fields",
        [
            {"tp": 1},
            {"tp": -1},
            {"pp": 2, "pp_size": 2},
            {"tp_size": 0},
            {"tp": True, "tp_size": 2},
            {"cp": 0.0},
            {"tp_size": 100, "pp_size": 100},
        ],
    )
    def test_what_is_no_rank(self, fields):
        with pytest.raises(ConfigError):
            Rank(**fields)


@pytest.mark.parametrize("ids", [3, np.int32(3), np.array(3)])
def test_one_integer_is_the_id_of_one_page(ids):
    assert Pages(ids).ids.tolist() == [3]


@pytest.mark.parametrize("ids", [True, 1.5, np.array(1.5), "3", None])
def test_what_is_no_integer_is_no_page(ids):
    with pytest.raises(ConfigError):
        Pages(ids)


def test_a_masked_array_is_refused_where_its_mask_would_be_lost():
    with pytest.raises(ConfigError, match="masked in part"):
        Pages(np.ma.array([3, 5], mask=[False, True]))
    assert Pages(np.ma.array([3, 5])).ids.tolist() == [3, 5]

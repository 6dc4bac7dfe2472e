"""Rows by slot: parts that are no single tensor, tiles, and how ids are looked at."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.layout import join_parts, k_only, mla, select_parts, token_major, vectorized_5d  # noqa: E402
from pdxfer.pool import HostPool, MXFP8Pool, PageMajorPool, SlotError, TokenPool  # noqa: E402
from pdxfer.pool.rows import last_of_each, slots_of, stored_dtype  # noqa: E402
from tests.support.pools import MX, SHAPE, assert_memory, fill, snapshot  # noqa: E402

ROWS = {
    "layers": [0],
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 8,
    "pages": 4,
    "dtype": "bfloat16",
}


def test_heads_that_lie_apart_are_no_single_tensor(make):
    device = make(PageMajorPool, **SHAPE)
    pool = make(HostPool, device, layout="page_unified", pages=3, head_groups=2)
    assert pool.rows("k", 5).heads == 2
    with pytest.raises(ConfigError, match="part k is no single tensor"):
        _ = pool.rows("k", 5).view


def test_rows_in_tiles_are_no_single_tensor(make):
    pool = make(MXFP8Pool, **{**MX, "size": 32, "page_size": 32, "interleaved": True})
    assert pool.rows("k_scale", 5).width == 1
    with pytest.raises(ConfigError, match="part k_scale is no single tensor"):
        _ = pool.rows("k_scale", 5).view


def test_tiles_of_unknown_rows_move_whole_and_not_by_slot(make):
    pool = make(TokenPool, vectorized_5d(**ROWS))
    with pytest.raises(ConfigError, match="tiles vectorized_5d, whose rows this pool does not"):
        pool.get_cpu_copy(torch.tensor([9]))
    fill(pool)
    expected = snapshot(pool)
    for region in expected:
        pages = region.reshape(4, -1)
        pages[[2, 1]] = pages[[1, 3]]
    pool.move_pages(torch.tensor([2, 1]), torch.tensor([1, 3]))
    assert_memory(pool, expected)


def test_parts_that_are_not_there_or_share_no_row(make):
    pool = make(TokenPool, token_major(**ROWS))
    with pytest.raises(SlotError, match=r"no part \('latent',\) of layer 0 in group full"):
        pool.rows("latent", 0)
    with pytest.raises(ConfigError, match="parts k and v do not share a row"):
        pool.rows(("k", "v"), 0)
    latent = {"layers": [0], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "bfloat16"}
    layout = mla(**latent, page_size=8, pages=4)
    rope = k_only(layers=[0], heads=1, head_dim=8, page_size=8, pages=4, dtype="bfloat16")
    apart = join_parts(
        select_parts(layout, {"latent": "latent"}), select_parts(rope, {"index_k": "rope"})
    )
    with pytest.raises(ConfigError, match="parts latent and rope do not share a row"):
        make(TokenPool, apart).get_cpu_copy(torch.tensor([9]))


def test_ids_of_any_integers_and_lists_are_taken():
    cpu = torch.device("cpu")
    for ids in ([3, 1], torch.tensor([3, 1], dtype=torch.int32), torch.tensor([3, 1]).to("cpu")):
        found = slots_of(ids, "loc", 4, cpu)
        assert found.dtype == torch.int64
        assert found.tolist() == [3, 1]
    assert slots_of([], "loc", 4, cpu).tolist() == []


def test_ids_on_a_device_are_looked_at_only_where_one_may_wait():
    there = torch.zeros(3, dtype=torch.int32, device="meta")
    assert slots_of(there, "loc", 4, torch.device("meta"), wait=False).shape == (3,)


@pytest.mark.parametrize(
    ("ids", "last"), [([], None), ([5], None), ([5, 6], None), ([5, 6, 5, 7, 6], [2, 3, 4])]
)
def test_last_of_repeated_slots(ids, last):
    found = last_of_each(torch.tensor(ids, dtype=torch.int64))
    assert (None if found is None else sorted(found.tolist())) == last


def test_dtypes_as_they_are_stored():
    assert stored_dtype("float8_e5m2") == torch.uint8
    assert stored_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype=nn is none of torch"):
        stored_dtype("nn")

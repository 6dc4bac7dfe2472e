"""Rows by slot: parts that are no single tensor, tiles, and how ids are looked at."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.layout import join_parts, k_only, mla, select_parts, token_major, vectorized_5d  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HostPool,
    MXFP8Pool,
    PageMajorPool,
    ShapeError,
    SlotError,
    TokenMajorPool,
    TokenPool,
)
from pdxfer.pool.rows import INTEGERS, last_of_each, slots_of, stored_dtype  # noqa: E402
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


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str), ids=str)
def test_ids_of_every_integer_type_are_int64_ids(dtype):
    found = slots_of(torch.tensor([3, 1], dtype=dtype), "loc", 4, torch.device("cpu"))
    assert found.dtype == torch.int64
    assert found.tolist() == [3, 1]
    with pytest.raises(SlotError, match="loc has slot 4; the pool has 0 <= slot < 4"):
        slots_of(torch.tensor([4, 1], dtype=dtype), "loc", 4, torch.device("cpu"))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("high", [(1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1])
def test_ids_beyond_63_bits_are_told_as_they_are(high, wait):
    ids = torch.from_numpy(np.array([1, high], np.uint64))
    with pytest.raises(SlotError, match=f"loc has slot {high}; "):
        slots_of(ids, "loc", 4, torch.device("cpu"), wait=wait)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
    ids=str,
)
def test_what_is_no_integer_is_no_id(make, dtype):
    ids = torch.tensor([1, 0]).to(dtype)
    with pytest.raises(ShapeError, match=f"one-dimensional slot ids, got {dtype}"):
        slots_of(ids, "loc", 4, torch.device("cpu"))
    pool = make(TokenMajorPool, **SHAPE)
    fill(pool)
    before = snapshot(pool)
    copied = pool.get_cpu_copy([8, 9])
    rows = torch.zeros(2, 2, 8), torch.zeros(2, 2, 16)
    for call in (
        lambda: pool.set_kv_buffer(5, ids, *rows),
        lambda: pool.load_cpu_copy(copied, ids),
        lambda: pool.move_kv_cache(ids, torch.tensor([8, 9])),
        lambda: pool.move_kv_cache(torch.tensor([8, 9]), ids),
        lambda: pool.move_pages(ids, torch.tensor([2, 3])),
    ):
        with pytest.raises(ShapeError, match="one-dimensional slot ids"):
            call()
    assert_memory(pool, before)


@pytest.mark.parametrize(
    "ids", [[1 << 63], "ab", None, [[1], [2, 3]], {}, [None], np.array(["a"]), np.array([1, None])]
)
def test_what_is_no_tensor_is_no_id(ids):
    with pytest.raises(ShapeError, match="loc must be one-dimensional slot ids"):
        slots_of(ids, "loc", 4, torch.device("cpu"))


def test_ids_below_zero_on_a_device_do_not_count_from_the_end(monkeypatch):
    """Where nobody may wait, they go where the store finds no slot."""

    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

    ids = torch.tensor([1, -1, -(2**63)]).as_subclass(OnDevice)
    monkeypatch.setattr(OnDevice, "to", lambda self, *_, **__: self)
    found = slots_of(ids, "loc", 4, torch.device("cpu"), wait=False)
    assert found.as_subclass(torch.Tensor).tolist() == [1, 4, 4]


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

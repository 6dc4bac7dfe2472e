"""Prefix-valid commit: order and text of its checks, dtypes and scales."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    ShapeError,
    SlotError,
    TokenMajorPool,
    UnifiedPool,
)
from pdxfer.pool.rows import INTEGERS  # noqa: E402
from tests.support.pools import (  # noqa: E402
    FAMILIES,
    FP8,
    MLA,
    MX,
    SHAPE,
    assert_memory,
    fill,
    snapshot,
)

KINDS = [TokenMajorPool, PageMajorPool, UnifiedPool]
LOC = torch.tensor([[4, 5, 6], [12, 13, 14]])


COMMITS = [("kv", "token"), ("kv", "page"), ("kv", "unified"), ("mla", "token_major"),
           ("mxfp8", "flat"), ("sparse", "page"), ("draft", "page")]  # fmt: skip


def block(pool):
    """Rows of `LOC`, as the pool takes them."""
    if isinstance(pool, MLAPool):
        return (torch.ones(6, 24),)
    given = [torch.ones(6, 2, dim).to(pool.dtype) for dim in (pool.head_dim, pool.v_head_dim)]
    if isinstance(pool, MXFP8Pool):
        given += [torch.ones(6, 2, n.shape[2] // 32, dtype=torch.uint8) for n in given]
    return given


def rows(count=6, dim=8, dtype=torch.bfloat16):
    return torch.randn(count, 2, dim).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loc", "lens", "counts", "text"),
    [
        (LOC[0], torch.zeros(9), (1, 1), "loc_2d must be rank-2, got shape=(3,)."),
        (
            LOC,
            torch.tensor([1, 1, 1]),
            (1, 1),
            "commit_lens must match loc_2d batch size: tuple(commit_lens.shape)=(3,) "
            "tuple(loc_2d.shape)=(2, 3).",
        ),
        (
            LOC,
            torch.tensor([[1, 1]]),
            (1, 1),
            "commit_lens must match loc_2d batch size: tuple(commit_lens.shape)=(1, 2) "
            "tuple(loc_2d.shape)=(2, 3).",
        ),
        (
            LOC,
            torch.tensor([1, 1]),
            (6, 5),
            "KV rows must match loc_2d size: tuple(cache_k.shape)=(6, 2, 8) "
            "tuple(cache_v.shape)=(5, 2, 16) tuple(loc_2d.shape)=(2, 3).",
        ),
    ],
    ids=["rank", "batch", "batch rank", "rows"],
)
def test_checks_in_their_order(make, kind, loc, lens, counts, text):
    pool = make(kind, **SHAPE)
    with pytest.raises(ValueError, match="must") as raised:
        pool.set_kv_buffer_prefix_valid(5, loc, lens, rows(counts[0]), rows(counts[1], 16))
    assert str(raised.value) == text
    assert not any(region.any() for region in snapshot(pool))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lens", "changed"),
    [([2, 0], [4, 5]), ([9, -4], [4, 5, 6]), ([3, 1], [4, 5, 6, 12]), ([0, 0], [])],
)
def test_rows_that_are_not_committed_may_have_any_slot(make, kind, lens, changed):
    pool = make(kind, **SHAPE)
    lens = torch.tensor(lens)
    loc = torch.where(torch.arange(3)[None] < lens[:, None], LOC, -(2**50))
    pool.set_kv_buffer_prefix_valid(6, loc, lens.to(torch.int32), rows(), rows(dim=16))
    for layer in (5, 6, 7):
        keys = pool.get_key_buffer(layer).reshape(28, -1)
        written = keys.any(dim=1).nonzero().flatten().tolist()
        assert written == (changed if layer == 6 else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_are_no_work(make, kind, shape):
    pool = make(kind, **SHAPE)
    fill(pool)
    before = snapshot(pool)
    loc, lens = torch.zeros(shape, dtype=torch.int32), torch.ones(shape[0], dtype=torch.int32)
    pool.set_kv_buffer_prefix_valid(5, loc, lens, rows(0), rows(0, 16))
    assert_memory(pool, before)


@pytest.mark.parametrize("kind", KINDS)
def test_other_widths_of_rows_are_refused_even_if_nothing_is_committed(make, kind):
    pool = make(kind, **SHAPE)
    with pytest.raises(ShapeError, match=r"cache_v has shape \(0, 2, 8\), needs \(0, 2, 16\)"):
        pool.set_kv_buffer_prefix_valid(5, LOC, torch.zeros(2, dtype=torch.int64), rows(), rows())


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0), torch.tensor([2.0])])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rows_are_scaled_and_the_callers_tensors_stay(make, kind, scale):
    pool = make(kind, **{**SHAPE, **FP8})
    keys, values = rows(dim=16) * 4, rows(dim=16)
    keys[0] = 3000.0
    given = keys.clone(), values.clone()
    pool.set_kv_buffer_prefix_valid(
        5, LOC, torch.tensor([1, 2]), keys, values, k_scale=scale, v_scale=None
    )
    assert torch.equal(keys, given[0])
    assert torch.equal(values, given[1])
    stored = pool.get_key_buffer(5).reshape(28, 2, 16)
    assert stored.dtype == torch.float8_e4m3fn
    assert stored[4].float().unique().tolist() == [448.0]  # saturated, not NaN
    wanted = (keys / 2).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored[[12, 13]].float(), wanted[[3, 4]])
    unscaled = pool.get_value_buffer(5).reshape(28, 2, 16)[[4, 12, 13]].float()
    assert torch.equal(unscaled, values[[0, 3, 4]].to(torch.float8_e4m3fn).float())


def test_scales_do_not_touch_rows_that_were_scaled_already(make):
    pool = make(PageMajorPool, **{**SHAPE, **FP8})
    keys = rows(dim=16).to(torch.float8_e4m3fn)
    pool.set_kv_buffer_prefix_valid(5, LOC, torch.tensor([3, 3]), keys, keys, 2.0, 2.0)
    stored = pool.get_key_buffer(5).reshape(28, 2, 16)[LOC.reshape(-1)]
    assert torch.equal(stored.view(torch.uint8), keys.view(torch.uint8))


def test_a_scale_a_token_is_refused_where_one_is_for_all(make):
    pool = make(TokenMajorPool, **{**SHAPE, **FP8})
    with pytest.raises(ShapeError, match="scale has 6 values"):
        pool.set_kv_buffer_prefix_valid(
            5, LOC, torch.tensor([3, 3]), rows(dim=16), rows(dim=16), k_scale=torch.ones(6)
        )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float32, torch.float8_e5m2, torch.complex64], ids=str
)
@pytest.mark.parametrize(("family", "name"), COMMITS)
def test_slots_and_lengths_are_integers(make, family, name, dtype):
    pool = make(FAMILIES[family][name])
    fill(pool)
    before = snapshot(pool)
    lens, given = torch.tensor([1, 1]), block(pool)
    with pytest.raises(ShapeError, match=f"loc_2d must hold integers, got {dtype}"):
        pool.set_kv_buffer_prefix_valid(pool.start_layer, LOC.to(dtype), lens, *given)
    with pytest.raises(ShapeError, match=f"commit_lens must hold integers, got {dtype}"):
        pool.set_kv_buffer_prefix_valid(pool.start_layer, LOC, lens.to(dtype), *given)
    assert_memory(pool, before)


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str), ids=str)
@pytest.mark.parametrize(("family", "name"), COMMITS)
def test_slots_and_lengths_of_every_integer_type(make, family, name, dtype):
    pool, other = make(FAMILIES[family][name]), make(FAMILIES[family][name])
    lens, given, layer = torch.tensor([2, 9]), block(pool), pool.start_layer
    pool.set_kv_buffer_prefix_valid(layer, LOC, lens, *given)
    other.set_kv_buffer_prefix_valid(layer, LOC.to(dtype), lens.to(dtype), *given)
    assert_memory(other, snapshot(pool))
    assert any(region.any() for region in snapshot(pool))


def test_unsigned_numbers_beyond_63_bits(make):
    """A length is over any T, a committed slot is refused, one that is not committed may be it."""
    pool = make(TokenMajorPool, **SHAPE)
    keys, values = block(pool)
    huge = (1 << 63) + 4
    lens = torch.from_numpy(np.array([huge, 0], np.uint64))
    loc = torch.from_numpy(np.array([[4, 5, 6], [huge, 7, 8]], np.uint64))
    pool.set_kv_buffer_prefix_valid(6, loc, lens, keys, values)
    written = pool.get_key_buffer(6).flatten(1).any(dim=1).nonzero().flatten()
    assert written.tolist() == [4, 5, 6]
    before = snapshot(pool)
    with pytest.raises(SlotError, match=f"loc has slot {huge}"):
        pool.set_kv_buffer_prefix_valid(5, loc, torch.tensor([0, 1]), keys, values)
    assert_memory(pool, before)


def test_layers_by_object_and_by_override(make):
    class Attention:
        layer_id = 5

    pool = make(UnifiedPool, **SHAPE)
    lens = torch.tensor([1, 0])
    pool.set_kv_buffer_prefix_valid(
        Attention(), LOC, lens, rows(), rows(dim=16), layer_id_override=7
    )
    assert [bool(buffer.any()) for buffer in pool.k_buffer] == [False, False, True]
    pool.set_kv_buffer_prefix_valid(Attention(), LOC, lens, rows(), rows(dim=16))
    assert [bool(buffer.any()) for buffer in pool.k_buffer] == [True, False, True]


def test_latent_rows(make):
    pool = make(MLAPool, **{**MLA, "arrangement": "unified_entries"})
    whole = torch.randn(6, 24).to(torch.bfloat16)
    pool.set_kv_buffer_prefix_valid(1, LOC, torch.tensor([1, 2]), whole)
    stored = pool.get_key_buffer(1)[:, 0]
    assert torch.equal(stored[[4, 12, 13]], whole[[0, 3, 4]])
    assert int(stored.any(dim=1).sum()) == 3
    with pytest.raises(ValueError, match="KV rows must match"):
        pool.set_kv_buffer_prefix_valid(1, LOC, torch.tensor([1, 2]), whole, whole[:1])


class TestMxfp8:
    @pytest.mark.parametrize("options", [{}, {"size": 64, "page_size": 32, "interleaved": True}])
    def test_rows_take_their_scales_along(self, make, options):
        pool = make(MXFP8Pool, **{**MX, **options})
        keys, values = (rows(dim=dim).to(torch.float8_e4m3fn) for dim in (32, 64))
        k_scale, v_scale = (
            torch.randint(1, 255, (6, 2, blocks), dtype=torch.uint8) for blocks in (1, 2)
        )
        loc = torch.tensor([[36, 37, 50], [40, 41, 42]]) if options else LOC
        pool.set_kv_buffer_prefix_valid(
            6, loc, torch.tensor([3, 1]), keys, values, k_scale, v_scale.view(torch.float8_e8m0fnu)
        )
        at, slots = [0, 1, 2, 3], loc.reshape(-1)[:4]
        copied = pool.get_cpu_copy(slots)[1][0]
        for stored, given in zip(copied, (keys, values, k_scale, v_scale), strict=True):
            assert torch.equal(stored.view(torch.uint8), given.view(torch.uint8)[at])
        everything = pool.get_cpu_copy(torch.arange(pool.slots))
        of_layer = [part.view(torch.uint8) for part in everything[1][0]]
        assert [int(part.any(dim=2).sum()) for part in of_layer] == [8, 8, 8, 8]
        assert not everything[0][0][2].view(torch.uint8).any()

    def test_rows_without_scales_are_refused(self, make):
        pool = make(MXFP8Pool, **MX)
        quantised = [rows(dim=dim).to(torch.float8_e4m3fn) for dim in (32, 64)]
        lens = torch.tensor([1, 1])
        with pytest.raises(ShapeError, match="k_scale must be a tensor of UE8M0 scales"):
            pool.set_kv_buffer_prefix_valid(5, LOC, lens, *quantised)
        scale = torch.ones(6, 2, 1, dtype=torch.uint8)
        with pytest.raises(ShapeError, match=r"cache_v_scale has shape \(2, 2, 1\)"):
            pool.set_kv_buffer_prefix_valid(5, LOC, lens, *quantised, scale, scale)
        with pytest.raises(ShapeError, match=r"cache_k has dtype torch.bfloat16"):
            pool.set_kv_buffer_prefix_valid(5, LOC, lens, rows(dim=32), rows(dim=64), scale, scale)
        assert not any(region.any() for region in snapshot(pool))

    def test_widths_and_dtypes_that_no_such_pool_has(self):
        with pytest.raises(ConfigError, match="divisible by 32"):
            MXFP8Pool(**{**MX, "head_dim": 40})
        with pytest.raises(ValueError, match="an MXFP8 cache has float8_e4m3fn"):
            MXFP8Pool(**{**MX, "dtype": torch.bfloat16})

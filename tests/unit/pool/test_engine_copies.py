"""Host copies as SGLang takes and gives them: 0-d slots of states, no window, MXFP8, nothing."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import HostPool, HybridMambaPool, ShapeError, SWAPool, TokenMajorPool  # noqa: E402
from tests.support.pools import (  # noqa: E402
    FAMILIES,
    SHAPE,
    STATE,
    assert_memory,
    fill,
    snapshot,
    state_pool,
)

IDS = torch.tensor([9, 14])


def bits(rows):
    return rows.contiguous().view(torch.uint8)


@pytest.fixture
def window(make):
    own = {**SHAPE, "layer_num": 3}
    del own["start_layer"]
    pool = make(
        SWAPool.of_sizes,
        **own,
        size_swa=8,
        swa_attention_layer_ids=[1, 3],
        full_attention_layer_ids=[0, 2, 4],
        pool_class=TokenMajorPool,
    )
    mapping = torch.zeros(29, dtype=torch.int64)
    mapping[8:16] = torch.arange(4, 12)
    mapping[28] = -1
    pool.register_mapping(mapping)
    fill(pool)
    return pool


class TestOneSlotOfStates:
    """`mamba_pool_idx` of a request is a tensor without an axis."""

    @pytest.mark.parametrize("slot", [torch.tensor(3), torch.tensor(3, dtype=torch.int32), 3])
    def test_a_0d_index_copies_states_without_an_axis_of_slots(self, make, slot):
        pool = make(state_pool)
        fill(pool)
        conv, temporal = pool.get_cpu_copy(slot)
        assert [tuple(t.shape) for t in (*conv, temporal)] == [(2, *t.shape) for t in STATE]
        for held, got in zip([*pool.conv, pool.temporal], [*conv, temporal], strict=True):
            assert torch.equal(bits(held[:, 3]), bits(got))

    @pytest.mark.parametrize("take", [3, [3]])
    @pytest.mark.parametrize("put", [5, [5]])
    def test_with_and_without_the_axis_load_into_each_other(self, make, take, put):
        pool = make(state_pool)
        fill(pool)
        expected = snapshot(pool)
        slot_bytes = [len(region) // 6 for region in expected]
        for region, size in zip(expected, slot_bytes, strict=True):
            region[5 * size : 6 * size] = region[3 * size : 4 * size]
        pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor(take)), torch.tensor(put))
        assert_memory(pool, expected)

    def test_a_0d_index_moves_and_clears(self, make):
        pool = make(state_pool)
        fill(pool)
        pool.copy_from(torch.tensor(2), torch.tensor(4))
        assert torch.equal(bits(pool.conv[0][:, 4]), bits(pool.conv[0][:, 2]))
        pool.clear_slots(torch.tensor(4))
        assert not bits(pool.temporal[:, 4]).any()
        assert bits(pool.temporal[:, 2]).any()

    def test_a_pool_with_attention_takes_it(self, make):
        full, state = make(FAMILIES["kv"]["token"]), make(state_pool)
        pool = make(HybridMambaPool, full_kv_pool=full, mamba_pool=state)
        fill(pool)
        tokens, (conv, _) = pool.get_cpu_copy(IDS, torch.tensor(2))
        assert conv[0].shape == (2, 16, 3)
        kept = bits(state.conv[0][:, 2]).clone()
        pool.load_cpu_copy((tokens, pool.get_cpu_copy(IDS, torch.tensor(2))[1]), IDS,
                           torch.tensor(4))  # fmt: skip
        assert torch.equal(bits(state.conv[0][:, 4]), kept)

    @pytest.mark.parametrize(
        "wrong",
        [*map(torch.tensor, (6, -1, 1.0, True)), torch.zeros(1, 1).int(), None],
    )
    def test_what_is_no_slot_is_refused(self, make, wrong):
        pool = make(state_pool)
        fill(pool)
        before = snapshot(pool)
        copied = pool.get_cpu_copy(torch.tensor(1))
        with pytest.raises(ConfigError):
            pool.get_cpu_copy(wrong)
        with pytest.raises(ConfigError):
            pool.load_cpu_copy(copied, wrong)
        assert_memory(pool, before)

    def test_an_empty_temporal_state_is_none(self, make):
        pool = make(state_pool, tensors=STATE[:1])
        conv, temporal = pool.get_cpu_copy(torch.tensor([1]))
        assert temporal is None
        pool.load_cpu_copy((conv, torch.zeros(2, 1, 0)), torch.tensor([2]))


class TestNoTokenInTheWindow:
    def test_a_copy_of_no_token_of_the_window_has_swa_none(self, window):
        copied = window.get_cpu_copy(torch.tensor([20, 5]))
        assert copied["swa"] is None
        assert copied["swa_mask"].tolist() == [False, False]
        assert window.get_cpu_copy(IDS)["swa"] is not None

    @pytest.mark.parametrize("mask", [None, torch.tensor([False, False])])
    def test_swa_none_loads_and_leaves_the_window(self, window, mask):
        copied = {**window.get_cpu_copy(torch.tensor([20, 5])), "swa_mask": mask}
        before = snapshot(window.swa_kv_pool)
        rows = bits(window.full_kv_pool.k_buffer[0][[20, 5]]).clone()
        window.load_cpu_copy(copied, IDS)
        assert_memory(window.swa_kv_pool, before)
        assert torch.equal(bits(window.full_kv_pool.k_buffer[0][IDS]), rows)

    def test_without_a_mask_the_rows_are_of_every_token(self, window):
        copied = window.get_cpu_copy(IDS)
        expected = window.swa_kv_pool.get_cpu_copy(torch.tensor([5, 10]))
        del copied["swa_mask"]
        window.load_cpu_copy(copied, torch.tensor([8, 9]))
        got = window.swa_kv_pool.get_cpu_copy(torch.tensor([4, 5]))
        assert torch.equal(bits(got[1][0][1]), bits(expected[1][0][1]))

    def test_swa_none_of_a_token_that_had_a_slot_is_refused(self, window):
        before = snapshot(window)
        copied = {**window.get_cpu_copy(IDS), "swa": None}
        with pytest.raises(ShapeError, match="swa of the copy is None, but swa_mask marks 2"):
            window.load_cpu_copy(copied, IDS)
        assert_memory(window, before)


class TestMXFP8:
    @pytest.mark.parametrize("kind", ["flat", "tiles"])
    def test_copies_show_elements_and_scales_as_what_they_are(self, make, kind):
        pool = make(FAMILIES["mxfp8"][kind])
        copied = pool.get_cpu_copy(IDS)
        assert [tensor.dtype for tensor in copied[0][0]] == [
            torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e8m0fnu,
        ]  # fmt: skip
        assert pool.get_cpu_copy(IDS)[0][0][2].shape == (2, 2, 1)

    @pytest.mark.parametrize("as_bytes", [False, True])
    @pytest.mark.parametrize("kind", ["flat", "tiles"])
    def test_copies_of_these_types_and_of_bytes_load(self, make, kind, as_bytes):
        source, pool = make(FAMILIES["mxfp8"]["flat"]), make(FAMILIES["mxfp8"][kind])
        fill(source, 1)
        copied = [[[tensor.view(torch.uint8) if as_bytes else tensor for tensor in chunk]
                   for chunk in chunks] for chunks in source.get_cpu_copy(IDS)]  # fmt: skip
        pool.load_cpu_copy(copied, torch.tensor([8, 6]))
        for layer in (5, 6, 7):
            for part in ("k", "v", "k_scale", "v_scale"):
                got = pool.rows(part, layer).gather(torch.tensor([8, 6]))
                assert torch.equal(got, source.rows(part, layer).gather(IDS))

    def test_a_repeated_slot_keeps_the_last_of_these_rows(self, make):
        pool = make(FAMILIES["mxfp8"]["flat"])
        fill(pool)
        last = pool.rows("k_scale", 5).gather(IDS[1:]).clone()
        pool.load_cpu_copy(pool.get_cpu_copy(IDS), torch.tensor([6, 6]))
        assert torch.equal(pool.rows("k_scale", 5).gather(torch.tensor([6])), last)

    def test_other_eight_bit_types_are_refused(self, make):
        pool = make(FAMILIES["mxfp8"]["flat"])
        fill(pool)
        before = snapshot(pool)
        good = list(pool.get_cpu_copy(IDS))
        for at, dtype in ((0, torch.float8_e5m2), (2, torch.float8_e4m3fn), (3, torch.int8)):
            chunk = list(good[1][0])
            chunk[at] = chunk[at].view(dtype)
            with pytest.raises(ShapeError, match=f"of the copy has {dtype}"):
                pool.load_cpu_copy([good[0], [chunk], good[2]], IDS)
        assert_memory(pool, before)

    def test_a_window_of_such_rows(self, make):
        halves = [
            make(FAMILIES["mxfp8"]["flat"], layer_ids=ids, layer_num=2, group=group)
            for ids, group in (((0, 2), "full"), ((1, 3), "swa"))
        ]
        pool = SWAPool(full_kv_pool=halves[0], swa_kv_pool=halves[1])
        pool.full_to_swa_index_mapping[8:16] = torch.arange(4, 12)
        fill(pool)
        copied = pool.get_cpu_copy(torch.tensor([9, 20, 14]))
        rows = halves[1].rows("v_scale", 3).gather(torch.tensor([10])).clone()
        pool.load_cpu_copy(copied, torch.tensor([22, 23, 8]))
        assert torch.equal(halves[1].rows("v_scale", 3).gather(torch.tensor([4])), rows)

    def test_a_host_pool_gives_and_takes_them(self, make):
        device = make(FAMILIES["mxfp8"]["flat"])
        fill(device)
        host = make(HostPool, device, pages=4)
        host.load_cpu_copy(device.get_cpu_copy(IDS), torch.tensor([3, 1]))
        for left, right in zip(host.get_cpu_copy(torch.tensor([3, 1]))[1][0],
                               device.get_cpu_copy(IDS)[1][0], strict=True):  # fmt: skip
            assert left.dtype == right.dtype
            assert torch.equal(bits(left), bits(right))

    def test_plain_eight_bit_floats_stay_bytes(self, make):
        pool = make(FAMILIES["fp8"]["page"])
        copied = pool.get_cpu_copy(IDS)
        assert {tensor.dtype for tensor in copied[0][0]} == {torch.uint8}
        pool.load_cpu_copy(
            [[[t.view(torch.float8_e4m3fn) for t in chunk] for chunk in c] for c in copied], IDS
        )


class TestNothingInACopy:
    """None, or anything that is no tensor, wherever in a copy it is."""

    @pytest.mark.parametrize(
        ("family", "kind"),
        [("kv", "token"), ("mla", "page_major"), ("mxfp8", "flat"), ("sparse", "page")],
    )
    @pytest.mark.parametrize("junk", [None, 3, "ab", torch.tensor(1.0)], ids=str)
    def test_of_tokens(self, make, family, kind, junk):
        pool = make(FAMILIES[family][kind])
        fill(pool)
        before = snapshot(pool)
        good = list(pool.get_cpu_copy(IDS))
        chunk = good[1][0] if isinstance(good[1][0], list) else [good[1][0]]
        for wrong in (
            junk,
            [good[0], junk, good[2]],
            [good[0], [junk], good[2]],
            [good[0], [[*chunk[:-1], junk]], good[2]],
        ):
            with pytest.raises(ShapeError):
                pool.load_cpu_copy(wrong, IDS)
        assert_memory(pool, before)

    @pytest.mark.parametrize(
        "junk", [None, 3, (), ("a", None), ([None], None), (None, None)], ids=str
    )
    def test_of_states(self, make, junk):
        pool = make(state_pool)
        fill(pool)
        before = snapshot(pool)
        conv, temporal = pool.get_cpu_copy(torch.tensor([1]))
        for wrong in (junk, (junk, temporal), ([conv[0], junk], temporal)):
            with pytest.raises(ShapeError):
                pool.load_cpu_copy(wrong, torch.tensor([2]))
        with pytest.raises(ShapeError):
            pool.load_cpu_copy((conv, junk), torch.tensor([2]))
        assert_memory(pool, before)

    @pytest.mark.parametrize("junk", [None, 3, (), (None, None), (1, 2, 3)], ids=str)
    def test_of_tokens_and_states(self, make, junk):
        full, state = make(FAMILIES["kv"]["token"]), make(state_pool)
        pool = make(HybridMambaPool, full_kv_pool=full, mamba_pool=state)
        fill(pool)
        before = snapshot(pool)
        slot = torch.tensor([1])
        tokens, states = pool.get_cpu_copy(IDS, slot)
        for wrong in (junk, (junk, states), (tokens, junk)):
            with pytest.raises(ShapeError):
                pool.load_cpu_copy(wrong, IDS, slot)
        assert_memory(pool, before)

    @pytest.mark.parametrize("junk", [None, 3, "ab", {}, {"full": None}], ids=str)
    def test_of_a_window(self, window, junk):
        before = snapshot(window)
        good = window.get_cpu_copy(IDS)
        for wrong in (
            junk,
            {**good, "full": junk},
            {**good, "swa": junk},
            {**good, "swa_mask": 3 if junk is None else junk},
        ):
            with pytest.raises(ShapeError):
                window.load_cpu_copy(wrong, IDS)
        assert_memory(window, before)

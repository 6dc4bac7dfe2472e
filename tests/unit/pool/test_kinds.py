"""What is particular to one kind of pool: unified entries, latents, an index, states, hybrids."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HybridMambaPool,
    MLAPool,
    PageMajorPool,
    ShapeError,
    SlotError,
    SparsePool,
    StatePool,
    SWAPool,
    TokenMajorPool,
    UnifiedPool,
)
from tests.support.pools import (  # noqa: E402
    DRAFT,
    FAMILIES,
    MLA,
    SHAPE,
    STATE,
    assert_memory,
    fill,
    snapshot,
    state_pool,
)


def random(shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


class TestUnified:
    def test_rows_of_two_widths(self, make):
        pool = make(UnifiedPool, **SHAPE)
        base = pool.memory[0].address
        entry = 3 * (2 * 8 + 2 * 16) * 2
        assert [b.data_ptr() - base for b in pool.k_buffer] == [0, 96, 192]
        assert [b.data_ptr() - base for b in pool.v_buffer] == [32, 128, 224]
        assert pool.k_buffer[0].stride() == (entry // 2, 8, 1)
        assert pool.get_contiguous_buf_infos()[1:] == ([28 * entry], [4 * entry])

    def test_draft_lanes_are_in_the_same_entry(self, make):
        pool = make(FAMILIES["draft"]["unified"])
        entry = pool.k_buffer[0].stride(0) * 2
        assert entry == 352  # 288 of the target, 2 * 32 of the draft
        assert pool.get_key_buffer(40).data_ptr() - pool.memory[0].address == 288
        assert len(pool.memory) == 1

    def test_layers_need_not_follow_each_other(self, make):
        pool = make(UnifiedPool, **{**SHAPE, "layer_ids": [2, 9, 30]})
        assert pool.layout.layers == (2, 9, 30)
        pool.set_kv_buffer(9, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 16))
        assert pool.k_buffer[1].any()
        with pytest.raises(ConfigError, match=r"layer 3 is not in this pool.* 2, 9, 30"):
            pool.get_key_buffer(3)
        with pytest.raises(ConfigError, match="layer_ids has 1 ids for layer_num=3"):
            make(UnifiedPool, **{**SHAPE, "layer_ids": [2]})


class TestLatent:
    @pytest.mark.parametrize("arrangement", ["token_major", "page_major", "unified_entries"])
    def test_rows_in_two_tensors_and_in_one(self, make, arrangement):
        pool = make(MLAPool, **{**MLA, "arrangement": arrangement})
        loc = torch.tensor([9, 4])
        latent, rope = random((2, 1, 16)), random((2, 1, 8))
        pool.set_mla_kv_buffer(1, loc, latent, rope)
        whole = pool.get_key_buffer(1).reshape(28, 24)[loc]
        assert torch.equal(whole, torch.cat([latent, rope], dim=2)[:, 0])
        assert torch.equal(pool.get_value_buffer(1).reshape(28, 16)[loc], latent[:, 0])
        got = pool.get_mla_kv_buffer(1, loc, torch.float32)
        assert torch.equal(got[0], latent.float())
        assert torch.equal(got[1], rope.float())
        keys, values = pool.get_kv_buffer(2)
        assert not keys.any()
        assert values.shape[-1] == 16

    def test_fp8(self, make):
        pool = make(MLAPool, **{**MLA, "dtype": torch.float8_e4m3fn})
        pool.set_kv_buffer(0, torch.tensor([5]), torch.full((1, 1, 24), 2.0), None)
        assert pool.kv_buffer[0].dtype == torch.uint8
        assert pool.get_key_buffer(0)[5].float().unique().tolist() == [2.0]

    def test_wrong_rows_and_layers_are_refused(self, make):
        pool = make(MLAPool, **MLA)
        with pytest.raises(ShapeError, match=r"cache_k has shape \(1, 1, 23\)"):
            pool.set_kv_buffer(0, torch.tensor([5]), torch.zeros(1, 1, 23))
        with pytest.raises(ShapeError, match="cache_k_rope has shape"):
            pool.set_mla_kv_buffer(
                0, torch.tensor([5]), torch.zeros(1, 1, 16), torch.zeros(1, 1, 9)
            )
        for layer in (-1, 3):
            with pytest.raises(ConfigError, match=f"layer {layer} is not in this pool"):
                pool.get_key_buffer(layer)


class TestSparse:
    @pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
    def test_an_index_beside_the_rows(self, make, arrangement):
        pool = make(
            SparsePool, **SHAPE, index_head_dim=12, index_layer_ids=[5, 7], arrangement=arrangement
        )
        keys = random((2, 1, 12))
        pool.set_index_k_buffer(7, torch.tensor([8, 4]), keys)
        assert torch.equal(pool.get_index_k_buffer(7)[[8, 4]], keys)
        assert not pool.get_index_k_buffer(5).any()
        assert not pool.k_buffer[2].any()
        copied = pool.get_cpu_copy(torch.tensor([4]))
        assert [len(layer[0]) for layer in copied] == [3, 2, 3]
        with pytest.raises(ConfigError, match="layer 6 has no index"):
            pool.get_index_k_buffer(6)
        with pytest.raises(ConfigError, match="layer 8 is not in this pool"):
            pool.set_index_k_buffer(8, torch.tensor([4]), keys[:1])

    def test_what_cannot_be(self):
        with pytest.raises(ConfigError, match="layer 4, which is not in this pool"):
            SparsePool(**SHAPE, index_head_dim=12, index_layer_ids=[4])
        with pytest.raises(ConfigError, match="arrangement is 'x'"):
            SparsePool(**SHAPE, index_head_dim=12, arrangement="x")
        with pytest.raises(ConfigError, match="no draft lanes"):
            SparsePool(**SHAPE, index_head_dim=12, draft=DRAFT)

    def test_every_layer_has_an_index_unless_told(self, make):
        pool = make(SparsePool, **SHAPE, index_head_dim=12)
        assert pool.index_layer_ids == (5, 6, 7)


class TestState:
    @pytest.mark.parametrize("arrangement", ["token_major", "unified_entries"])
    def test_tensors_are_where_the_layout_says(self, make, arrangement):
        pool = make(state_pool, arrangement=arrangement)
        fill(pool)
        held = snapshot(pool)
        for tensor, view in zip(STATE, [*pool.conv, pool.temporal], strict=True):
            assert view.shape == (2, 6, *tensor.shape)
            for number, layer in enumerate((1, 3)):
                for slot in (1, 5):
                    cells = cells_of(pool.layout, tensor.part, layer, slot)
                    content = b"".join(
                        held[region][offset : offset + length].tobytes()
                        for region, offset, length in cells
                    )
                    element = view[number, slot].contiguous().view(torch.uint8).numpy()
                    assert element.tobytes() == content

    @pytest.mark.parametrize("arrangement", ["token_major", "unified_entries"])
    def test_copies_move_between_slots_and_arrangements(self, make, arrangement):
        source, target = make(state_pool), make(state_pool, arrangement=arrangement)
        fill(source, 1)
        fill(target, 2)
        before = [tensor.clone() for tensor in [*target.conv, target.temporal]]
        ids, to = torch.tensor([5, 1, 5]), torch.tensor([2, 4, 2])
        copied = source.get_cpu_copy(ids)
        assert copied[0][0].shape == (2, 3, 16, 3)
        target.load_cpu_copy(copied, to)
        mine = [*target.conv, target.temporal]
        for old, new, given in zip(before, mine, [*source.conv, source.temporal], strict=True):
            old[:, [2, 4]] = given[:, [5, 1]]
            assert torch.equal(old.view(torch.uint8), new.contiguous().view(torch.uint8))

    def test_moves_and_zeros(self, make):
        pool = make(state_pool)
        pool.temporal[:] = torch.arange(6.0)[None, :, None, None, None]
        pool.copy_from(torch.tensor([1, 2]), torch.tensor([2, 3]))
        assert pool.temporal[1, :, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 5]
        pool.clear_slots(torch.tensor([4]))
        assert pool.temporal[0, :, 0, 0, 0].tolist() == [0, 1, 1, 2, 0, 5]

    def test_wrong_copies_and_slots_are_refused(self, make):
        pool = make(state_pool)
        fill(pool)
        before = snapshot(pool)
        conv, temporal = pool.get_cpu_copy(torch.tensor([1]))
        for copied, text in (
            ((conv[:1], temporal), "has 2 state tensors, the pool 3"),
            ((conv, None), "has 2 state tensors"),
            (([conv[0].float(), conv[1]], temporal), "has torch.float32"),
            ((conv, temporal[:, :, :2]), r"\(2, 1, 2, 8, 16\)"),
        ):
            with pytest.raises(ShapeError, match=text):
                pool.load_cpu_copy(copied, torch.tensor([2]))
        with pytest.raises(SlotError, match="slot 6"):
            pool.get_cpu_copy(torch.tensor([6]))
        with pytest.raises(ConfigError, match="size=0"):
            state_pool(size=0)
        with pytest.raises(ConfigError, match="arrangement is 'page_major'"):
            state_pool(arrangement="page_major")
        assert_memory(pool, before)


def cells_of(layout, part, layer, slot):
    """Cells of one slot in the order of the tensor: outer rows, then units of the axis."""
    planes = layout.planes_by_key["state", part, layer]
    for row in range(planes[0].rows):
        for plane in planes:
            for head in range(plane.head_first, plane.head_end):
                region, offset = layout.locate(part, layer, slot, head, row=row)
                yield region, offset, plane.cell_bytes


class TestWindow:
    @pytest.fixture(params=[TokenMajorPool, PageMajorPool, UnifiedPool])
    def pool(self, make, request):
        own = {**SHAPE, "layer_num": 3}
        del own["start_layer"]
        pool = make(
            SWAPool.of_sizes,
            **own,
            size_swa=8,
            swa_attention_layer_ids=[1, 3],
            full_attention_layer_ids=[0, 2, 4],
            pool_class=request.param,
        )
        mapping = torch.zeros(28, dtype=torch.int64)
        mapping[8:16] = torch.arange(4, 12)
        pool.register_mapping(mapping)
        return pool

    def test_one_layout_of_two_groups(self, pool):
        assert list(pool.layout.group_by_name) == ["full", "swa"]
        assert len(pool.memory) == len(pool.layout.regions)
        assert pool.layout.group_by_name["swa"].pages == 3
        assert pool.get_contiguous_buf_infos() == pool.full_kv_pool.get_contiguous_buf_infos()
        assert pool.get_state_buf_infos() == pool.swa_kv_pool.get_contiguous_buf_infos()

    def test_writes_go_to_the_pool_of_the_layer(self, pool):
        keys, values = random((2, 2, 8)), random((2, 2, 16))
        for layer in range(5):
            pool.set_kv_buffer(layer, torch.tensor([8, 15]), keys, values)
            slots = [4, 11] if layer in (1, 3) else [8, 15]
            stored = pool.get_key_buffer(layer).reshape(-1, 2, 8)
            assert torch.equal(stored[slots], keys)
            assert torch.equal(pool.get_value_buffer(layer).reshape(-1, 2, 16)[slots], values)
            assert int(stored.flatten(1).any(dim=1).sum()) == 2
            assert pool.get_kv_buffer(layer)[0].data_ptr() == pool.get_key_buffer(layer).data_ptr()

    def test_prefix_valid_takes_slots_of_the_full_pool(self, pool):
        loc = torch.tensor([[8, 9, -5], [10, 2**40, 3]])
        keys, values = random((6, 2, 8)), random((6, 2, 16))
        for layer, slots in ((2, [8, 9, 10]), (3, [4, 5, 6])):
            pool.set_kv_buffer_prefix_valid(layer, loc, torch.tensor([2, 1]), keys, values)
            stored = pool.get_key_buffer(layer).reshape(-1, 2, 8)
            assert torch.equal(stored[slots], keys[[0, 1, 3]])
            assert int(stored.flatten(1).any(dim=1).sum()) == 3
        stored = snapshot(pool)
        for kind in (torch.bool, torch.complex64):
            with pytest.raises(ShapeError, match="loc_2d must hold integers"):
                pool.set_kv_buffer_prefix_valid(3, loc.to(kind), torch.tensor([2, 1]), keys, values)
        unsigned = torch.tensor([2, 1], dtype=torch.uint16)
        pool.set_kv_buffer_prefix_valid(
            3, loc.clamp(0, 9).to(torch.uint32), unsigned * 0, keys, values
        )
        assert_memory(pool, stored)
        with pytest.raises(ValueError, match="loc_2d must be rank-2"):
            pool.set_kv_buffer_prefix_valid(3, loc[0], torch.tensor([2, 1]), keys, values)

    def test_a_copy_has_the_window_of_those_that_are_in_it(self, pool):
        fill(pool)
        loc = torch.tensor([20, 9, 14, 5])
        copied = pool.get_cpu_copy(loc)
        assert copied["swa_mask"].tolist() == [False, True, True, False]
        assert copied["full"][0][0][0].shape[0] == 4
        window = pool.swa_kv_pool.get_cpu_copy(torch.tensor([5, 10]))
        assert torch.equal(bits(copied["swa"][1][0][1]), bits(window[1][0][1]))

        # In the new places one of them has no slot in the window.
        before = [bits(part).clone() for part in rows_of(pool.swa_kv_pool)]
        to = torch.tensor([8, 22, 13, 25])
        pool.load_cpu_copy(copied, to)
        after = rows_of(pool.swa_kv_pool)
        for old, new, saved in zip(before, after, rows_in(copied["swa"]), strict=True):
            old[9] = bits(saved)[1]  # token 14, now slot 13, is in the window at 9
            assert torch.equal(old, bits(new))
        for new, saved in zip(rows_of(pool.full_kv_pool), rows_in(copied["full"]), strict=True):
            assert torch.equal(bits(new)[to], bits(saved))

    def test_a_wrong_copy_writes_to_neither_pool(self, pool):
        fill(pool)
        before = snapshot(pool)
        copied = pool.get_cpu_copy(torch.tensor([9, 14]))
        copied["swa"][1][0][0] = copied["swa"][1][0][0][:1]
        with pytest.raises(ShapeError):
            pool.load_cpu_copy(copied, torch.tensor([9, 14]))
        with pytest.raises(ShapeError, match="the copy has 2 tokens for 1 indices"):
            pool.load_cpu_copy(copied, torch.tensor([9]))
        assert_memory(pool, before)

    @pytest.mark.parametrize("slot", [12, 999, 2**40])
    def test_a_mapping_out_of_the_window_writes_to_neither_pool(self, pool, slot):
        fill(pool)
        copied = pool.get_cpu_copy(torch.tensor([9, 14]))
        pool.full_to_swa_index_mapping[20] = slot
        before = snapshot(pool)
        text = (
            f"the mapping of {{}} to the window pool has slot {slot}; the pool has 0 <= slot < 12"
        )
        ids, bad = torch.tensor([8, 9]), torch.tensor([9, 20])
        with pytest.raises(SlotError, match=text.format("indices")):
            pool.load_cpu_copy(copied, bad)
        with pytest.raises(SlotError, match=text.format("tgt_loc")):
            pool.move_kv_cache(bad, ids)
        with pytest.raises(SlotError, match=text.format("src_loc")):
            pool.move_kv_cache(ids, bad)
        assert_memory(pool, before)
        # A token without rows of the window in the copy, or in the place it comes from, needs none.
        pool.move_kv_cache(torch.tensor([20]), torch.tensor([5]))
        pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor([5])), torch.tensor([20]))

    def test_wrong_ids_and_copies_write_to_neither_pool(self, pool):
        fill(pool)
        before = snapshot(pool)
        ids = torch.tensor([8, 9])
        copied = pool.get_cpu_copy(ids)
        full = copied["full"]
        short = [[[part[:1] for part in chunk] for chunk in chunks] for chunks in full]
        for load, text in (
            ({**copied, "full": short}, "layer 0 of the copy has 1 rows for 2 indices"),
            ({**copied, "full": full[:2]}, "the copy has 2 layers, the pool 3"),
            ({**copied, "swa": copied["swa"][:1]}, "the copy has 1 layers, the pool 2"),
            ({**copied, "swa_mask": torch.tensor([1, 1])}, "swa_mask of the copy has dtype"),
            ({**copied, "swa_mask": torch.tensor([True, False])}, "has 2 rows for 1 indices"),
        ):
            with pytest.raises(ShapeError, match=text):
                pool.load_cpu_copy(load, ids)
        for target, source, error, text in (
            (ids, ids[:1], ShapeError, "2 targets for 1 sources"),
            (torch.tensor([8, 28]), ids, SlotError, "tgt_loc has slot 28"),
            (ids, torch.tensor([-1, 8]), SlotError, "src_loc has slot -1"),
        ):
            with pytest.raises(error, match=text):
                pool.move_kv_cache(target, source)
        assert_memory(pool, before)

    def test_a_copy_of_plain_lists_is_taken(self, pool):
        fill(pool)
        ids = torch.tensor([8, 20])
        copied = pool.get_cpu_copy(ids)
        plain = {**copied, "full": list(copied["full"]), "swa": list(copied["swa"])}
        before = snapshot(pool)
        pool.load_cpu_copy(plain, ids)
        assert_memory(pool, before)

    def test_moves_in_both_pools(self, pool):
        fill(pool)
        full = [bits(part).clone() for part in rows_of(pool.full_kv_pool)]
        window = [bits(part).clone() for part in rows_of(pool.swa_kv_pool)]
        pool.move_kv_cache(torch.tensor([9, 20, 10]), torch.tensor([8, 9, 25]))
        for old, new in zip(full, rows_of(pool.full_kv_pool), strict=True):
            old[[9, 20, 10]] = old[[8, 9, 25]]
            assert torch.equal(old, bits(new))
        for old, new in zip(window, rows_of(pool.swa_kv_pool), strict=True):
            old[5] = old[4]
            assert torch.equal(old, bits(new))

    def test_pages_of_either_group(self, pool):
        fill(pool)
        copied = pool.swa_kv_pool.get_cpu_copy(torch.arange(4, 8))
        pool.move_pages(torch.tensor([2]), torch.tensor([1]), group="swa")
        moved = pool.swa_kv_pool.get_cpu_copy(torch.arange(8, 12))
        assert torch.equal(bits(moved[0][0][0]), bits(copied[0][0][0]))
        pool.move_pages(torch.tensor([3]), torch.tensor([1]))
        with pytest.raises(ConfigError, match="no group 'state'"):
            pool.move_pages(torch.tensor([2]), torch.tensor([1]), group="state")

    def test_mappings_and_layers_that_cannot_be(self, pool, make):
        with pytest.raises(ShapeError, match="the mapping has 3 slots"):
            pool.register_mapping(torch.zeros(3, dtype=torch.int64))
        for wrong in (torch.zeros(28), torch.zeros(28, dtype=torch.bool), torch.zeros(4, 7).int()):
            with pytest.raises(ShapeError, match="the mapping must be one-dimensional integers"):
                pool.register_mapping(wrong)
        with pytest.raises(SlotError, match="kv_indices has slot 28"):
            pool.translate_loc_from_full_to_swa(torch.tensor([28]))
        twin = make(TokenMajorPool, **{**SHAPE, "group": "swa"})
        with pytest.raises(ConfigError, match="layer 5 is in the full and in the window pool"):
            SWAPool(full_kv_pool=make(TokenMajorPool, **SHAPE), swa_kv_pool=twin)


class TestStateAndAttention:
    @pytest.mark.parametrize("family", ["kv", "mla"])
    def test_a_copy_is_of_tokens_and_of_states(self, make, family):
        name = sorted(FAMILIES[family])[0]
        full, state = make(FAMILIES[family][name]), make(state_pool)
        pool = make(HybridMambaPool, full_kv_pool=full, mamba_pool=state)
        assert list(pool.layout.group_by_name) == ["full", "state"]
        assert pool.layout.group_by_name["state"].kind == "state"
        fill(pool)
        loc, slot = torch.tensor([9, 4]), torch.tensor([3])
        copied = pool.get_cpu_copy(loc, slot)
        kept = state.temporal[:, 3].clone()
        fill(pool, 1)
        pool.load_cpu_copy(copied, loc, torch.tensor([5]))
        assert torch.equal(bits(state.temporal[:, 5]), bits(kept))
        again = pool.get_cpu_copy(loc)
        assert again[1] is None
        assert all(
            torch.equal(bits(a), bits(b))
            for a, b in zip(rows_in(again[0]), rows_in(copied[0]), strict=True)
        )
        before = snapshot(pool)
        with pytest.raises(ShapeError, match="must be given together"):
            pool.load_cpu_copy(copied, loc)
        with pytest.raises(SlotError):
            pool.load_cpu_copy(copied, torch.tensor([9, 28]), torch.tensor([5]))
        with pytest.raises(SlotError):
            pool.load_cpu_copy(copied, loc, torch.tensor([6]))
        tokens, states = copied
        slots = torch.tensor([5])
        for wrong in ((tokens[:-1], states), (tokens, (states[0], None)), (tokens, (states[0][:1],
                      states[1]))):  # fmt: skip
            with pytest.raises(ShapeError):
                pool.load_cpu_copy(wrong, loc, slots)
        with pytest.raises(ShapeError):
            pool.load_cpu_copy(copied, loc[:1], slots)
        with pytest.raises(ShapeError):
            pool.load_cpu_copy(copied, loc, torch.tensor([5, 4]))
        with pytest.raises(ShapeError, match="2 targets for 1 sources"):
            pool.move_kv_cache(loc, loc[:1])
        assert_memory(pool, before)

    def test_rows_are_the_attention_pools(self, make):
        full = make(PageMajorPool, **SHAPE)
        pool = make(HybridMambaPool, full_kv_pool=full, mamba_pool=make(state_pool))
        keys, values = random((3, 2, 8)), random((3, 2, 16))
        pool.set_kv_buffer(5, torch.tensor([4]), keys[:1], values[:1])
        loc = torch.tensor([[5, 6, 7]])
        pool.set_kv_buffer_prefix_valid(6, loc, torch.tensor([2]), keys, values)
        assert pool.get_key_buffer(5).reshape(28, -1).any(dim=1).nonzero().tolist() == [[4]]
        assert pool.get_value_buffer(6).reshape(28, -1).any(dim=1).sum() == 2
        pool.move_kv_cache(torch.tensor([20]), torch.tensor([4]))
        assert torch.equal(pool.get_kv_buffer(5)[0].reshape(28, 2, 8)[20], keys[0])
        assert pool.get_state_buf_infos() == pool.mamba_pool.get_contiguous_buf_infos()

    def test_one_buffer_for_two_pools_is_one_region(self, make):
        with memory.allocate(1 << 16) as shared:
            full = make(UnifiedPool, **{**SHAPE, "size": 96}, memory=shared, buffer_bytes=1 << 16)
            window = make(
                UnifiedPool, **{**SHAPE, "start_layer": 20, "group": "swa"}, memory=shared,
                buffer_bytes=1 << 16,
            )  # fmt: skip
            pool = SWAPool(full_kv_pool=full, swa_kv_pool=window)
            assert len(pool.layout.regions) == len(pool.memory) == 1
            assert pool.memory[0].length_bytes == 1 << 16
            pool.close()


def bits(rows):
    return rows.contiguous().view(torch.uint8)


def rows_of(pool):
    """All rows of every layer and unit."""
    return rows_in(pool.get_cpu_copy(torch.arange(pool.slots)))


def rows_in(copied):
    return [
        tensor
        for chunks in copied
        for chunk in chunks
        for tensor in ([chunk] if isinstance(chunk, torch.Tensor) else chunk)
    ]


def test_a_closed_pool_says_so(make):
    pool = make(StatePool, size=2, tensors=STATE, layer_ids=(0,))
    pool.close()
    with pytest.raises(ConfigError, match="the pool is closed"):
        pool.get_cpu_copy(torch.tensor([1]))


def test_pools_may_lie_in_a_tensor(make):
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    pool = make(UnifiedPool, **SHAPE, memory=buffer)
    pool.set_kv_buffer(5, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 16))
    assert buffer.any()
    assert pool.memory[0].address == buffer.data_ptr()
    assert np.asarray(buffer).nbytes == 1 << 16
    with pytest.raises(ConfigError, match="memory has 8 bytes of cpu"):
        make(UnifiedPool, **SHAPE, memory=buffer[:8])

"""A pool of sparse latent attention: rows, an index by page, its host copies, packed rows."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.pool import DSAPool, HostPool, HybridMambaPool, ShapeError, SlotError  # noqa: E402
from tests.support.pools import assert_memory, fill, snapshot, state_pool  # noqa: E402

SHAPE = {
    "size": 16,
    "page_size": 4,
    "dtype": torch.bfloat16,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 8,
    "layer_num": 3,
    "start_layer": 5,
    "skip_topk_layers": [False, True, False],
}
PACKED = {**SHAPE, "dtype": torch.float8_e4m3fn, "kv_cache_dim": 128 + 4 + 16}
PAGE = 4 * 132
KEYS = torch.arange(2 * 128).reshape(2, 128).to(torch.uint8)
SCALES = torch.tensor([0.5, 0.25])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def index_bytes(pool, layer, slot):
    """Key and scale of a slot, from the page alone: all keys first, then all scales."""
    page = pool.get_index_k_with_scale_buffer(layer)[slot // 4]
    at = slot % 4
    return page[at * 128 : at * 128 + 128], page[512 + 4 * at : 512 + 4 * at + 4]


@pytest.fixture(params=["plain", "packed"])
def pool(make, request):
    made = make(DSAPool, **(SHAPE if request.param == "plain" else PACKED))
    fill(made)
    return made


def test_regions_are_rows_and_then_indexes(make):
    pool = make(DSAPool, **SHAPE)
    assert pool.get_contiguous_buf_infos()[1:] == ([20 * 272] * 3, [4 * 272] * 3)
    addresses, lengths, items = pool.get_state_buf_infos()
    assert lengths == [5 * PAGE, 0, 5 * PAGE]
    assert items == [PAGE, 0, PAGE]
    assert addresses[0] == pool.get_index_k_with_scale_buffer(5).data_ptr()
    assert addresses[1] == 0
    assert pool.get_kv_size_bytes() == 20 * 272 * 3 + 5 * PAGE * 2
    assert pool.kv_cache_dim == 136
    packed = make(DSAPool, **PACKED)
    assert packed.kv_cache_dim == 148
    assert packed.kv_buffer[0].shape == (20, 1, 148)
    assert packed.get_device_pool_infos()[0].buffer_info.packed_fp8


@pytest.mark.parametrize("axis", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_keys_of_a_page_come_before_its_scales(make, dtype, axis):
    pool = make(DSAPool, **SHAPE)
    keys, scales = KEYS.view(dtype), SCALES
    if axis:
        keys, scales = keys.unsqueeze(1), scales.unsqueeze(1)
    pool.set_index_k_scale_buffer(7, torch.tensor([9, 4]), keys, scales)
    for row, slot in enumerate((9, 4)):
        key, scale = index_bytes(pool, 7, slot)
        assert torch.equal(key, KEYS[row])
        assert torch.equal(scale, bits(SCALES[row : row + 1]))
    assert int(pool.get_index_k_with_scale_buffer(7).any(dim=1).sum()) == 2
    assert not pool.get_index_k_with_scale_buffer(5).any()
    assert not any(bits(buffer).any() for buffer in pool.kv_buffer)


def test_a_copy_has_rows_and_whole_pages_of_the_index(pool):
    loc = torch.tensor([12, 13, 14, 15, 4, 5])  # a prefix that ends inside of page 1
    copied = pool.get_cpu_copy(loc)
    assert [len(chunks) for chunks in copied["index_k"]] == [1, 0, 1]
    assert torch.equal(copied["index_k"][2][0], pool.get_index_k_with_scale_buffer(7)[[3, 1]])
    assert torch.equal(bits(copied["kv"][1][0]), bits(pool.kv_buffer[1][loc]))
    to = torch.tensor([8, 9, 10, 11, 16, 17])
    expected = [bits(buffer).clone() for buffer in pool.kv_buffer]
    index = pool.get_index_k_with_scale_buffer(5).clone()
    pool.load_cpu_copy(copied, to)
    for buffer, before in zip(pool.kv_buffer, expected, strict=True):
        before[to] = before[loc]
        assert torch.equal(bits(buffer), before)
    index[[2, 4]] = index[[3, 1]]
    assert torch.equal(pool.get_index_k_with_scale_buffer(5), index)


def test_copies_are_chunked_by_page(make):
    pool = make(DSAPool, **SHAPE)
    fill(pool)
    pool.cpu_offloading_chunk_size = 8
    loc = torch.arange(4, 18)
    copied = pool.get_cpu_copy(loc)
    assert [len(chunk) for chunk in copied["index_k"][0]] == [2, 2]
    assert [len(chunk) for chunk in copied["kv"][0]] == [8, 6]
    before = snapshot(pool)
    pool.load_cpu_copy(copied, loc)
    assert_memory(pool, before)
    empty = torch.zeros(0, dtype=torch.int64)
    pool.load_cpu_copy(pool.get_cpu_copy(empty), empty)
    assert_memory(pool, before)


@pytest.mark.parametrize("loc", [[5, 6, 7], [4, 5, 8, 9], [4, 6, 5, 7], [4, 5, 6, 7, 9]], ids=str)
def test_slots_that_are_not_whole_pages_in_order_are_refused(pool, loc):
    before = snapshot(pool)
    good = pool.get_cpu_copy(torch.tensor([4, 5, 6, 7, 8])[: len(loc)])
    for call in (pool.get_cpu_copy, lambda ids: pool.load_cpu_copy(good, ids)):
        with pytest.raises(ShapeError, match="not the slots of whole pages of 4 tokens in order"):
            call(torch.tensor(loc))
    assert_memory(pool, before)


def test_wrong_copies_write_nothing(pool):
    loc = torch.arange(4, 12)
    before = snapshot(pool)
    good = pool.get_cpu_copy(loc)
    index = good["index_k"]
    for wrong in (
        None,
        {"kv": good["kv"]},
        {**good, "kv": None},
        {**good, "kv": good["kv"][:2]},
        {**good, "index_k": None},
        {**good, "index_k": index[:2]},
        {**good, "index_k": [index[0], [], None]},
        {**good, "index_k": [index[0], [], [None]]},
        {**good, "index_k": [index[0], [], [index[2][0][:1]]]},
        {**good, "index_k": [index[0], [], [index[2][0][:, :-1]]]},
        {**good, "index_k": [index[0], [], [index[2][0].view(torch.int8)]]},
    ):
        with pytest.raises(ShapeError):
            pool.load_cpu_copy(wrong, loc)
    with pytest.raises(ShapeError):
        pool.load_cpu_copy(good, loc[:4])
    assert_memory(pool, before)


def test_rows_move_with_their_keys_and_scales(pool):
    key, scale = (part.clone() for part in index_bytes(pool, 5, 6))
    row = bits(pool.kv_buffer[1][6]).clone()
    pool.move_kv_cache(torch.tensor([17]), torch.tensor([6]))
    assert torch.equal(torch.cat(index_bytes(pool, 5, 17)), torch.cat([key, scale]))
    assert torch.equal(bits(pool.kv_buffer[1][17]), row)


def test_a_host_pool_behind_it(make, pool):
    host = make(HostPool, pool, pages=3, layout="page_first_direct")
    here, there = torch.tensor([0, 5]), torch.tensor([9, 6])
    host.backup_from_device_all_layer(pool, here, there)
    expected = [torch.cat(index_bytes(pool, 7, slot)).clone() for slot in (9, 6)]
    rows = bits(pool.kv_buffer[2][there]).clone()
    fill(pool, 5)
    for number in range(3):
        host.load_to_device_per_layer(pool, here, torch.tensor([4, 18]), number)
    for slot, content in zip((4, 18), expected, strict=True):
        assert torch.equal(torch.cat(index_bytes(pool, 7, slot)), content)
    assert torch.equal(bits(pool.kv_buffer[2][[4, 18]]), rows)
    copied = host.get_cpu_copy(here)
    pool.load_cpu_copy(copied, torch.tensor([5, 10]))
    assert torch.equal(torch.cat(index_bytes(pool, 7, 10)), expected[1])


def test_beside_recurrent_states(make, pool):
    states = make(state_pool)
    fill(states)
    both = make(HybridMambaPool, full_kv_pool=pool, mamba_pool=states)
    loc, to = torch.arange(4, 12), torch.tensor([8, 9, 10, 11, 16, 17, 18, 19])
    copied = both.get_cpu_copy(loc, torch.tensor(1))
    assert set(copied[0]) == {"kv", "index_k"}
    before = snapshot(both)
    for wrong, slots, slot in (
        (copied, to.flip(0), torch.tensor(2)),
        (copied, to, torch.tensor(9)),
        ((copied[0], (copied[1][0], None)), to, torch.tensor(2)),
        (({**copied[0], "index_k": None}, copied[1]), to, torch.tensor(2)),
    ):
        with pytest.raises((ShapeError, SlotError)):
            both.load_cpu_copy(wrong, slots, slot)
        assert_memory(both, before)
    expected = torch.cat(index_bytes(pool, 7, 9)).clone()
    kept = bits(states.temporal[:, 1]).clone()
    both.load_cpu_copy(copied, to, torch.tensor(2))
    assert torch.equal(torch.cat(index_bytes(pool, 7, 17)), expected)
    assert torch.equal(bits(states.temporal[:, 2]), kept)


def test_packed_rows_come_as_bytes(make):
    pool = make(DSAPool, **PACKED)
    rows = torch.arange(2 * 148).reshape(2, 1, 148).to(torch.uint8)
    loc = torch.tensor([9, 4])
    pool.set_kv_buffer(5, loc, rows)
    pool.set_mla_kv_buffer(6, loc, rows[..., :132], rows[..., 132:].view(torch.float8_e4m3fn))
    for layer in (0, 1):
        assert torch.equal(pool.kv_buffer[layer][loc], rows)
    latent, rope = pool.get_mla_kv_buffer(6, loc)
    assert torch.equal(bits(latent), rows[..., :132].contiguous())
    assert torch.equal(bits(rope), rows[..., 132:].contiguous())
    with pytest.raises(ShapeError, match="rows of this pool are packed"):
        pool.set_kv_buffer(5, loc, torch.zeros(2, 1, 148))


def test_what_cannot_be(make):
    for change, text in (
        ({"kv_cache_dim": 149}, "packed rows of .* have 148 bytes"),
        ({"skip_topk_layers": [True]}, "skip_topk_layers has 1 layers for layer_num=3"),
        ({"index_head_dim": 64}, "index_head_dim is 64"),
        ({"arrangement": "page_major"}, "a tensor a layer"),
    ):
        with pytest.raises(ValueError, match=text):
            DSAPool(**{**PACKED, **change})
    pool = make(DSAPool, **SHAPE)
    loc = torch.tensor([9, 4])
    with pytest.raises(ValueError, match="layer 6 has no index: skip_topk_layers"):
        pool.get_index_k_with_scale_buffer(6)
    for keys, scales, error in (
        (KEYS.float(), SCALES, ShapeError),
        (KEYS, SCALES.double(), ShapeError),
        (KEYS[:, :-1], SCALES, ShapeError),
        (KEYS, SCALES[:1], ShapeError),
    ):
        with pytest.raises(error):
            pool.set_index_k_scale_buffer(5, loc, keys, scales)
    with pytest.raises(SlotError):
        pool.set_index_k_scale_buffer(5, loc + 20, KEYS, SCALES)
    assert not any(region.any() for region in snapshot(pool))


def test_no_layer_need_have_an_index(make):
    pool = make(DSAPool, **{**SHAPE, "skip_topk_layers": [True] * 3})
    assert pool.get_state_buf_infos() == ([0] * 3, [0] * 3, [0] * 3)
    assert pool.get_cpu_copy(torch.tensor([4]))["index_k"] == [[], [], []]

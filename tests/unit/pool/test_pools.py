"""Pools against the numbers that SGLang's own pools show, and against the layout they claim."""

import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.errors import ConfigError, ResourceError  # noqa: E402
from pdxfer.pool import DraftLanes, PageMajorPool, TokenMajorPool  # noqa: E402

GOLDEN = {"size": 32, "page_size": 4, "head_num": 2, "head_dim": 8, "layer_num": 3}
POOLS = [TokenMajorPool, PageMajorPool]


@pytest.fixture
def make():
    """Makes pools, and closes them at the end."""
    pools = []

    def build(kind, **options):
        pools.append(kind(**{**GOLDEN, "dtype": torch.bfloat16, **options}))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def offsets(pool, buffers):
    base = pool.memory[0].address
    return [buffer.data_ptr() - base for buffer in buffers]


def raw_bytes(pool):
    """Every byte of every region, through no tensor."""
    return [ctypes.string_at(part.address, part.length_bytes) for part in pool.memory]


# -- golden numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "lens", "item_lens"),
    [
        ({}, [1152] * 6, [128] * 6),
        ({"v_head_dim": 4}, [1152] * 3 + [576] * 3, [128] * 3 + [64] * 3),
        ({"dtype": torch.float8_e4m3fn}, [576] * 6, [64] * 6),
    ],
    ids=["bf16", "narrow v", "fp8"],
)
def test_token_major_regions(make, options, lens, item_lens):
    pool = make(TokenMajorPool, **options)
    pointers, got_lens, got_items = pool.get_contiguous_buf_infos()
    assert (got_lens, got_items) == (lens, item_lens)
    assert pointers == [buffer.data_ptr() for buffer in pool.k_buffer + pool.v_buffer]
    assert [buffer.nbytes for buffer in pool.k_buffer + pool.v_buffer] == lens
    assert all(buffer.is_contiguous() for buffer in pool.k_buffer + pool.v_buffer)
    assert pool.k_buffer[0].shape == (36, 2, 8)
    assert pool.v_buffer[0].shape == (36, 2, options.get("v_head_dim", 8))


def test_token_major_regions_share_one_memfd_at_page_ends(make):
    pool = make(TokenMajorPool)
    assert [part.offset_bytes for part in pool.memory] == [4096 * index for index in range(6)]
    assert len({part.fd for part in pool.memory}) == 1
    assert offsets(pool, pool.k_buffer + pool.v_buffer) == [4096 * index for index in range(6)]


@pytest.mark.parametrize(
    ("v_head_dim", "raw", "k_offsets", "v_offsets", "page_stride"),
    [
        (8, 6912, [0, 256, 512], [128, 384, 640], 768),
        (4, 5184, [0, 192, 384], [128, 320, 512], 576),
    ],
)
def test_page_major_views(make, v_head_dim, raw, k_offsets, v_offsets, page_stride):
    pool = make(PageMajorPool, v_head_dim=v_head_dim)
    base = pool.memory[0].address
    assert pool.get_contiguous_buf_infos() == ([base], [raw], [page_stride])
    assert pool.memory[0].length_bytes == raw == 9 * page_stride
    assert offsets(pool, pool.k_buffer) == k_offsets
    assert offsets(pool, pool.v_buffer) == v_offsets
    for buffer, dim in [(pool.k_buffer[1], 8), (pool.v_buffer[1], v_head_dim)]:
        assert buffer.shape == (9, 4, 2, dim)
        assert buffer.stride() == (page_stride // 2, 2 * dim, dim, 1)


def test_page_size_one_is_one_slot_an_envelope(make):
    pool = make(PageMajorPool, size=32, page_size=1)
    assert pool.layout.item_lens == (192,)
    assert offsets(pool, pool.k_buffer) == [0, 64, 128]
    assert offsets(pool, pool.v_buffer) == [32, 96, 160]
    assert pool.k_buffer[0].shape == (33, 1, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("kind", POOLS)
def test_fp8_is_stored_as_bytes_and_viewed_back(make, kind, dtype):
    pool = make(kind, dtype=dtype)
    assert pool.k_buffer[0].dtype == pool.v_buffer[0].dtype == torch.uint8
    keys = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -0.25, 4.0, 8.0]).repeat(1, 2, 1)
    pool.set_kv_buffer(1, torch.tensor([9]), keys, -keys)
    page = pool.get_key_buffer(1).reshape(36, 2, 8)
    assert page.dtype == dtype
    assert torch.equal(page[9].float(), keys[0])
    assert torch.equal(pool.get_value_buffer(1).reshape(36, 2, 8)[9].float(), -keys[0])


# -- what is written is where the layout says --------------------------------------------------
@pytest.mark.parametrize("v_head_dim", [8, 4])
@pytest.mark.parametrize("kind", POOLS)
def test_written_rows_are_where_the_layout_says_and_nothing_else_changes(make, kind, v_head_dim):
    pool = make(kind, v_head_dim=v_head_dim, start_layer=5, total_kv_heads=8, head_first=4)
    generator = np.random.default_rng(7)
    expected = [bytearray(part.length_bytes) for part in pool.memory]
    slots = generator.permutation(32)[:11] + 4
    for layer in pool.layout.layers:
        rows = {}
        for part, dim in (("k", 8), ("v", v_head_dim)):
            bits = generator.integers(0, 1 << 15, (11, 2, dim), dtype=np.int16)
            rows[part] = torch.from_numpy(bits).view(torch.bfloat16)
            for position, slot in enumerate(slots):
                for head in range(2):
                    region, offset = pool.layout.locate(
                        part, layer=layer, slot=int(slot), head=4 + head
                    )
                    cell = bits[position, head].tobytes()
                    expected[region][offset : offset + len(cell)] = cell
        pool.set_kv_buffer(layer, torch.from_numpy(slots), rows["k"], rows["v"])
    assert raw_bytes(pool) == [bytes(region) for region in expected]
    assert pool.layout.layers == (5, 6, 7)


@pytest.mark.parametrize("kind", POOLS)
def test_reading_gives_back_what_was_written(make, kind):
    pool = make(kind)
    loc = torch.tensor([35, 4, 17])
    keys, values = torch.randn(2, 3, 2, 8).to(torch.bfloat16)
    pool.set_kv_buffer(2, loc, keys, values)
    got_keys, got_values = pool.get_kv_buffer(2)
    assert torch.equal(got_keys.reshape(36, 2, 8)[loc], keys)
    assert torch.equal(got_values.reshape(36, 2, 8)[loc], values)
    assert got_keys.data_ptr() == pool.get_key_buffer(2).data_ptr() == pool.k_buffer[2].data_ptr()


def test_layer_may_be_an_object(make):
    class Attention:
        layer_id = 6

    pool = make(PageMajorPool, start_layer=5)
    keys = torch.ones(1, 2, 8)
    pool.set_kv_buffer(Attention(), torch.tensor([4]), keys, keys)
    assert pool.k_buffer[1].sum() == 16
    assert pool.k_buffer[0].sum() == 0


# -- refusals ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 33}, "size=33 must be a positive multiple of page_size=4"),
        ({"size": 0}, "size=0"),
        ({"page_size": 0}, "page_size=0"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64"),
        ({"head_num": 0}, "kv_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"layer_num": 0}, "layers are"),
        ({"head_first": 1}, "total_kv_heads"),
    ],
)
def test_impossible_pools_are_refused(make, kind, options, text):
    with pytest.raises(ConfigError, match=text):
        make(kind, **options)


@pytest.mark.parametrize("layer", [-1, 3, 99])
@pytest.mark.parametrize("kind", POOLS)
def test_layers_that_are_not_here_are_refused(make, kind, layer):
    pool = make(kind)
    keys = torch.zeros(1, 2, 8)
    for call in (
        lambda: pool.get_key_buffer(layer),
        lambda: pool.get_value_buffer(layer),
        lambda: pool.set_kv_buffer(layer, torch.tensor([4]), keys, keys),
    ):
        with pytest.raises(ConfigError, match=f"layer {layer} is not in this pool"):
            call()


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize(
    ("loc", "keys", "values", "error"),
    [
        ([4, 5], (1, 2, 8), (2, 2, 8), ConfigError),
        ([4], (1, 2, 8), (1, 2, 4), ConfigError),
        ([4], (1, 1, 8), (1, 2, 8), ConfigError),
        ([[4]], (1, 2, 8), (1, 2, 8), ConfigError),
        ([4.0], (1, 2, 8), (1, 2, 8), ConfigError),
        ([-1], (1, 2, 8), (1, 2, 8), ConfigError),
        ([36], (1, 2, 8), (1, 2, 8), IndexError),
    ],
)
def test_wrong_rows_are_refused_and_write_nothing(make, kind, loc, keys, values, error):
    pool = make(kind)
    with pytest.raises(error):
        pool.set_kv_buffer(0, torch.tensor(loc), torch.ones(keys), torch.ones(values))
    assert not any(any(region) for region in raw_bytes(pool))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 24.0}, "size is 24.0"),
        ({"size": True, "page_size": True}, "size is True"),
        ({"size": "x"}, "size is 'x'"),
        ({"size": -4}, "size is -4"),
        ({"size": 0}, "size=0 must be a positive multiple"),
        ({"layer_num": 0}, "distinct ids from 0"),
        ({"layer_num": 2.0}, "layer_num is 2.0"),
        ({"layer_num": 10**12}, "over 65536 ids"),
        ({"start_layer": -1}, "start_layer is -1"),
        ({"layer_ids": [0, 1.5, 2]}, "layers have 1.5"),
        ({"draft": DraftLanes(layer_num=10**12, head_num=1, head_dim=8)}, "over 65536 ids"),
        ({"size": 4 << 60}, r"2\*\*63"),
        ({"size": 4 << 45}, "are needed"),
    ],
)
@pytest.mark.parametrize("kind", POOLS)
def test_sizes_that_no_pool_has(make, kind, options, text):
    with pytest.raises((ConfigError, ResourceError), match=text):
        make(kind, **options)


# -- memory ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", POOLS)
def test_memory_of_the_callers_is_used_and_left_open(make, kind):
    with memory.allocate(1 << 16) as shared:
        pool = make(kind, memory=shared)
        keys = torch.ones(1, 2, 8)
        pool.set_kv_buffer(0, torch.tensor([4]), keys, keys)
        assert pool.memory[0].address == shared.address
        assert pool.memory[0].owner is shared
        with pytest.raises(BufferError):
            shared.close()
        pool.close()
        pool.close()
        assert sum(shared.buffer[:]) > 0


@pytest.mark.parametrize("kind", POOLS)
def test_too_little_memory_is_refused(make, kind):
    with memory.allocate(1024) as shared, pytest.raises(ConfigError, match="has 1024 bytes"):
        make(kind, memory=shared)


@pytest.mark.parametrize("kind", POOLS)
def test_close_under_a_tensor_raises_and_the_pool_goes_on(make, kind):
    pool = make(kind)
    held = pool.get_key_buffer(0)
    with pytest.raises(BufferError):
        pool.close()
    keys = torch.ones(1, 2, 8)
    pool.set_kv_buffer(0, torch.tensor([4]), keys, keys)
    assert held.sum() == 16
    del held
    pool.close()
    pool.close()


@pytest.mark.parametrize("kind", POOLS)
def test_other_devices_are_plain_memory(make, kind):
    """`meta` stands for a GPU: memory that no daemon can map."""
    pool = make(kind, device="meta")
    assert {part.fd for part in pool.memory} == {-1}
    assert pool.k_buffer[0].device.type == "meta"
    assert len(pool.memory) == len(pool.layout.regions)
    with memory.allocate(1 << 16) as shared, pytest.raises(ConfigError, match="device=meta"):
        make(kind, device="meta", memory=shared)


def test_model_name_and_heads_are_in_the_layout(make):
    pool = make(PageMajorPool, model="llama@1", total_kv_heads=8, head_first=2)
    assert pool.layout.model == "llama@1"
    assert {(plane.head_first, plane.heads_total) for plane in pool.layout.planes} == {(2, 8)}
    assert pool.layout.unified_memory
    assert pool.layout.groups[0].reserved_pages == 1
    assert pool.layout.groups[0].pages == pool.pages == 9

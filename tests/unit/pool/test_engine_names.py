"""Constructor keywords, attributes and descriptions that code for SGLang's pools asks for."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HybridMambaPool,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    ShapeError,
    SparsePool,
    SWAPool,
    TokenMajorPool,
    UnifiedPool,
)
from tests.support.pools import DRAFT, FAMILIES, MLA, MX, SHAPE, STATE, state_pool  # noqa: E402

GIB = 1 << 30
KV_POOLS = [TokenMajorPool, PageMajorPool, UnifiedPool]


class Counter:
    """Stands for SGLang's `LayerDoneCounter`."""

    def __init__(self):
        self.waited = []

    def wait_until(self, threshold):
        self.waited.append(threshold)


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def window_pool(make, kind=TokenMajorPool, **more):
    own = {**SHAPE, "layer_num": 3, **more}
    del own["start_layer"]
    return make(
        SWAPool.of_sizes,
        **own,
        size_swa=8,
        swa_attention_layer_ids=[1, 3],
        full_attention_layer_ids=[0, 2, 4],
        pool_class=kind,
    )


class TestKeywords:
    @pytest.mark.parametrize("kind", KV_POOLS)
    @pytest.mark.parametrize("end_layer", [7, 8, None])
    def test_end_layer_is_the_last_or_the_one_behind(self, make, kind, end_layer):
        pool = make(kind, **SHAPE, end_layer=end_layer)
        assert pool.end_layer == (7 if end_layer is None else end_layer)
        assert pool.layout.layers == (5, 6, 7)

    @pytest.mark.parametrize("end_layer", [6, 9, 2, True, "7"])
    def test_another_end_layer_is_refused(self, end_layer):
        with pytest.raises(ValueError, match=r"end_layer=.* layers of the pool are 5 to 7"):
            TokenMajorPool(**SHAPE, end_layer=end_layer)
        with pytest.raises(ValueError, match=r"end_layer=.* layers of the pool are 0 to 2"):
            MLAPool(**MLA, end_layer=end_layer if end_layer != 2 else 0)

    def test_an_end_behind_the_last_leaves_the_draft_where_it_was(self, make):
        pool = make(TokenMajorPool, **SHAPE, end_layer=8,
                    draft=type(DRAFT)(layer_num=1, head_num=1, head_dim=8))  # fmt: skip
        assert pool.draft_layer_ids == (8,)

    @pytest.mark.parametrize("copy", [True, False])
    def test_enable_kv_cache_copy_changes_nothing(self, make, copy):
        pool = make(TokenMajorPool, **SHAPE, enable_kv_cache_copy=copy, enable_memory_saver=False)
        pool.set_kv_buffer(5, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 16))
        pool.move_kv_cache(torch.tensor([9]), torch.tensor([4]))
        assert pool.k_buffer[0][9].all()

    def test_all_kinds_take_them(self, make):
        more = {"enable_memory_saver": False, "enable_kv_cache_copy": True}
        make(MXFP8Pool, **MX, **more, end_layer=8)
        make(SparsePool, **SHAPE, **more, index_head_dim=12, end_layer=7)
        make(MLAPool, **MLA, enable_memory_saver=False, end_layer=3)
        make(state_pool, enable_memory_saver=False)
        assert window_pool(make, end_layer=5, **more).layout.layers == (0, 1, 2, 3, 4)
        with pytest.raises(ValueError, match="end_layer=3"):
            window_pool(make, end_layer=3)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: TokenMajorPool(**SHAPE, enable_memory_saver=True),
            lambda: MLAPool(**MLA, enable_memory_saver=True),
            lambda: state_pool(enable_memory_saver=True),
        ],
    )
    def test_a_memory_saver_is_refused(self, build):
        with pytest.raises(ConfigError, match="enable_memory_saver=True: a pool that an agent"):
            build()


class TestSizes:
    @pytest.mark.parametrize("kind", KV_POOLS)
    def test_get_kv_size_bytes_are_those_of_the_buffers(self, make, kind):
        pool = make(kind, **SHAPE)
        assert pool.get_kv_size_bytes() == (nbytes(pool.k_buffer), nbytes(pool.v_buffer))
        assert pool.get_kv_size_bytes() == (28 * 3 * 2 * 8 * 2, 28 * 3 * 2 * 16 * 2)
        assert pool.mem_usage == sum(pool.get_kv_size_bytes()) / GIB

    def test_with_scales_drafts_and_an_index(self, make):
        pool = make(MXFP8Pool, **MX)
        assert pool.get_kv_size_bytes() == (28 * 3 * 2 * 33, 28 * 3 * 2 * 66)
        pool = make(FAMILIES["draft"]["unified"])
        assert pool.get_kv_size_bytes()[0] == 28 * (3 * 2 + 2) * 8 * 2
        pool = make(FAMILIES["sparse"]["page"])
        assert pool.get_kv_size_bytes()[0] == 28 * (3 * 2 * 8 + 2 * 12) * 2

    def test_of_latents_and_states(self, make):
        pool = make(MLAPool, **MLA)
        assert pool.get_kv_size_bytes() == nbytes(pool.kv_buffer)
        assert pool.mem_usage == pool.get_kv_size_bytes() / GIB
        states = make(state_pool)
        assert states.get_kv_size_bytes() == nbytes([*states.conv, states.temporal])
        assert states.mem_usage == states.get_kv_size_bytes() / GIB

    def test_of_two_pools(self, make):
        pool = window_pool(make)
        halves = [half.get_kv_size_bytes() for half in (pool.full_kv_pool, pool.swa_kv_pool)]
        assert pool.get_kv_size_bytes() == tuple(map(sum, zip(*halves, strict=True)))
        assert pool.mem_usage == sum(pool.get_kv_size_bytes()) / GIB
        full = make(MLAPool, **MLA)
        hybrid = make(HybridMambaPool, full_kv_pool=full, mamba_pool=make(state_pool, group="s"))
        assert hybrid.get_kv_size_bytes() == full.get_kv_size_bytes()
        assert hybrid.mem_usage == full.mem_usage


class TestAddresses:
    @pytest.mark.parametrize(
        ("kind", "k_step", "v_step"),
        [(TokenMajorPool, 32, 64), (PageMajorPool, 1152, 1152), (UnifiedPool, 288, 288)],
    )
    def test_data_ptrs_and_strides(self, make, kind, k_step, v_step):
        pool = make(kind, **SHAPE)
        buffers = pool.k_buffer + pool.v_buffer
        assert pool.data_ptrs.dtype == torch.uint64
        assert pool.data_ptrs.tolist() == [b.data_ptr() for b in buffers]
        assert pool.k_data_ptrs.tolist() == pool.data_ptrs.tolist()[:3]
        assert pool.v_data_ptrs.tolist() == pool.data_ptrs.tolist()[3:]
        assert pool.data_strides.tolist() == [k_step] * 3 + [v_step] * 3
        held = pool.k_buffer[0]
        with pytest.raises(BufferError):
            pool.close()
        assert pool.data_ptrs.tolist() == [b.data_ptr() for b in pool.k_buffer + pool.v_buffer]
        del held, buffers
        pool.close()
        assert pool.data_ptrs.numel() == 0

    def test_of_latents_and_quantised_rows(self, make):
        pool = make(MLAPool, **MLA)
        assert pool.data_ptrs.tolist() == [b.data_ptr() for b in pool.kv_buffer]
        pool = make(MXFP8Pool, **MX)
        assert pool.data_ptrs.tolist() == [b.data_ptr() for b in pool.k_buffer + pool.v_buffer]
        assert pool.store_dtype == pool.k_buffer[0].dtype == torch.float8_e4m3fn
        assert pool.get_key_buffer(5).dtype == torch.float8_e4m3fn

    def test_scale_buffers(self, make):
        pool = make(MXFP8Pool, **MX)
        k, v = pool.get_kv_scale_buffer(6)
        assert (k.shape, v.shape) == ((28, 2, 1), (28, 2, 2))
        assert k.data_ptr() == pool.k_scale_buffer[1].data_ptr()
        tiles = make(MXFP8Pool, **{**MX, "size": 256, "page_size": 128})
        k, v = tiles.get_kv_scale_buffer(5)
        assert (k.shape, v.shape) == ((3, 2, 32, 4, 1), (3, 2, 32, 4, 2))
        assert k.dtype == v.dtype == torch.float8_e8m0fnu
        tiles.rows("v_scale", 5).scatter(
            torch.tensor([128 + 70]), torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8)
        )
        assert v.view(torch.uint8)[1, :, 70 % 32, 70 // 32].tolist() == [[1, 2], [3, 4]]

    def test_kv_cache_layout(self, make):
        names = [make(kind, **SHAPE).kv_cache_layout for kind in KV_POOLS]
        assert names == ["nhd", "page_major", "page_major"]
        assert make(MXFP8Pool, **MX).kv_cache_layout == "nhd"
        assert make(FAMILIES["sparse"]["page"]).kv_cache_layout == "page_major"


class TestLayerCounter:
    @pytest.mark.parametrize("kind", KV_POOLS)
    def test_reads_wait_for_the_place_of_the_layer(self, make, kind):
        pool = make(kind, **SHAPE)
        counter = Counter()
        pool.register_layer_transfer_counter(counter)
        pool.get_key_buffer(7)
        pool.get_value_buffer(5)
        pool.get_kv_buffer(6)
        assert counter.waited == [2, 0, 1, 1]
        pool.set_kv_buffer(5, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 16))
        pool.get_cpu_copy(torch.tensor([4]))
        assert len(counter.waited) == 4
        pool.register_layer_transfer_counter(None)
        pool.get_key_buffer(7)
        assert len(counter.waited) == 4

    def test_of_other_pools(self, make):
        counter = Counter()
        latent = make(MLAPool, **MLA)
        latent.register_layer_transfer_counter(counter)
        latent.get_kv_buffer(1)
        latent.get_mla_kv_buffer(2, torch.tensor([4]))
        assert counter.waited == [1, 1, 2]
        sparse = make(FAMILIES["sparse"]["token"])
        sparse.register_layer_transfer_counter(counter)
        sparse.get_index_k_buffer(7)
        scaled = make(FAMILIES["mxfp8"]["flat"])
        scaled.register_layer_transfer_counter(counter)
        scaled.get_kv_scale_buffer(6)
        assert counter.waited[3:] == [2, 1]

    def test_two_pools_wait_once_and_count_the_layers_of_both(self, make):
        counter = Counter()
        pool = window_pool(make)
        pool.full_kv_pool.register_layer_transfer_counter(counter)
        pool.register_layer_transfer_counter(counter)
        pool.get_key_buffer(2)
        pool.get_value_buffer(3)
        pool.get_kv_buffer(4)
        assert counter.waited == [2, 3, 4]
        full = make(TokenMajorPool, **{**SHAPE, "layer_num": 1, "layer_ids": [2]})
        hybrid = make(HybridMambaPool, full_kv_pool=full, mamba_pool=make(state_pool))
        hybrid.register_layer_transfer_counter(counter)
        hybrid.get_key_buffer(2)
        assert counter.waited[3:] == [1]


class TestDevicePoolInfos:
    @pytest.mark.parametrize(
        ("kind", "layout"),
        [(TokenMajorPool, "nhd"), (PageMajorPool, "paged_nhd"), (UnifiedPool, "nhd")],
    )
    def test_of_keys_and_values(self, make, kind, layout):
        pool = make(kind, **SHAPE)
        (info,) = pool.get_device_pool_infos()
        assert (info.pool_name, info.indices_from_pool, info.layer_ids) == ("kv", "kv", (5, 6, 7))
        of = info.buffer_info
        assert (of.page_size, of.head_num, of.head_dim, of.v_head_dim) == (4, 2, 8, 16)
        assert (of.dtype, of.device, of.scales) == (torch.bfloat16, torch.device("cpu"), None)
        assert of.buffers.layout == layout
        assert [b.data_ptr() for b in of.buffers.k] == pool.k_data_ptrs.tolist()
        assert of.buffers.v_data_ptrs.tolist() == pool.v_data_ptrs.tolist()
        del info, of

    def test_of_scales_and_a_draft(self, make):
        pool = make(MXFP8Pool, **MX)
        (info,) = pool.get_device_pool_infos()
        assert info.buffer_info.scales.layout == "token"
        assert info.buffer_info.dtype == torch.float8_e4m3fn
        assert len(info.buffer_info.scales.v) == 3
        tiles = make(MXFP8Pool, **{**MX, "size": 128, "page_size": 128})
        assert tiles.get_device_pool_infos()[0].buffer_info.scales.layout == "mxfp8_interleaved"
        draft = make(FAMILIES["draft"]["page"]).get_device_pool_infos()[1]
        assert (draft.pool_name, draft.layer_ids) == ("draft", (40, 41))
        assert (draft.buffer_info.head_num, draft.buffer_info.v_head_dim) == (1, 8)
        del info, draft

    def test_of_latents_states_and_both(self, make):
        latent, states = make(MLAPool, **MLA), make(state_pool)
        hybrid = make(HybridMambaPool, full_kv_pool=latent, mamba_pool=states)
        kv, mamba = hybrid.get_device_pool_infos()
        assert kv.buffer_info.kv_cache_dim == 24
        assert kv.buffer_info.layer_indices == (0, 1, 2)
        assert kv.buffer_info.data_ptrs.tolist() == latent.data_ptrs.tolist()
        assert (mamba.pool_name, mamba.layer_ids) == ("mamba", (1, 3))
        assert [tuple(t.shape[2:]) for t in mamba.buffer_info.conv] == [t.shape for t in STATE[:2]]
        assert mamba.buffer_info.temporal.data_ptr() == states.temporal.data_ptr()
        del kv, mamba

    def test_of_a_window(self, make):
        full, swa = window_pool(make).get_device_pool_infos()
        assert (full.pool_name, swa.pool_name) == ("kv", "swa")
        assert (full.layer_ids, swa.layer_ids) == ((0, 2, 4), (1, 3))
        del full, swa

    def test_index_keys_are_not_lost_in_silence(self, make):
        pool = make(FAMILIES["sparse"]["token"])
        with pytest.raises(ConfigError, match="no place for index keys"):
            pool.get_device_pool_infos()
        assert len(pool.get_contiguous_buf_infos()[0]) == 6
        addresses, lengths, items = pool.get_index_k_state_buf_infos()
        assert addresses == [pool.rows("index_k", layer).view.data_ptr() for layer in (5, 7)]
        assert (lengths, items) == ([28 * 24] * 2, [4 * 24] * 2)


def test_a_refused_keyword_is_a_shape_error():
    with pytest.raises(ShapeError):
        TokenMajorPool(**SHAPE, enable_memory_saver=True)

"""Addresses, lengths, strides and bytes that engines' own pools have for the same shapes."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.layout.builders.state import StateTensor, state_entry_bytes  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HostPool,
    HybridMambaPool,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    StatePool,
    TokenMajorPool,
    UnifiedPool,
)
from pdxfer.pool.unified import share_buffer  # noqa: E402

DEVICE = {"size": 32, "page_size": 4, "head_num": 4, "head_dim": 8, "layer_num": 3}
PAGES = 17  # 68 tokens


@pytest.fixture
def make():
    """Makes pools, and closes them at the end."""
    pools = []

    def build(kind, *positional, **options):
        pools.append(kind(*positional, **options))
        return pools[-1]

    yield build
    for pool in reversed(pools):
        pool.close()


def host_pool(make, layout, **options):
    device = make(TokenMajorPool, **{**DEVICE, "dtype": torch.bfloat16, **options})
    return make(HostPool, device, layout=layout, pages=PAGES)


def token_ids(*first):
    return torch.cat([torch.arange(index, index + 4) for index in first])


def offsets(pool, addresses):
    base = pool.memory[0].address
    return [address - base for address in addresses]


class TestSplitHeads:
    def test_one_width(self, make):
        host = host_pool(make, "page_head")
        addresses, lengths = host.get_split_heads_page_buffer_meta(token_ids(4, 8), 2)
        assert offsets(host, addresses) == [
            768, 13824, 1152, 14208, 1536, 14592, 1920, 14976,
        ]  # fmt: skip
        assert lengths == [384] * 8

    def test_two_widths(self, make):
        host = host_pool(make, "page_head", v_head_dim=16)
        addresses, lengths = host.get_split_heads_page_buffer_meta(token_ids(4), 2)
        values = 68 * 3 * 4 * 8 * 2  # after the keys of 68 tokens
        assert offsets(host, addresses) == [768, values + 1536, 1152, values + 1536 + 768]
        assert lengths == [384, 768] * 2

    def test_one_group_is_the_page(self, make):
        host = host_pool(make, "page_head")
        ids = token_ids(4, 8, 0)
        assert host.get_split_heads_page_buffer_meta(ids, 1) == host.get_page_buffer_meta(ids)


class TestPageBufferMeta:
    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
    def test_keys_then_values_of_a_page(self, make, layout):
        host = host_pool(make, layout)
        addresses, lengths = host.get_page_buffer_meta(token_ids(4, 8))
        values = 3 * 68 * 4 * 8 * 2
        assert offsets(host, addresses) == [768, 768 + values, 1536, 1536 + values]
        assert lengths == [768] * 4

    def test_layer_first_has_a_pair_a_layer(self, make):
        host = host_pool(make, "layer_first")
        addresses, lengths = host.get_page_buffer_meta(token_ids(8))
        layer, values = 68 * 4 * 8 * 2, 3 * 68 * 4 * 8 * 2
        assert offsets(host, addresses) == [
            512, values + 512, layer + 512, values + layer + 512,
            2 * layer + 512, values + 2 * layer + 512,
        ]  # fmt: skip
        assert lengths == [256] * 6

    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
    def test_two_widths(self, make, layout):
        host = host_pool(make, layout, v_head_dim=16)
        addresses, lengths = host.get_page_buffer_meta(token_ids(4, 8))
        values = 3 * 68 * 4 * 8 * 2
        assert offsets(host, addresses) == [768, values + 1536, 1536, values + 3072]
        assert lengths == [768, 1536] * 2

    def test_page_unified_is_one_run(self, make):
        host = host_pool(make, "page_unified")
        addresses, lengths = host.get_page_buffer_meta(token_ids(4, 0))
        assert offsets(host, addresses) == [1536, 0]
        assert lengths == [1536, 1536]

    @pytest.mark.parametrize(
        ("layout", "count", "length"),
        [("layer_first", 3, 192), ("page_first", 1, 576), ("page_first_direct", 1, 576)],
    )
    def test_latent_rows(self, make, layout, count, length):
        device = make(
            MLAPool, size=32, page_size=4, dtype=torch.bfloat16, kv_lora_rank=16,
            qk_rope_head_dim=8, layer_num=3,
        )  # fmt: skip
        host = make(HostPool, device, layout=layout, pages=PAGES)
        assert host.get_page_buffer_meta(token_ids(4))[1] == [length] * count


def test_latent_regions(make):
    pool = make(
        MLAPool, size=32, page_size=4, dtype=torch.bfloat16, kv_lora_rank=16,
        qk_rope_head_dim=8, layer_num=3,
    )  # fmt: skip
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert (lengths, items) == ([1728] * 3, [192] * 3)
    assert pointers == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert pool.kv_buffer[0].shape == (36, 1, 24)
    assert pool.get_value_buffer(1).shape == (36, 1, 16)
    assert pool.get_value_buffer(1).data_ptr() == pool.get_key_buffer(1).data_ptr()


class TestUnifiedMemory:
    """Two KV heads of 8, three layers, and states of two other layers in the same buffer."""

    TENSORS = (
        StateTensor("conv.0", (16, 3), "bfloat16"),
        StateTensor("temporal", (4, 8, 16), "float32"),
    )

    @pytest.fixture
    def pool(self, make):
        shares = share_buffer(
            1 << 16, {"full": (192, 4), "state": (state_entry_bytes(2, self.TENSORS), 1)}
        )
        assert shares == {"full": (85, 6), "state": (15, 1)}
        with memory.allocate(1 << 16) as shared:
            full = make(
                UnifiedPool, size=(85 - 6) * 4, page_size=4, dtype=torch.bfloat16, head_num=2,
                head_dim=8, layer_num=3, reserved_pages=6, memory=shared, buffer_bytes=1 << 16,
            )  # fmt: skip
            state = make(
                StatePool, size=14, tensors=self.TENSORS, layer_ids=(3, 4), memory=shared,
                buffer_bytes=1 << 16, arrangement="unified_entries",
            )  # fmt: skip
            yield make(HybridMambaPool, full_kv_pool=full, mamba_pool=state)
            full.close()
            state.close()

    def test_entries(self, pool):
        base = pool.memory[0].address
        full, state = pool.full_kv_pool, pool.mamba_pool
        assert [k.data_ptr() - base for k in full.k_buffer] == [0, 64, 128]
        assert [v.data_ptr() - base for v in full.v_buffer] == [32, 96, 160]
        assert full.k_buffer[0].stride() == (96, 8, 1)
        assert full.k_buffer[0].shape == (340, 2, 8)
        assert state_entry_bytes(2, self.TENSORS) == 4288
        assert state.conv[0].stride(1) == 2144
        assert state.temporal.data_ptr() - base == 48 * 4
        assert state.temporal.stride(1) == 1072
        assert state.conv[0].shape == (2, 15, 16, 3)

    def test_one_region(self, pool):
        assert pool.get_contiguous_buf_infos()[2] == [768]
        assert pool.get_state_buf_infos()[2] == [4288]
        assert len(pool.layout.regions) == len(pool.memory) == 1
        assert pool.layout.item_lens == (768,)
        assert pool.layout.unified_memory
        assert [group.reserved_pages for group in pool.layout.groups] == [6, 1]

    def test_a_buffer_of_reserved_bytes_alone_is_refused(self):
        with pytest.raises(ConfigError, match="of which 2 are reserved"):
            share_buffer(1024, {"full": (192, 4), "state": (1024, 1)})


def test_static_state_has_an_item_a_tensor_and_layer(make):
    state = make(StatePool, size=4, tensors=TestUnifiedMemory.TENSORS, layer_ids=(3, 4))
    pointers, lengths, items = state.get_contiguous_buf_infos()
    assert items == [96, 96, 2048, 2048]
    assert lengths == [5 * item for item in items]
    tensors = [state.conv[0][0], state.conv[0][1], state.temporal[0], state.temporal[1]]
    assert pointers == [tensor.data_ptr() for tensor in tensors]
    assert all(tensor.is_contiguous() for tensor in tensors)


class TestMxfp8Scales:
    def test_flat_scales_are_rows(self, make):
        pool = make(
            MXFP8Pool, size=32, page_size=4, dtype=torch.float8_e4m3fn, head_num=2, head_dim=64,
            layer_num=3,
        )  # fmt: skip
        assert pool.get_contiguous_buf_infos()[1:] == ([36 * 128] * 6, [4 * 128] * 6)
        assert pool.get_kv_scale_buf_infos()[1:] == ([36 * 4] * 6, [4 * 4] * 6)

    @pytest.mark.parametrize(("token", "place"), [(0, 0), (1, 4), (32, 1), (33, 5), (127, 127)])
    def test_scales_of_pages_of_128_are_interleaved(self, make, token, place):
        pool = make(
            MXFP8Pool, size=128, page_size=128, dtype=torch.float8_e4m3fn, head_num=2, head_dim=64,
            layer_num=1,
        )  # fmt: skip
        rows = torch.zeros(1, 2, 64).to(torch.float8_e4m3fn)
        scales = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8)
        pool.set_kv_buffer(0, torch.tensor([128 + token]), rows, rows, scales, scales + 4)
        tiles = pool.layout.regions[2].length_bytes // 2
        stored = bytes(_region(pool, 2)[tiles:])  # page 1: [heads, 32, 4, 2]
        assert stored[place * 2 : place * 2 + 2] == bytes([1, 2])
        assert stored[256 + place * 2 : 256 + place * 2 + 2] == bytes([3, 4])
        assert sum(stored) == 10


def _region(pool, number):
    part = pool.memory[number]
    return memoryview(part.owner.buffer)[
        part.offset_bytes : part.offset_bytes + part.length_bytes
    ].tobytes()


@pytest.mark.parametrize("kind", [TokenMajorPool, PageMajorPool, UnifiedPool])
def test_only_the_accepted_rows_of_a_block_are_committed(make, kind):
    pool = make(kind, **{**DEVICE, "dtype": torch.bfloat16})
    loc = torch.tensor([[4, 5, 6], [12, 13, 14]])
    rows = torch.arange(6 * 4 * 8).reshape(6, 4, 8).to(torch.bfloat16) + 1
    pool.set_kv_buffer_prefix_valid(1, loc, torch.tensor([2, 0]), rows, -rows)
    for layer in range(3):
        keys, values = (part.reshape(36, 4, 8) for part in pool.get_kv_buffer(layer))
        changed = [4, 5] if layer == 1 else []
        assert keys.flatten(1).any(dim=1).nonzero().flatten().tolist() == changed
        assert torch.equal(keys[changed], rows[: len(changed)])
        assert torch.equal(values[changed], -rows[: len(changed)])

"""Host pools: sizes, pages as bytes, what is refused, and the page allocator."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.errors import ConfigError, ResourceError  # noqa: E402
from pdxfer.layout.builders import table  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HostPool,
    PageMajorPool,
    ShapeError,
    SlotError,
    TokenMajorPool,
    host,
)
from pdxfer.pool.page_allocator import PageAllocator  # noqa: E402
from tests.support.pools import (  # noqa: E402
    FAMILIES,
    MX,
    SHAPE,
    STATE,
    assert_memory,
    fill,
    snapshot,
    state_pool,
)

TOKEN_BYTES = 3 * 2 * (8 + 16) * 2


@pytest.fixture
def device(make):
    return make(PageMajorPool, **SHAPE)


class TestSizes:
    def test_by_ratio_of_the_usable_slots(self, make, device):
        pool = make(HostPool, device, 2.0)
        assert pool.page_num == 24 * 2 // 4 + 1
        assert pool.size == 52
        assert pool.size_per_token == TOKEN_BYTES
        assert pool.layout.groups[0].pages == 13
        assert pool.layout.groups[0].reserved_pages == 0
        assert not pool.layout.unified_memory

    def test_by_decimal_gigabytes(self, make, device):
        pool = make(HostPool, device, host_size=1e-5, page_size=2, layout="layer_first")
        slots = int(1e4 // TOKEN_BYTES)
        assert pool.page_num == slots // 2 + 1
        assert pool.page_size == 2

    def test_more_than_there_is_is_refused_before_it_is_touched(self, device, monkeypatch):
        monkeypatch.setattr(host, "available_bytes", lambda: 10_000)
        with pytest.raises(ResourceError) as raised:
            HostPool(device, pages=2000)
        assert str(raised.value) == (
            "Not enough host memory available. Requesting 0.00 GB but only have 0.00 GB free. "
            "Please reduce the size of the hierarchical cache."
        )

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"host_to_device_ratio": float("nan")}, "come to nan slots"),
            ({"host_to_device_ratio": float("inf")}, "come to inf slots"),
            ({"host_to_device_ratio": -1.0}, "come to -24.0 slots"),
            ({"host_size": 1e300}, "host_size=1e"),
            ({"page_size": 0}, "page_size is 0"),
            ({"page_size": 2.0}, "page_size is 2.0"),
            ({"pages": 0}, "pages is 0"),
            ({"pages": True}, "pages is True"),
        ],
    )
    def test_sizes_that_no_host_has(self, device, options, text):
        with pytest.raises(ConfigError, match=text):
            HostPool(device, **options)

    def test_memory_of_the_callers(self, make, device):
        with memory.allocate(1 << 14) as shared:
            pool = make(HostPool, device, pages=4, memory=shared)
            assert pool.memory[0].address == shared.address
            pool.close()


class TestRegions:
    @pytest.mark.parametrize(
        ("layout", "lengths"),
        [
            ("layer_first", [5 * 4 * 2 * 8 * 2] * 3 + [5 * 4 * 2 * 16 * 2] * 3),
            ("page_first", [5 * 4 * 3 * 2 * 8 * 2, 5 * 4 * 3 * 2 * 16 * 2]),
            ("page_unified", [5 * 4 * TOKEN_BYTES]),
        ],
    )
    def test_regions_lie_one_behind_the_other_in_one_memfd(self, make, device, layout, lengths):
        pool = make(HostPool, device, layout=layout, pages=5)
        assert [part.length_bytes for part in pool.memory] == lengths
        assert [part.offset_bytes for part in pool.memory] == [
            sum(lengths[:index]) for index in range(len(lengths))
        ]
        assert len({part.fd for part in pool.memory}) == 1
        assert pool.memory[0].fd >= 0
        items = pool.get_contiguous_buf_infos()[2]
        assert [5 * item for item in items] == lengths

    def test_closing_under_a_tensor_raises_and_the_pool_goes_on(self, make, device):
        pool = make(HostPool, device, pages=5)
        held = pool.rows("k", 5).view
        with pytest.raises(BufferError):
            pool.close()
        loc = torch.tensor([0])
        device.set_kv_buffer(5, loc, torch.ones(1, 2, 8), torch.ones(1, 2, 16))
        pool.backup_from_device_all_layer(device, loc, loc)
        assert held.any()
        del held
        pool.close()
        pool.close()


class TestFlatPages:
    @pytest.mark.parametrize("layout", table.names(table.HOST))
    def test_keys_then_values(self, make, device, layout):
        pool = make(HostPool, device, layout=layout, pages=5)
        loc = torch.arange(8, 12)
        for layer in (5, 6, 7):
            keys = torch.full((4, 2, 8), float(layer))
            device.set_kv_buffer(layer, loc, keys, torch.full((4, 2, 16), -float(layer)))
        pool.backup_from_device_all_layer(device, loc + 4, loc)
        page = pool.get_data_page(12)
        assert page.dtype == torch.bfloat16
        assert page.shape == (4 * TOKEN_BYTES // 2,)
        keys, values = page[: 4 * 3 * 2 * 8], page[4 * 3 * 2 * 8 :]
        assert sorted(keys.tolist()) == sorted([5.0, 6.0, 7.0] * 64)
        assert sorted(values.tolist()) == sorted([-5.0, -6.0, -7.0] * 128)
        dummy = pool.get_dummy_flat_data_page()
        assert (dummy.shape, dummy.dtype) == (page.shape, page.dtype)
        assert not dummy.any()
        pool.set_from_flat_data_page(0, page)
        assert torch.equal(pool.get_data_page(0), page)
        pool.set_from_flat_data_page(4, page.view(torch.uint8))
        assert torch.equal(pool.get_data_page(4), page)

    def test_of_equal_widths_it_is_the_engines_own_order(self, make):
        device = make(TokenMajorPool, **{**SHAPE, "v_head_dim": 8})
        pool = make(HostPool, device, layout="page_first", pages=3)
        fill(pool)
        values = (2, 3 * 4, 3, 2, 8)
        whole = torch.from_numpy(_all_bytes(pool)).view(torch.bfloat16).reshape(values)
        expected = whole[:, 4:8].reshape(-1)
        assert torch.equal(pool.get_data_page(4).view(torch.uint8), expected.view(torch.uint8))

    def test_a_page_with_scales_is_bytes(self, make):
        device = make(FAMILIES["mxfp8"]["flat"])
        pool = make(HostPool, device, pages=3)
        page = pool.get_data_page(4)
        assert page.dtype == torch.uint8
        assert len(page) == 4 * 3 * 2 * (32 + 64 + 1 + 2)
        assert MX["head_dim"] == 32

    @pytest.mark.parametrize("index", [2, -4, 20])
    def test_indices_that_begin_no_page_are_refused(self, make, device, index):
        pool = make(HostPool, device, pages=5)
        page = pool.get_dummy_flat_data_page()
        for call in (
            lambda: pool.get_data_page(index),
            lambda: pool.set_from_flat_data_page(index, page),
        ):
            with pytest.raises(SlotError, match=f"index {index} is not the first of 4 tokens"):
                call()

    @pytest.mark.parametrize("index", [4.0, 4.5, "4", None])
    def test_indices_that_are_no_ints_are_refused(self, make, device, index):
        pool = make(HostPool, device, pages=5)
        for call in (
            lambda: pool.get_data_page(index),
            lambda: pool.set_from_flat_data_page(index, pool.get_dummy_flat_data_page()),
        ):
            with pytest.raises(ShapeError, match="an int, is needed"):
                call()
        assert torch.equal(pool.get_data_page(torch.tensor(4)), pool.get_data_page(4))

    def test_other_lengths_and_types_are_refused(self, make, device):
        pool = make(HostPool, device, pages=5)
        fill(pool)
        before = snapshot(pool)
        page = pool.get_dummy_flat_data_page()
        for wrong in (page[:-1], torch.cat([page, page]), page.view(torch.int16)):
            with pytest.raises(ShapeError, match="a page has 1152 of torch"):
                pool.set_from_flat_data_page(0, wrong)
        with pytest.raises(ShapeError, match="flat=True"):
            pool.get_data_page(0, flat=False)
        assert_memory(pool, before)


def _all_bytes(pool):
    import numpy as np

    return np.concatenate(snapshot(pool))


class TestAddresses:
    def test_whole_pages_of_the_pool_are_needed(self, make, device):
        pool = make(HostPool, device, layout="page_head", pages=5)
        for indices, error, text in (
            (torch.arange(3), ShapeError, "has 3 token ids, no multiple of page_size=4"),
            (torch.arange(2, 6), SlotError, "index 2 is not the first of 4"),
            (torch.arange(20, 24), SlotError, "indices has slot 23"),
        ):
            for call in (
                lambda i=indices: pool.get_page_buffer_meta(i),
                lambda i=indices: pool.get_split_heads_page_buffer_meta(i, 2),
            ):
                with pytest.raises(error, match=text):
                    call()

    @pytest.mark.parametrize("factor", [0, -1, 3, 4])
    def test_head_groups_must_be_equal(self, make, device, factor):
        pool = make(HostPool, device, layout="page_head", pages=5)
        with pytest.raises(ShapeError, match=f"split_factor={factor} must divide the 2 heads of k"):
            pool.get_split_heads_page_buffer_meta(torch.arange(4), factor)

    @pytest.mark.parametrize(
        "layout", [name for name in table.names(table.HOST) if name != "page_head"]
    )
    def test_heads_lie_together_in_page_head_alone(self, make, device, layout):
        pool = make(HostPool, device, layout=layout, pages=5)
        with pytest.raises(ValueError, match="requires layout='page_head', got"):
            pool.get_split_heads_page_buffer_meta(torch.arange(4), 2)

    def test_a_rank_with_other_heads(self, make, device):
        """Heads 2 and 3 of 6 are here: groups go by the heads of the rank."""
        pool = make(HostPool, device, layout="page_head", pages=5)
        addresses, lengths = pool.get_split_heads_page_buffer_meta(torch.arange(4, 8), 2)
        base = pool.memory[0].address
        keys, values = 4 * 3 * 8 * 2, 4 * 3 * 16 * 2  # of one head of a page
        value_base = 5 * 2 * keys
        assert [address - base for address in addresses] == [
            2 * keys, value_base + 2 * values, 3 * keys, value_base + 3 * values,
        ]  # fmt: skip
        assert lengths == [keys, values] * 2


class TestCopies:
    def test_what_does_not_fit_is_refused_and_writes_nothing(self, make, device):
        pool = make(HostPool, device, pages=5)
        fill(pool)
        fill(device)
        before = snapshot(pool), snapshot(device)
        one, two = torch.tensor([4]), torch.tensor([4, 5])
        wide = make(TokenMajorPool, **{**SHAPE, "head_dim": 16})
        more = make(TokenMajorPool, **{**SHAPE, "layer_num": 4})
        for arguments, text in (
            ((device, one, two), "1 host_indices for 2 device_indices"),
            ((device, torch.tensor([20]), one), "host_indices has slot 20"),
            ((device, one, torch.tensor([28])), "device_indices has slot 28"),
            ((device, one, one, "kernel_ascend"), "Unsupported IO backend: kernel_ascend"),
            ((wide, one, one), r"k of layer 5 is 2 x 8 .* here, 2 x 16"),
            ((more, one, one), "part k of layer 8 is in one of the two pools only"),
        ):
            with pytest.raises(ConfigError, match=text):
                pool.backup_from_device_all_layer(*arguments)
            with pytest.raises(ConfigError, match=text):
                pool.load_to_device_per_layer(*arguments[:3], 0, *arguments[3:])
        with pytest.raises(SlotError, match="layer_id 3 is outside 0 to 2"):
            pool.load_to_device_per_layer(device, one, one, 3)
        assert_memory(pool, before[0])
        assert_memory(device, before[1])

    def test_another_layout_of_the_same_parts_is_loaded(self, make, device):
        pool = make(HostPool, device, pages=5)
        fill(pool)
        other = make(TokenMajorPool, **SHAPE)
        loc = torch.tensor([9, 4, 17])
        for number in range(3):
            pool.load_to_device_per_layer(other, torch.tensor([1, 0, 19]), loc, number, "direct")
        assert_same(other.get_cpu_copy(loc), pool.get_cpu_copy(torch.tensor([1, 0, 19])))

    def test_groups_of_states_have_no_host_pool(self, make):
        with pytest.raises(ConfigError, match="group state holds states"):
            HostPool(make(state_pool), pages=2)
        assert len(STATE) == 3


def assert_same(one, other):
    for layer, theirs in zip(one, other, strict=True):
        for chunk, more in zip(layer, theirs, strict=True):
            for left, right in zip(chunk, more, strict=True):
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


class TestAllocator:
    def test_whole_pages_first_freed_first(self):
        pages = PageAllocator(4, 4)
        assert pages.available_size() == 16
        first = pages.alloc(8)
        assert first.tolist() == list(range(8))
        assert first.dtype == torch.int64
        second = pages.alloc(4)
        assert pages.available_size() == 4
        assert pages.alloc(8) is None
        assert pages.available_size() == 4
        assert pages.free(second) == 4
        assert pages.alloc(8).tolist() == list(range(12, 16)) + list(range(8, 12))
        assert pages.alloc(0).tolist() == []
        pages.clear()
        assert pages.available_size() == 16

    def test_sizes_must_be_whole_pages(self):
        pages = PageAllocator(4, 4)
        for size in (3, -4):
            with pytest.raises(ConfigError) as raised:
                pages.alloc(size)
            assert str(raised.value) == "The requested size should be a multiple of the page size."

    @pytest.mark.parametrize(
        ("indices", "text"),
        [
            ([0, 1, 2], "are not whole pages of 4 tokens"),
            ([0, 1, 2, 4], "are not whole pages of 4 tokens"),
            ([2, 3, 4, 5], "do not begin at pages of 4 tokens"),
            ([0, 1, 2, 3] * 2, "page 0 is freed twice in one call"),
            ([0, 1, 2, 3, 8, 9, 10, 11], "page 2 is freed, but it is not allocated"),
            ([16, 17, 18, 19], "indices has slot 19"),
        ],
    )
    def test_what_was_not_allocated_is_not_freed(self, indices, text):
        pages = PageAllocator(4, 4)
        pages.alloc(8)
        with pytest.raises(ConfigError, match=text):
            pages.free(torch.tensor(indices))
        assert pages.available_size() == 8
        assert pages.free(torch.arange(8)) == 8

    def test_double_free_is_refused(self):
        pages = PageAllocator(4, 4)
        got = pages.alloc(4)
        pages.free(got)
        with pytest.raises(ConfigError, match="double free"):
            pages.free(got)
        assert pages.available_size() == 16

    def test_reserved_pages_are_never_handed_out(self):
        pages = PageAllocator(3, 2, reserved_pages=1)
        assert pages.alloc(4).tolist() == [2, 3, 4, 5]
        with pytest.raises(ConfigError, match="page 0 is freed"):
            pages.free(torch.tensor([0, 1]))

    def test_a_host_pool_has_one(self, make, device):
        pool = make(HostPool, device, pages=5)
        got = pool.alloc(12)
        assert got.tolist() == list(range(12))
        assert pool.available_size() == 8
        assert pool.free(got[:4]) == 4
        assert pool.available_size() == 12
        pool.clear()
        assert pool.available_size() == 20

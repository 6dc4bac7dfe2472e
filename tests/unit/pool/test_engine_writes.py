"""Writes and reads as SGLang asks for them: bundles of slots, -1, ValueError, pages with axes."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError, ResourceError  # noqa: E402
from pdxfer.layout.builders import table  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HostPool,
    HybridMambaPool,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    ShapeError,
    SlotError,
    SparsePool,
    SWAPool,
    TokenMajorPool,
    UnifiedPool,
    host,
)
from tests.support.pools import FAMILIES, KINDS, MLA, MX, SHAPE, fill, snapshot, state_pool  # noqa: E402
from tests.unit.pool.test_nothing_written import rows_of  # noqa: E402

SLOTS = torch.tensor([9, 4])


def bits(rows):
    return rows.contiguous().view(torch.uint8)


def write_loc(loc, swa_loc=None, full_loc=None, *, physical=True):
    """What SGLang's `KVWriteLoc` has."""
    return SimpleNamespace(loc=loc, swa_loc=swa_loc, full_loc=full_loc, physical=physical)


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
    pool.full_to_swa_index_mapping[8:16] = torch.arange(4, 12)
    return pool


class TestBundlesOfSlots:
    @pytest.mark.parametrize(("family", "kind"), KINDS)
    def test_set_kv_buffer_takes_what_has_a_loc(self, make, family, kind):
        one, other = make(FAMILIES[family][kind]), make(FAMILIES[family][kind])
        layer = one.layout.layers[0]
        one.set_kv_buffer(layer, SLOTS, *rows_of(one))
        other.set_kv_buffer(layer, write_loc(SLOTS), *rows_of(other))
        assert any(region.any() for region in snapshot(one))
        for left, right in zip(snapshot(one), snapshot(other), strict=True):
            assert left.tolist() == right.tolist()

    def test_other_writes_take_it_too(self, make):
        latent = make(MLAPool, **MLA)
        latent.set_mla_kv_buffer(0, write_loc(SLOTS), torch.ones(2, 1, 16), torch.ones(2, 1, 8))
        assert latent.get_key_buffer(0)[SLOTS].float().sum() == 48
        sparse = make(FAMILIES["sparse"]["token"])
        sparse.set_index_k_buffer(5, write_loc(SLOTS), torch.ones(2, 1, 12))
        assert sparse.get_index_k_buffer(5)[SLOTS].float().sum() == 24

    def test_a_bundle_has_the_slots_of_the_window(self, window):
        keys, values = torch.ones(2, 2, 8), torch.ones(2, 2, 16)
        window.set_kv_buffer(1, write_loc(torch.tensor([20, 21]), SLOTS), keys, values)
        at = window.get_key_buffer(1).flatten(1).any(dim=1).nonzero().flatten()
        assert at.tolist() == [4, 9]
        window.set_kv_buffer(3, write_loc(torch.tensor([8, 10])), keys, values)
        at = window.get_key_buffer(3).flatten(1).any(dim=1).nonzero().flatten()
        assert at.tolist() == [4, 6]
        window.set_kv_buffer(2, write_loc(torch.tensor([20, 21]), SLOTS), keys, values)
        at = window.get_key_buffer(2).flatten(1).any(dim=1).nonzero().flatten()
        assert at.tolist() == [20, 21]
        with pytest.raises(SlotError):
            window.set_kv_buffer(1, write_loc(SLOTS, torch.tensor([4, 12])), keys, values)

    def test_a_pool_with_states_prefers_the_full_slots(self, make):
        full = make(TokenMajorPool, **SHAPE)
        pool = make(HybridMambaPool, full_kv_pool=full, mamba_pool=make(state_pool))
        rows = torch.ones(2, 2, 8), torch.ones(2, 2, 16)
        pool.set_kv_buffer(5, write_loc(torch.tensor([1, 2]), None, SLOTS), *rows)
        assert full.k_buffer[0].flatten(1).any(dim=1).nonzero().flatten().tolist() == [4, 9]
        pool.set_kv_buffer(6, write_loc(SLOTS), *rows)
        assert full.k_buffer[1].flatten(1).any(dim=1).nonzero().flatten().tolist() == [4, 9]

    def test_a_bundle_without_slots_is_refused(self, make):
        pool = make(TokenMajorPool, **SHAPE)
        with pytest.raises(ShapeError, match="loc of the write loc is None"):
            pool.set_kv_buffer(5, write_loc(None), torch.ones(2, 2, 8), torch.ones(2, 2, 16))

    def test_unified_memory_refuses_ids_marked_as_virtual(self, make):
        rows = torch.ones(2, 2, 8), torch.ones(2, 2, 16)
        virtual = write_loc(SLOTS, physical=False)
        make(PageMajorPool, **SHAPE).set_kv_buffer(5, virtual, *rows)
        pool = make(UnifiedPool, **SHAPE)
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            pool.set_kv_buffer(5, virtual, *rows)
        hybrid = make(HybridMambaPool, full_kv_pool=pool, mamba_pool=make(state_pool))
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            hybrid.set_kv_buffer(5, virtual, *rows)
        latent = make(MLAPool, **{**MLA, "arrangement": "unified_entries"})
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            latent.set_mla_kv_buffer(0, virtual, torch.ones(2, 1, 16), torch.ones(2, 1, 8))
        assert not any(region.any() for region in (*snapshot(pool), *snapshot(latent)))
        pool.set_kv_buffer(5, SLOTS, *rows)


class TestNoSlot:
    @pytest.mark.parametrize("sentinel", [False, True])
    def test_minus_one_translates_to_minus_one(self, window, sentinel):
        """With the last entry of the mapping that engines keep for it, and without."""
        if sentinel:
            mapping = torch.cat([window.full_to_swa_index_mapping, torch.tensor([-1])])
            window.register_mapping(mapping.to(torch.int32))
        for dtype in (torch.int32, torch.int64):
            ids = torch.tensor([-1, 8, 20, -1, 15], dtype=dtype)
            assert window.translate_loc_from_full_to_swa(ids).tolist() == [-1, 4, 0, -1, 11]
        assert (
            window.translate_loc_from_full_to_swa(torch.tensor([], dtype=torch.int64)).numel() == 0
        )
        ids = torch.tensor([8, 20], dtype=torch.uint8)
        assert window.translate_loc_from_full_to_swa(ids).tolist() == [4, 0]

    def test_other_ids_below_zero_and_writes_to_none_are_refused(self, window):
        with pytest.raises(SlotError, match="kv_indices has slot -2"):
            window.translate_loc_from_full_to_swa(torch.tensor([-1, -2]))
        rows = torch.ones(2, 2, 8), torch.ones(2, 2, 16)
        for layer in (1, 2):
            with pytest.raises(SlotError):
                window.set_kv_buffer(layer, torch.tensor([8, -1]), *rows)
        with pytest.raises(SlotError):
            window.get_cpu_copy(torch.tensor([8, -1]))
        assert not any(region.any() for region in snapshot(window))


class TestValueErrors:
    """What SGLang refuses with a ValueError is one here, and a ConfigError as well."""

    @pytest.mark.parametrize(
        ("make_pool", "text"),
        [
            (
                lambda: MXFP8Pool(**{**MX, "head_dim": 40}),
                "head_dim divisible by 32, got 40",
            ),
            (lambda: MXFP8Pool(**{**MX, "v_head_dim": 40}), "requires v_head_dim divisible by 32"),
            (lambda: UnifiedPool(**{**SHAPE, "head_dim": 4, "head_num": 1}), "16"),
            (lambda: TokenMajorPool(**{**SHAPE, "size": 25}), "size=25"),
            (lambda: PageMajorPool(**{**SHAPE, "dtype": torch.float64}), "dtype=torch.float64"),
            (lambda: MLAPool(**{**MLA, "arrangement": "x"}), "arrangement is 'x'"),
            (lambda: SparsePool(**SHAPE, index_head_dim=8, index_layer_ids=[4]), "layer 4"),
            (lambda: state_pool(size=0), "size=0"),
        ],
    )
    def test_geometries_that_no_pool_has(self, make_pool, text):
        with pytest.raises(ValueError, match=text) as raised:
            make_pool()
        assert isinstance(raised.value, ConfigError)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"layout": "x"}, "Unsupported layout: x"),
            ({"layout": "page_unified", "head_groups": 3}, "head_group_num=3 must divide"),
            ({"host_to_device_ratio": -1.0}, "host_to_device_ratio=-1.0"),
            ({"page_size": 0}, "page_size is 0"),
        ],
    )
    def test_host_pools(self, make, options, text):
        device = make(TokenMajorPool, **SHAPE)
        with pytest.raises(ValueError, match=text):
            HostPool(device, **options)

    def test_a_host_pool_of_tiles_of_another_page_size(self, make):
        device = make(FAMILIES["mxfp8"]["tiles"])
        with pytest.raises(ValueError, match="page_size=32"):
            HostPool(device, page_size=32)

    def test_too_little_host_memory(self, make, monkeypatch):
        device = make(TokenMajorPool, **SHAPE)
        monkeypatch.setattr(host, "available_bytes", lambda: 10_000)
        with pytest.raises(ValueError, match="Not enough host memory available") as raised:
            HostPool(device, pages=2000)
        assert isinstance(raised.value, ResourceError)

    def test_layers_and_scales(self, make):
        full = make(TokenMajorPool, **SHAPE)
        hybrid = make(HybridMambaPool, full_kv_pool=full, mamba_pool=make(state_pool))
        for layer in (1, 99):
            with pytest.raises(ValueError, match=f"layer {layer} is not in this pool"):
                hybrid.get_key_buffer(layer)
        with pytest.raises(ValueError, match="layer 9 is not in this pool"):
            make(MLAPool, **MLA).get_key_buffer(9)
        sparse = make(FAMILIES["sparse"]["token"])
        with pytest.raises(ValueError, match="layer 6 has no index; layers 5, 7 have one"):
            sparse.get_index_k_buffer(6)
        with pytest.raises(ValueError, match="layer is None; a global layer id"):
            full.set_kv_buffer(None, SLOTS, torch.ones(2, 2, 8), torch.ones(2, 2, 16))


class TestPagesThatAreNotFlat:
    @pytest.mark.parametrize(
        ("arrangement", "shape"),
        [
            ("layer_first", (2, 3, 4, 2, 8)),
            ("page_first", (2, 4, 3, 2, 8)),
            ("page_first_direct", (2, 1, 3, 4, 2, 8)),
            ("page_head", (2, 1, 2, 4, 3, 8)),
        ],
    )
    def test_have_the_axes_of_the_layout(self, make, arrangement, shape):
        device = make(FAMILIES["equal widths"]["page"])
        pool = make(HostPool, device, layout=arrangement, pages=5)
        fill(pool)
        page = pool.get_data_page(8, flat=False)
        assert page.shape == shape
        assert torch.equal(bits(page.flatten()), bits(pool.get_data_page(8)))
        assert pool.kv_buffer.shape[0] == 2
        page.zero_()
        assert not bits(pool.get_data_page(8)).any()
        assert bits(pool.get_data_page(4)).any()
        del page

    @pytest.mark.parametrize(
        ("arrangement", "shape"),
        [
            ("layer_first", (3, 4, 1, 24)),
            ("page_first", (4, 3, 1, 24)),
            ("page_first_direct", (1, 3, 4, 1, 24)),
        ],
    )
    def test_of_latents_have_no_first_axis(self, make, arrangement, shape):
        pool = make(HostPool, make(MLAPool, **MLA), layout=arrangement, pages=5)
        fill(pool)
        page = pool.get_data_page(4, flat=False)
        assert page.shape == shape
        assert torch.equal(bits(page.flatten()), bits(pool.get_data_page(4)))
        del page

    @pytest.mark.parametrize("arrangement", table.names(table.HOST))
    @pytest.mark.parametrize("family", ["kv", "draft", "sparse"])
    def test_parts_of_other_shapes_are_no_one_tensor(self, make, arrangement, family):
        pool = make(HostPool, make(FAMILIES[family]["page"]), layout=arrangement, pages=5)
        with pytest.raises(ValueError, match=r"Unsupported layout: .* flat=True"):
            pool.get_data_page(4, flat=False)

    def test_an_index_of_equal_shape_in_some_layers_is_no_one_tensor(self, make):
        index = {"index_head_num": 2, "index_head_dim": 8}
        some = make(SparsePool, **{**SHAPE, "v_head_dim": 8}, **index, index_layer_ids=[5, 7])
        with pytest.raises(ShapeError, match="is no one tensor"):
            make(HostPool, some, pages=5).get_data_page(4, flat=False)
        every = make(SparsePool, **{**SHAPE, "v_head_dim": 8}, **index)
        assert make(HostPool, every, pages=5).get_data_page(4, flat=False).shape == (3, 4, 3, 2, 8)


def test_latent_slices_are_contiguous(make):
    for arrangement in ("token_major", "page_major", "unified_entries"):
        pool = make(MLAPool, **{**MLA, "arrangement": arrangement})
        fill(pool)
        for dtype in (None, torch.float32):
            latent, rope = pool.get_mla_kv_buffer(1, SLOTS, dtype)
            assert latent.is_contiguous()
            assert rope.is_contiguous()
            assert latent.shape == (2, 1, 16)

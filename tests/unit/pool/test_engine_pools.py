"""Pools that an engine made, as the device pool of a host pool and as a cache of their own.

Their attributes and tensors are those of SGLang's pools, made here from the shapes alone.
"""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.layout import plan  # noqa: E402
from pdxfer.pool import EnginePool, HostPool, PageMajorPool, ShapeError, TokenMajorPool  # noqa: E402
from tests.support.pools import MLA, SHAPE, fill, snapshot  # noqa: E402

PAGE, SLOTS, HEADS, LAYERS, FIRST = 4, 28, 2, 3, 5
BF16 = torch.bfloat16


def attributes(**more):
    return SimpleNamespace(
        **{
            "size": 24,
            "page_size": PAGE,
            "dtype": BF16,
            "store_dtype": BF16,
            "head_num": HEADS,
            "head_dim": 8,
            "v_head_dim": 8,
            "layer_num": LAYERS,
            "start_layer": FIRST,
            "kv_cache_layout": "nhd",
            "k_scale_buffer": None,
            **more,
        }
    )


def noise(shape, dtype=BF16):
    values = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (*shape, dtype.itemsize)))
    return values.to(torch.uint8).view(dtype).squeeze(-1)


def two_halves():
    """K and V of a layer in one allocation, as 0.5.23 has them."""
    fused = [noise((2, SLOTS, HEADS, 8)) for _ in range(LAYERS)]
    return attributes(k_buffer=[f[0] for f in fused], v_buffer=[f[1] for f in fused])


def apart():
    """K and V of two widths, and the stage's own layer ids."""
    return attributes(
        v_head_dim=16,
        k_buffer=[noise((SLOTS, HEADS, 8)) for _ in range(LAYERS)],
        v_buffer=[noise((SLOTS, HEADS, 16)) for _ in range(LAYERS)],
        model_layer_ids=(2, 5, 9),
    )


def hnd():
    k, v = ([noise((7, HEADS, PAGE, 8)) for _ in range(LAYERS)] for _ in range(2))
    return attributes(k_buffer=k, v_buffer=v, kv_cache_layout="hnd")


def page_major():
    raw = noise((7, LAYERS, 2, PAGE, HEADS, 8))
    k, v = ([raw[:, layer, part] for layer in range(LAYERS)] for part in range(2))
    return attributes(k_buffer=k, v_buffer=v, kv_cache_layout="page_major")


def unified():
    raw = noise((SLOTS, LAYERS, 2, HEADS, 8))
    k, v = ([raw[:, layer, part] for layer in range(LAYERS)] for part in range(2))
    return attributes(k_buffer=k, v_buffer=v, kv_cache_layout="page_major")


def fp8():
    k, v = ([noise((SLOTS, HEADS, 16), torch.uint8) for _ in range(LAYERS)] for _ in range(2))
    return attributes(dtype=torch.float8_e4m3fn, k_buffer=k, v_buffer=v, head_dim=16, v_head_dim=16)


def mxfp8():
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    k, v = ([noise((SLOTS, HEADS, 32), e4m3) for _ in range(LAYERS)] for _ in range(2))
    ks, vs = ([noise((SLOTS, HEADS, 1), e8m0) for _ in range(LAYERS)] for _ in range(2))
    return attributes(dtype=e4m3, k_buffer=k, v_buffer=v, k_scale_buffer=ks, v_scale_buffer=vs,
                      head_dim=32, v_head_dim=32)  # fmt: skip


def mxfp8_tiles():
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    k, v = ([noise((384, HEADS, 32), e4m3) for _ in range(LAYERS)] for _ in range(2))
    ks, vs = ([noise((3, HEADS, 32, 4, 1), e8m0) for _ in range(LAYERS)] for _ in range(2))
    return attributes(dtype=e4m3, k_buffer=k, v_buffer=v, k_scale_buffer=ks, v_scale_buffer=vs,
                      head_dim=32, v_head_dim=32, page_size=128)  # fmt: skip


def keys_only():
    pool = attributes(k_buffer=[noise((SLOTS, HEADS, 8)) for _ in range(LAYERS)])
    del pool.v_head_dim
    return pool


def latent(rows=None):
    rows = [noise((SLOTS, 1, 24)) for _ in range(LAYERS)] if rows is None else rows
    return attributes(kv_buffer=rows, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24)


def latent_unified():
    raw = noise((SLOTS, LAYERS * 32))
    pool = latent([raw[:, 32 * at : 32 * at + 32].unflatten(1, (1, 32)) for at in range(LAYERS)])
    pool.qk_rope_head_dim = 16
    return pool


def sparse():
    index = attributes(k_buffer=[noise((SLOTS, 1, 12)) for _ in range(2)], head_num=1, head_dim=12)
    return SimpleNamespace(
        main_pool=two_halves(),
        index_k_pool=index,
        index_kv_pool=None,
        index_k_layer_id_mapping={5: 0, 7: 1},
        start_layer=FIRST,
    )


def with_index():
    """`DSATokenToKVPool`: the second layer has no index of its own."""
    pool = latent([noise((SLOTS, 1, 136)) for _ in range(LAYERS)])
    pool.kv_lora_rank, pool.index_head_dim, pool.index_kpool = 128, 128, 1
    pool.index_k_with_scale_buffer = [
        noise((pages, PAGE * 132), torch.uint8) for pages in (SLOTS // PAGE, 0, SLOTS // PAGE)
    ]
    return pool


def keys_and_scales(pool, at):
    """The index of a layer as rows of slots, `[slots, 1, 132]`: the key, then its scale."""
    pages = pool.index_k_with_scale_buffer[at]
    keys, scales = pages.split([PAGE * 128, PAGE * 4], dim=1)
    return torch.cat([keys.reshape(SLOTS, 1, 128), scales.reshape(SLOTS, 1, 4)], dim=2)


KINDS = [two_halves, apart, hnd, page_major, unified, fp8, mxfp8, keys_only, latent,
         latent_unified, sparse]  # fmt: skip


def by_slot(pool, name, at):
    """Rows of a tensor of an engine's pool, `[slots, heads, width]` as bytes."""
    tensor = getattr(pool, name)[at]
    if tensor.ndim == 4:
        tensor = tensor.transpose(1, 2) if pool.kv_cache_layout == "hnd" else tensor
        tensor = tensor.flatten(0, 1)
    return tensor.contiguous().view(torch.uint8)


def tensors_of(pool):
    """(pool, attribute, local layer, part, global layer) of everything that has rows by slot."""
    if hasattr(pool, "main_pool"):
        yield from tensors_of(pool.main_pool)
        for layer, at in pool.index_k_layer_id_mapping.items():
            yield pool.index_k_pool, "k_buffer", at, "index_k", layer
        return
    layers = getattr(pool, "model_layer_ids", range(FIRST, FIRST + LAYERS))
    names = {"k_buffer": "k", "v_buffer": "v", "k_scale_buffer": "k_scale",
             "v_scale_buffer": "v_scale", "kv_buffer": ("latent", "rope")}  # fmt: skip
    for name, part in names.items():
        for at in range(len(getattr(pool, name, None) or ())):
            yield pool, name, at, part, layers[at]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_where_the_tensors_have_them(kind):
    theirs = kind()
    pool = EnginePool(theirs)
    slots = torch.tensor([4, 27, 9])
    for owner, name, at, part, layer in tensors_of(theirs):
        got = pool.rows(part, layer).gather(slots)
        assert torch.equal(got.contiguous().view(torch.uint8), by_slot(owner, name, at)[slots])
        tensor = getattr(owner, name)[at]
        assert any(
            part.address <= tensor.data_ptr() < part.address + part.length_bytes
            for part in pool.memory
        )


@pytest.mark.parametrize("arrangement", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_pool_is_the_source_of_a_host_pool(make, kind, arrangement):
    theirs = kind()
    host = make(HostPool, theirs, layout=arrangement, pages=4, page_size=2)
    assert host.device_pool is theirs
    here, there = torch.tensor([0, 5, 7]), torch.tensor([27, 4, 10])
    expected = [by_slot(*where[:3]).clone() for where in tensors_of(theirs)]
    host.backup_from_device_all_layer(theirs, here, there)
    for owner, name, at, part, layer in tensors_of(theirs):
        got = host.rows(part, layer).gather(here)
        assert torch.equal(got.contiguous().view(torch.uint8), by_slot(owner, name, at)[there])

    to = torch.tensor([8, 6, 22])
    for number in range(len(host.layout.layers)):
        host.load_to_device_per_layer(theirs, here, to, number, "direct")
    for where, rows in zip(tensors_of(theirs), expected, strict=True):
        rows[to] = rows[there]
        assert torch.equal(by_slot(*where[:3]), rows)


def test_an_index_by_page_of_an_engines_pool(make):
    theirs = with_index()
    host = make(HostPool, theirs, pages=4, page_size=2, layout="page_first_direct")
    here, there = torch.tensor([0, 5, 7]), torch.tensor([27, 4, 10])
    host.backup_from_device_all_layer(theirs, here, there)
    for at in (0, 2):
        expected = keys_and_scales(theirs, at)
        key = host.rows("index_k", FIRST + at).gather(here)
        scale = host.rows("index_k_scale", FIRST + at).gather(here)
        assert torch.equal(key, expected[there, :, :128])
        assert torch.equal(scale.view(torch.uint8), expected[there, :, 128:])
        host.load_to_device_per_layer(theirs, here, torch.tensor([8, 6, 22]), at)
        assert torch.equal(keys_and_scales(theirs, at)[[8, 6, 22]], expected[there])
    assert ("full", "index_k", FIRST + 1) not in host.layout.planes_by_key
    theirs.index_kpool = 2
    with pytest.raises(ShapeError, match="pooled index keys"):
        EnginePool(theirs)
    theirs = with_index()
    theirs.index_k_with_scale_buffer[0] = noise((SLOTS // PAGE, PAGE * 136), torch.uint8)
    with pytest.raises(ShapeError, match="index_k of layer 5 of the device pool"):
        EnginePool(theirs)
    theirs = with_index()
    theirs.index_k_with_scale_buffer[0] = theirs.index_k_with_scale_buffer[0][:, :520]
    with pytest.raises(ShapeError, match="index_k of layer 5 of the device pool"):
        EnginePool(theirs)


def test_tiles_of_scales_of_an_engines_pool(make):
    theirs = mxfp8_tiles()
    host = make(HostPool, theirs, pages=2)
    host.backup_from_device_all_layer(theirs, torch.arange(128), torch.arange(128, 256))
    for at in range(LAYERS):
        page = host.rows("k_scale", FIRST + at).gather(torch.arange(128))
        tile = theirs.k_scale_buffer[at][1].view(torch.uint8)
        token = torch.arange(128)
        assert torch.equal(page, tile[:, token % 32, token // 32].transpose(0, 1))


def test_the_host_pool_is_as_large_as_behind_a_pool_of_our_own(make):
    ours = make(HostPool, make(TokenMajorPool, **{**SHAPE, "v_head_dim": 8}), 2.0)
    theirs = make(HostPool, two_halves(), 2.0)
    assert theirs.page_num == ours.page_num
    assert theirs.layout.regions == ours.layout.regions


def test_a_host_pool_takes_another_device_pool_too(make):
    theirs = two_halves()
    ours = make(PageMajorPool, **{**SHAPE, "v_head_dim": 8})
    host = make(HostPool, theirs, pages=4)
    here, there = torch.tensor([0, 5]), torch.tensor([9, 4])
    host.backup_from_device_all_layer(theirs, here, there)
    for number in range(LAYERS):
        host.load_to_device_per_layer(ours, here, there, number)
    got = ours.get_value_buffer(6).reshape(SLOTS, HEADS, 8)[there]
    assert torch.equal(got.view(torch.int16), theirs.v_buffer[1][there].view(torch.int16))
    host.backup_from_device_all_layer(two_halves(), here, there)


def test_it_is_a_cache_with_a_layout_for_a_client(make):
    pool = EnginePool(page_major(), total_kv_heads=6, head_first=2, model="llama@1")
    twin = make(PageMajorPool, **{**SHAPE, "v_head_dim": 8}, model="llama@1")
    assert pool.layout.fingerprint == twin.layout.fingerprint
    assert plan(pool.layout, twin.layout, relayout="never").summary().bytes_per_page > 0
    copied = pool.get_cpu_copy(torch.tensor([9, 4]))
    twin.load_cpu_copy(copied, torch.tensor([8, 6]))
    pool.move_kv_cache(torch.tensor([10]), torch.tensor([9]))
    again = pool.get_cpu_copy(torch.tensor([10]))
    assert torch.equal(again[2][0][1].view(torch.int16), copied[2][0][1][:1].view(torch.int16))


class TestRefusals:
    def test_what_is_no_pool(self, make):
        for wrong in (None, 3, object(), SimpleNamespace(k_buffer=[]), torch.zeros(3)):
            with pytest.raises(ShapeError, match="a pool with a layout is needed"):
                HostPool(wrong)
        host = make(HostPool, two_halves(), pages=2)
        with pytest.raises(ShapeError, match="device_pool is None"):
            host.backup_from_device_all_layer(None, torch.tensor([0]), torch.tensor([4]))

    def test_pools_of_two_pools_and_of_unknown_rows(self):
        with pytest.raises(ShapeError, match="a pool of two pools; give its full_kv_pool"):
            HostPool(SimpleNamespace(full_kv_pool=two_halves(), swa_kv_pool=two_halves()))
        four_bits = two_halves()
        four_bits.is_quantized_kv_cache = True
        with pytest.raises(ShapeError, match="quantised rows of 4 bits"):
            EnginePool(four_bits)
        with_values = sparse()
        with_values.index_kv_pool = two_halves()
        with pytest.raises(ShapeError, match="an index with values"):
            EnginePool(with_values)
        odd = two_halves()
        odd.dtype = torch.float64
        with pytest.raises(ConfigError, match="float64"):
            EnginePool(odd)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda k: k[1].transpose(0, 1).contiguous().transpose(0, 1),
            lambda k: noise((SLOTS, HEADS, 9)),
            lambda k: noise((SLOTS, HEADS, 16))[..., ::2],
            lambda k: noise((SLOTS - 4, HEADS, 8)),
            lambda k: noise((SLOTS, HEADS, 8), torch.float32),
            lambda k: noise((SLOTS, HEADS + 1, 8))[:, :HEADS],
            lambda k: k[1].as_strided((SLOTS, HEADS, 8), (16, 8, 2)),
            lambda k: k[1][..., :4],
            lambda k: k[1][: SLOTS - 4],
        ],
        ids=[
            "axes",
            "width",
            "gaps",
            "short",
            "element",
            "rows apart",
            "elements apart",
            "part of a row",
            "part of the rows",
        ],
    )
    def test_tensors_of_another_order_are_never_misread(self, spoil):
        theirs = two_halves()
        theirs.k_buffer[1] = spoil(theirs.k_buffer)
        with pytest.raises(ShapeError, match="device pool"):
            EnginePool(theirs)

    def test_layers_in_one_buffer_but_in_another_order(self):
        theirs = unified()
        theirs.k_buffer[1], theirs.k_buffer[2] = theirs.k_buffer[2], theirs.k_buffer[1]
        with pytest.raises(ShapeError, match="k of layer 6 of the device pool"):
            EnginePool(theirs)
        theirs = unified()
        theirs.k_buffer, theirs.v_buffer = theirs.v_buffer, theirs.k_buffer
        with pytest.raises(ShapeError, match="ends at byte 5376 of region 0"):
            EnginePool(theirs)
        with pytest.raises(ShapeError, match="2 tensors of k for 3 layers"):
            EnginePool(attributes(k_buffer=unified().k_buffer[:2], v_buffer=[]))


def test_a_closed_view_lets_go_and_the_engines_pool_stays(make):
    theirs = latent()
    pool = EnginePool(theirs)
    pool.close()
    pool.close()
    with pytest.raises(ConfigError, match="the pool is closed"):
        pool.get_cpu_copy(torch.tensor([4]))
    assert theirs.kv_buffer[0].numel() == SLOTS * (MLA["kv_lora_rank"] + 8)
    ours = make(TokenMajorPool, **SHAPE)
    fill(ours)
    assert any(region.any() for region in snapshot(ours))

"""Host pools: SGLang's own and ours in the same order, and ours behind SGLang's device pools.

Copies between its host and device pools are kernels for a GPU; here its host memory is filled and
read by its own methods, and moved by plans. `make test-sglang` runs it.
"""

import ctypes
import importlib.metadata
import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here: run `make test-sglang`", allow_module_level=True)

from pdxfer.pool import HostPool, MLAPool, PageMajorPool, TokenMajorPool, UnifiedPool
from tests.peers import sglang_kinds as special
from tests.peers.sglang_kinds import CASES, DIM, HEADS, VERSION, our_arguments, their_arguments
from tests.peers.sglang_side import ByPage, BySlot, Side, both_ways, memory_pool, ours, theirs

pytestmark = pytest.mark.filterwarnings("default")
OLD = VERSION == "0.5.18"
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KINDS = [
    *(("equal", layout) for layout in (*LAYOUTS, *(() if OLD else ("page_unified",)))),
    *(("two widths", layout) for layout in ("page_first", "page_first_direct")),
    *(("latent", layout) for layout in LAYOUTS[:3]),
    *(("keys alone", layout) for layout in LAYOUTS[:3]),
]


class ByGroup(ByPage):
    """`[pages, page_size, groups, heads of a group, width]`."""

    def get(self, slots):
        return super().get(slots).flatten(1, 2)

    def put(self, slots, rows):
        super().put(slots, rows.unflatten(1, self.tensor.shape[2:4]))


@pytest.fixture(autouse=True)
def any_memory(monkeypatch):
    """Its pools keep 10 GiB of the host free."""
    from sglang.srt.mem_cache.pool_host import base, mha

    for module in (base, mha):
        if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
            monkeypatch.setattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture
def generator():
    return np.random.default_rng(8)


def device_pool(kind):
    if kind == "latent":
        return memory_pool.MLATokenToKVPool(
            **their_arguments(), kv_lora_rank=16, qk_rope_head_dim=8
        )
    if kind == "keys alone":
        return special.TestSparse.pool()
    v_dim = 32 if kind == "two widths" else DIM
    return memory_pool.MHATokenToKVPool(
        **their_arguments(), head_num=HEADS, head_dim=DIM, v_head_dim=v_dim
    )


def host_pool(kind, pool, layout):
    """SGLang's host pool of this kind."""
    from sglang.srt.mem_cache.pool_host import mha, mla

    groups = {"head_group_num": 2} if layout == "page_unified" else {}
    if kind == "keys alone":
        anchor = host_pool("equal", pool.main_pool, layout)
        return mha.MHATokenToKOnlyPoolHost(pool.index_k_pool, anchor, layout, pin_memory=False)
    if OLD:
        classes = {
            "equal": mha.MHATokenToKVPoolHost,
            "two widths": mha.AsymmetricMHATokenToKVPoolHost,
            "latent": mla.MLATokenToKVPoolHost,
        }
        return classes[kind](pool, 2.0, 0, pool.page_size, layout, pin_memory=False)
    info = pool.get_device_pool_infos()[0].buffer_info
    made = mla.MLATokenToKVPoolHost if kind == "latent" else mha.get_mha_host_pool_cls(info)
    if kind == "latent":
        groups["target_layer_num"] = pool.layer_num
    return made(
        info, 2.0, 0, pool.page_size, layout, pin_memory=False, device_capacity_tokens=pool.size,
        start_layer=pool.start_layer, end_layer=pool.end_layer, **groups,
    )  # fmt: skip


def buffers_of(kind, host):
    """Contiguous tensors of a host pool's memory, one after the other."""
    if kind == "keys alone":
        return [host.k_buffer]
    return list(host.kv_buffer) if isinstance(host.kv_buffer, tuple) else [host.kv_buffer]


def parts_of(kind, host):
    """Tensors by part, without the axis of the parts."""
    if kind == "keys alone":
        return {"k": host.k_buffer}
    if kind == "latent":
        return {("latent", "rope"): host.kv_buffer}
    return {"k": host.kv_buffer[0], "v": host.kv_buffer[1]}


def rows_of(kind, host, layout, layers):
    rows = {}
    if layout == "page_unified":
        for at, layer in enumerate(layers):
            for number, part in enumerate("kv"):
                tensor = host.kv_buffer[:, :, at, number].permute(0, 2, 1, 3, 4)
                rows["full", part, layer] = ByGroup(tensor)
        return rows
    for part, tensor in parts_of(kind, host).items():
        for at, layer in enumerate(layers):
            rows["full", part, layer] = {
                "layer_first": lambda t=tensor, at=at: BySlot(t[at]),
                "page_first": lambda t=tensor, at=at: BySlot(t[:, at]),
                "page_first_direct": lambda t=tensor, at=at: ByPage(t[:, at]),
                "page_head": lambda t=tensor, at=at: ByPage(t[:, :, :, at].transpose(1, 2)),
            }[layout]()
    return rows


def both(kind, layout):
    """SGLang's host pool as a side, full of bytes, and ours with the same bytes."""
    pool = device_pool(kind)
    there = host_pool(kind, pool, layout)
    source = pool.index_k_pool if kind == "keys alone" else pool
    groups = {"head_groups": 2} if layout == "page_unified" else {}
    mine = HostPool(source, 2.0, layout=layout, **groups)
    buffers = buffers_of(kind, there)
    for buffer in buffers:
        content = torch.randint(0, 256, (buffer.nbytes,)).to(torch.uint8)
        buffer.view(-1).view(torch.uint8).copy_(content)
    address = mine.memory[0].address
    for buffer in buffers:
        ctypes.memmove(address, buffer.data_ptr(), buffer.nbytes)
        address += buffer.nbytes
    assert address - mine.memory[0].address == mine.length_bytes
    starts = np.cumsum([0, *(region.length_bytes for region in mine.layout.regions)])[:-1]
    ends = np.cumsum([buffer.nbytes for buffer in buffers])
    addresses = []
    for start in starts.tolist():
        number = int(np.searchsorted(ends, start, side="right"))
        before = int(ends[number - 1]) if number else 0
        addresses.append(buffers[number].data_ptr() + start - before)
    rows = rows_of(kind, there, layout, mine.layout.layers)
    return there, mine, Side(there, mine.layout, addresses, rows)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_sizes_are_equal(kind, layout):
    there, mine, _ = both(kind, layout)
    assert (there.size, there.page_num) == (mine.size, mine.page_num)
    assert there.size_per_token == mine.size_per_token
    assert there.dtype == mine.store_dtype


@pytest.mark.parametrize(
    ("kind", "layout"), [k for k in KINDS if k[0] != "two widths" and k[1] != "page_unified"]
)
def test_pages_as_bytes_are_equal(kind, layout):
    there, mine, _ = both(kind, layout)
    for index in (0, 8):
        page = there.get_data_page(index)
        assert torch.equal(bits(page), bits(mine.get_data_page(index)))
        shaped = there.get_data_page(index, flat=False)
        assert shaped.shape == mine.get_data_page(index, flat=False).shape
        assert torch.equal(bits(shaped), bits(mine.get_data_page(index, flat=False)))
    dummy = mine.get_dummy_flat_data_page()
    assert there.get_dummy_flat_data_page().shape == dummy.shape
    there.set_from_flat_data_page(4, mine.get_data_page(8))
    mine.set_from_flat_data_page(4, there.get_data_page(8))
    assert torch.equal(bits(there.get_data_page(4)), bits(mine.get_data_page(4)))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [k for k in KINDS if k[1] != "page_unified" and k != ("keys alone", "layer_first")],
)
def test_addresses_of_pages_are_equal(kind, layout):
    there, mine, side = both(kind, layout)
    indices = torch.cat([torch.arange(8, 12), torch.arange(4)])
    addresses, lengths = there.get_page_buffer_meta(indices)
    got, got_lengths = mine.get_page_buffer_meta(indices)
    assert lengths == got_lengths
    assert offsets(side.addresses, mine, addresses) == offsets(own(mine), mine, got)


@pytest.mark.parametrize("split", [1, 2])
def test_head_groups_of_pages_are_equal(split):
    there, mine, side = both("equal", "page_head")
    indices = torch.cat([torch.arange(8, 12), torch.arange(4)])
    addresses, lengths = there.get_split_heads_page_buffer_meta(indices, split)
    got, got_lengths = mine.get_split_heads_page_buffer_meta(indices, split)
    assert lengths == got_lengths
    assert offsets(side.addresses, mine, addresses) == offsets(own(mine), mine, got)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_plans_move_between_their_host_pools_and_our_pools(generator, kind, layout, case):
    _, mine, side = both(kind, layout)
    both_ways(
        side, ours(HostPool(mine, pages=9, page_size=2, layout="layer_first")), generator, *case
    )
    if kind == "latent":
        kinds = [MLAPool(**our_arguments(), kv_lora_rank=16, qk_rope_head_dim=8)]
    elif kind == "keys alone":
        return
    else:
        widths = {"head_num": HEADS, "head_dim": DIM}
        widths["v_head_dim"] = 32 if kind == "two widths" else DIM
        kinds = [
            made(**our_arguments(), **widths)
            for made in (TokenMajorPool, PageMajorPool, UnifiedPool)
        ]
    for pool in kinds:
        both_ways(side, ours(pool), generator, *case)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def own(mine):
    return [part.address for part in mine.memory]


def offsets(starts, mine, addresses):
    """(region, offset) of each address."""
    lengths = [region.length_bytes for region in mine.layout.regions]
    return [
        next(
            (number, address - start)
            for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if start <= address < start + length
        )
        for address in addresses
    ]


def device_sides():
    """Every device pool of SGLang's that a CPU can hold, by name."""
    from tests.peers import sglang_pools

    shape = (torch.bfloat16, DIM, 4)
    made = {name: (lambda f=f: f(*shape).pool) for name, f in sglang_pools.KINDS.items()}
    made |= {
        name: (lambda f=f: f(torch.bfloat16, 4).pool)
        for name, (f, _) in sglang_pools.MLA_KINDS.items()
    }
    return made | {
        "MHATokenToKVPool, two widths": lambda: device_pool("two widths"),
        "MHATokenToKVPoolMXFP8, flat": lambda: special.TestMXFP8.pair(4, 32)[0].pool,
        "MHATokenToKVPoolMXFP8, tiles": lambda: special.TestMXFP8.pair(128, 128)[0].pool,
        "MiniMaxSparseKVPool": special.TestSparse.pool,
        "MHATokenToKOnlyPool": lambda: special.TestSparse.pool().index_k_pool,
        "DSATokenToKVPool": lambda: special.TestDSA.pair(False)[0].pool,
        "DSATokenToKVPool, packed": lambda: special.TestDSA.pair(True)[0].pool,
    }


@pytest.mark.parametrize(
    "layout", ["layer_first", "page_first", "page_first_direct", "page_unified"]
)
@pytest.mark.parametrize("name", [*device_sides(), "HND"])
def test_a_host_pool_of_ours_behind_their_device_pool(monkeypatch, name, layout):
    if name == "HND":
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = device_pool("equal") if name == "HND" else device_sides()[name]()
    there = theirs(pool)
    mine = HostPool(pool, layout=layout, pages=2 if there.page_size("full") > 4 else 20)
    first = 2 * there.page_size("full")
    slots, here = torch.tensor([first, first + 3, first + 1]), torch.tensor([7, 0, 2])
    mine.backup_from_device_all_layer(pool, here, slots)
    expected = there.snapshot()
    kept = {key: rows[slots].clone() for key, rows in expected.items()}
    to = slots - there.page_size("full") + 1
    for number in range(len(mine.layout.layers)):
        mine.load_to_device_per_layer(pool, here, to, number)
    for key, wanted in expected.items():
        wanted[to] = kept[key]
        assert torch.equal(there.rows[key].get(there.slots_of("full")), wanted), key


@pytest.mark.skipif(OLD, reason="0.5.18 has no get_device_pool_infos")
@pytest.mark.parametrize("kind", ["equal", "two widths", "latent"])
def test_descriptions_of_buffers_have_the_same_fields(kind):
    pool = device_pool(kind)
    if kind == "latent":
        mine = MLAPool(**our_arguments(4, size=40), kv_lora_rank=16, qk_rope_head_dim=8)
    else:
        widths = {"head_num": HEADS, "head_dim": DIM, "v_head_dim": pool.v_head_dim}
        mine = TokenMajorPool(**our_arguments(4, size=40), **widths)
    (left,), (right,) = pool.get_device_pool_infos(), mine.get_device_pool_infos()
    assert (left.pool_name.value, left.indices_from_pool.value) == (
        right.pool_name, right.indices_from_pool,
    )  # fmt: skip
    assert left.layer_ids == right.layer_ids
    for name in left.buffer_info.__struct_fields__:
        value, got = (getattr(side.buffer_info, name) for side in (left, right))
        if name == "buffers" and kind != "latent":
            assert value.layout.value == got.layout
            assert [t.shape for t in (*value.k, *value.v)] == [t.shape for t in (*got.k, *got.v)]
        elif name == "buffers":
            assert [t.shape for t in value] == [t.shape for t in got]
        elif name == "data_ptrs":
            assert (value.shape, value.dtype) == (got.shape, got.dtype)
        else:
            assert value == got, name
    assert pool.data_ptrs.shape == mine.data_ptrs.shape
    assert pool.get_kv_size_bytes() == mine.get_kv_size_bytes()
    assert pool.mem_usage == pytest.approx(mine.mem_usage)
    if kind != "latent":
        assert pool.data_strides.tolist() == mine.data_strides.tolist()
        assert pool.kv_cache_layout == mine.kv_cache_layout

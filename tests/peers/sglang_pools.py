"""Pages and host copies between SGLang's own pool classes and pdxfer's, both ways, on a CPU.

`make test-sglang` runs it with each SGLang version; not named test_*.py, so that nothing else does.
Rows are written and read by each side's own methods; between them only addresses and runs.
"""

import ctypes
import importlib.metadata
import importlib.util
import types

import numpy as np
import pytest
import torch

from pdxfer.layout import mla, page_major, plan, token_major, unified_entries
from pdxfer.pool import MLAPool, PageMajorPool, TokenMajorPool, UnifiedPool
from tests.support.pools import random_rows

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here: run `make test-sglang`", allow_module_level=True)

from tests.peers.sglang_absent import import_pools

memory_pool = import_pools()
VERSION = importlib.metadata.version("sglang")
PAGE_MAJOR = VERSION == "0.5.18"
"""Later ones have the name only: its constructor raises."""
pytestmark = pytest.mark.filterwarnings("default")

SIZE, HEADS, DIM, LAYERS, FIRST_LAYER = 40, 2, 16, 3, 5
LATENT, ROPE = 16, 8
TOKENS = 16
IDS = range(FIRST_LAYER, FIRST_LAYER + LAYERS)
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SHAPES = [
    pytest.param((dtype, v_dim, page), id=f"{name} v{v_dim} page{page}")
    for name, dtype in DTYPES.items()
    for v_dim in (DIM, 32)
    for page in (4, 1)
]
OURS = {"token_major": TokenMajorPool, "page_major": PageMajorPool, "unified": UnifiedPool}


class InterpretedTensor(torch.Tensor):
    """On the CPU, and says otherwise: a kernel's launcher asks, and Triton interprets it here."""

    is_cuda = True


class Theirs:
    """One of SGLang's pools, its memory as a layout and addresses, its rows by its own methods."""

    def __init__(self, pool, layout, regions):
        self.pool, self.layout = pool, layout
        addresses, lengths, items = regions
        assert lengths == [region.length_bytes for region in layout.regions]
        assert items == [region.item_len for region in layout.regions]
        self.addresses = addresses

    def write(self, layer, slots, k, v):
        named = types.SimpleNamespace(layer_id=layer)
        loc = slots if PAGE_MAJOR else memory_pool.KVWriteLoc(slots, physical=True)
        self.pool.set_kv_buffer(named, loc, k.clone(), v.clone())

    def read(self, layer):
        """K and V by slot."""
        return by_slot(self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer))


class Mine:
    def __init__(self, pool):
        self.pool, self.layout = pool, pool.layout
        self.addresses = [part.address for part in pool.memory]

    def write(self, layer, slots, k, v):
        self.pool.set_kv_buffer(layer, slots, k, v)

    def read(self, layer):
        return by_slot(self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer))


def by_slot(*buffers):
    """`[slots, heads, dim]`, also of `[pages, page, heads, dim]`."""
    buffers = [buffer.as_subclass(torch.Tensor) for buffer in buffers]
    return [buffer.flatten(0, 1) if buffer.ndim == 4 else buffer for buffer in buffers]


def their_arguments(dtype, page):
    return {
        "size": SIZE,
        "page_size": page,
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": FIRST_LAYER,
        "end_layer": FIRST_LAYER + LAYERS - 1,
    }


def shape_of(dtype, v_dim, page, **changes):
    return {
        "layers": IDS,
        "kv_heads": HEADS,
        "head_dim": DIM,
        "v_head_dim": v_dim,
        "page_size": page,
        "pages": SIZE // page + 1,
        "dtype": str(dtype).removeprefix("torch."),
        **changes,
    }


def their_token_major(dtype, v_dim, page):
    pool = memory_pool.MHATokenToKVPool(
        **their_arguments(dtype, page), head_num=HEADS, head_dim=DIM, v_head_dim=v_dim
    )
    layout = token_major(**shape_of(dtype, v_dim, page))
    return Theirs(pool, layout, pool.get_contiguous_buf_infos())


def their_page_major(dtype, v_dim, page):
    pool = memory_pool.PageMajorMHATokenToKVPool(
        **their_arguments(dtype, page), head_num=HEADS, head_dim=DIM, v_head_dim=v_dim
    )
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[:] = [buffer.as_subclass(InterpretedTensor) for buffer in buffers]
    layout = page_major(**shape_of(dtype, v_dim, page))
    stride = int(pool.data_strides[0])
    regions = [pool._raw.data_ptr()], [pool._raw.numel()], [stride]
    return Theirs(pool, layout, regions)


def their_buffer(full, page):
    """One of 0.5.23's shared buffers: the attention's entries above, states below."""
    from sglang.srt.mem_cache import unified_memory_pool as unified

    states = unified.MambaSubPoolSpec(
        name="mamba",
        layer_num=2,
        grow_direction="up",
        conv_state_shapes=((16, 3),),
        conv_dtype=torch.bfloat16,
        temporal_state_shape=(4, 8, 2),
        temporal_dtype=torch.float32,
    )
    entry = full.entry_bytes()
    buffer = unified.UnifiedKVPool(
        total_bytes=SIZE * entry + 3 * states.entry_bytes(),
        sub_pool_specs=[full, states],
        device="cpu",
        enable_memory_saver=False,
        page_size=page,
    )
    memory = {
        "length_bytes": buffer.total_bytes,
        "pages": buffer.max_slots("full") // page,
        "reserved_pages": -(-buffer.min_slot_index("full") // page),
    }
    return unified, buffer, memory


def their_unified(dtype, v_dim, page):
    from sglang.srt.mem_cache.unified_memory_pool import MHASubPoolSpec

    spec = MHASubPoolSpec(
        name="full",
        layer_num=LAYERS,
        grow_direction="down",
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=v_dim,
        kv_cache_dtype=dtype,
        store_dtype=torch.uint8 if dtype.itemsize == 1 else dtype,
    )
    unified, buffer, memory = their_buffer(spec, page)
    pool = unified.UnifiedMHATokenToKVPool(
        unified_buffer=buffer,
        sub_pool_name="full",
        page_size=page,
        start_layer=FIRST_LAYER,
        end_layer=FIRST_LAYER + LAYERS - 1,
    )
    layout = unified_entries(**shape_of(dtype, v_dim, page, **memory))
    return Theirs(pool, layout, pool.get_contiguous_buf_infos())


def their_mla(dtype, page):
    pool = memory_pool.MLATokenToKVPool(
        **their_arguments(dtype, page), kv_lora_rank=LATENT, qk_rope_head_dim=ROPE
    )
    layout = mla(
        layers=IDS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        page_size=page,
        pages=SIZE // page + 1,
        dtype=str(dtype).removeprefix("torch."),
    )
    return Theirs(pool, layout, pool.get_contiguous_buf_infos())


def their_unified_mla(dtype, page):
    from sglang.srt.mem_cache.unified_memory_pool import MLASubPoolSpec

    spec = MLASubPoolSpec(
        name="full",
        layer_num=LAYERS,
        grow_direction="down",
        kv_lora_rank=LATENT,
        qk_rope_head_dim=LATENT,
        store_dtype=dtype,
    )
    unified, buffer, memory = their_buffer(spec, page)
    pool = unified.UnifiedMLATokenToKVPool(
        unified_buffer=buffer, sub_pool_name="full", kv_cache_dtype=dtype, page_size=page
    )
    pool.start_layer = FIRST_LAYER
    layout = mla(
        layers=IDS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=LATENT,
        page_size=page,
        dtype=str(dtype).removeprefix("torch."),
        arrangement="unified_entries",
        **memory,
    )
    return Theirs(pool, layout, pool.get_contiguous_buf_infos())


KINDS = {"MHATokenToKVPool": their_token_major}
if PAGE_MAJOR:
    KINDS["PageMajorMHATokenToKVPool"] = their_page_major
else:
    KINDS["UnifiedMHATokenToKVPool"] = their_unified
MLA_KINDS = {"MLATokenToKVPool": (their_mla, ROPE)}
if not PAGE_MAJOR:
    MLA_KINDS["UnifiedMLATokenToKVPool"] = (their_unified_mla, LATENT)
WITH_COPIES = [kind for kind in KINDS if kind != "PageMajorMHATokenToKVPool"]


def our_pool(kind, dtype, v_dim, page):
    return Mine(
        OURS[kind](
            size=48,
            page_size=page,
            dtype=dtype,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=v_dim,
            layer_num=LAYERS,
            start_layer=FIRST_LAYER,
        )
    )


def our_mla(arrangement, dtype, rope, page):
    return Mine(
        MLAPool(
            size=48,
            page_size=page,
            dtype=dtype,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=rope,
            layer_num=LAYERS,
            start_layer=FIRST_LAYER,
            arrangement=arrangement,
        )
    )


def fill(side, generator, widths, heads=HEADS):
    """Rows in every slot that may hold any, by the side's own set_kv_buffer."""
    group = side.layout.groups[0]
    slots = torch.arange(group.reserved_pages * group.page_size, group.pages * group.page_size)
    dtype = side.pool.dtype
    for layer in IDS:
        k, v = (random_rows(generator, (len(slots), heads, width), dtype) for width in widths)
        side.write(layer, slots, k, v)
        got = side.read(layer)[0][slots]
        assert torch.equal(bits(got), bits(k))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def some_pages(side, generator):
    """Pages that hold TOKENS tokens, shuffled, and their slots in token order."""
    group = side.layout.groups[0]
    usable = np.arange(group.reserved_pages, group.pages)
    ids = generator.permutation(usable)[: TOKENS // group.page_size]
    assert len(ids) * group.page_size == TOKENS
    slots = (ids[:, None] * group.page_size + np.arange(group.page_size)).ravel()
    return ids, torch.from_numpy(slots)


def snapshot(side):
    return {layer: [bits(part).clone() for part in side.read(layer)] for layer in IDS}


def expect(target, before, target_slots, source, source_slots):
    """The target's rows are the source's at these slots, and what they were everywhere else."""
    for layer in IDS:
        pairs = zip(before[layer], source[layer], snapshot(target)[layer], strict=True)
        for old, given, got in pairs:
            wanted = old.clone()
            wanted[target_slots] = given[source_slots]
            assert not torch.equal(wanted, old)
            assert torch.equal(got, wanted)


def move(source, target, generator):
    """Moves TOKENS tokens by the plan's runs alone, and compares all of both pools."""
    source_ids, source_slots = some_pages(source, generator)
    target_ids, target_slots = some_pages(target, generator)
    given, before = snapshot(source), snapshot(target)
    for run in plan(source.layout, target.layout).runs(source_ids, target_ids, (0, TOKENS)):
        from_region, from_offset, to_region, to_offset, length = map(int, run)
        ctypes.memmove(
            target.addresses[to_region] + to_offset,
            source.addresses[from_region] + from_offset,
            length,
        )
    expect(target, before, target_slots, given, source_slots)


def copy(source, target, generator):
    """The same by each side's host copies, of slots in any order."""
    source_slots, target_slots = (some_pages(side, generator)[1] for side in (source, target))
    source_slots = source_slots[torch.from_numpy(generator.permutation(TOKENS))]
    given, before = snapshot(source), snapshot(target)
    target.pool.load_cpu_copy(source.pool.get_cpu_copy(source_slots), target_slots)
    expect(target, before, target_slots, given, source_slots)


@pytest.mark.parametrize("our_page", [4, 8])
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_both_ways(kind, shape, ours, our_page):
    generator = np.random.default_rng(1)
    dtype, v_dim, _ = shape
    theirs, mine = KINDS[kind](*shape), our_pool(ours, dtype, v_dim, our_page)
    for side in (theirs, mine):
        fill(side, generator, (DIM, v_dim))
    move(theirs, mine, generator)
    move(mine, theirs, generator)


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", WITH_COPIES)
def test_host_copies_both_ways(kind, shape, ours):
    generator = np.random.default_rng(2)
    dtype, v_dim, _ = shape
    theirs, mine = KINDS[kind](*shape), our_pool(ours, dtype, v_dim, 8)
    for side in (theirs, mine):
        fill(side, generator, (DIM, v_dim))
    copy(theirs, mine, generator)
    copy(mine, theirs, generator)


@pytest.mark.parametrize("ours", ["token_major", "page_major", "unified_entries"])
@pytest.mark.parametrize("page", [4, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("kind", MLA_KINDS)
def test_latents_both_ways(kind, dtype, page, ours):
    generator = np.random.default_rng(3)
    make, rope = MLA_KINDS[kind]
    if ours == "unified_entries" and (LATENT + rope) * dtype.itemsize % 16:
        pytest.skip("unified entries need rows of 16 bytes")
    theirs, mine = make(dtype, page), our_mla(ours, dtype, rope, 8)
    for side in (theirs, mine):
        fill(side, generator, (LATENT + rope, LATENT), heads=1)
    move(theirs, mine, generator)
    move(mine, theirs, generator)
    copy(theirs, mine, generator)
    copy(mine, theirs, generator)


@pytest.mark.parametrize("ours", OURS)
def test_the_same_prefixes_are_committed(ours):
    generator = np.random.default_rng(4)
    shape = torch.bfloat16, 32, 4
    theirs, mine = their_token_major(*shape), our_pool(ours, *shape)
    loc = torch.tensor([[4, 9, 6], [12, 30, 14], [20, 21, 22]])
    lengths = torch.tensor([2, 0, 3])
    for layer in IDS:
        k, v = (random_rows(generator, (9, HEADS, width), shape[0]) for width in (DIM, 32))
        named = types.SimpleNamespace(layer_id=layer)
        theirs.pool.set_kv_buffer_prefix_valid(named, loc, lengths, k.clone(), v.clone())
        mine.pool.set_kv_buffer_prefix_valid(layer, loc, lengths, k, v)
        for there, here in zip(theirs.read(layer), mine.read(layer), strict=True):
            assert there.any()
            assert torch.equal(bits(there), bits(here[: len(there)]))
            assert not here[len(there) :].any()

"""What other engines refuse of page-major pools, host pools and envelopes, and what happens here.

Each entry makes the call that raises there and says in a line what came of it here. A test runs
them all; `make generated` writes them to docs/refusals.md.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdxfer.errors import LayoutMismatchError
from pdxfer.layout import Rank, Side, check_pair, cover, page_major, plan, token_major
from pdxfer.pool import HostPool, MXFP8Pool, PageMajorPool, SWAPool, TokenMajorPool, UnifiedPool
from tests.support.pools import DRAFT, FAMILIES, MX, SHAPE, fill, state_pool

LOC = torch.tensor([[4, 5, 6], [12, 13, 14]])
LENS = torch.tensor([2, 0])
UNIFIED_BOTH = "--enable-unified-memory with PD disaggregation"


@dataclass(frozen=True)
class Refusal:
    number: str
    call: str
    text: str
    """What is raised there, or how it begins."""
    here: Callable[[], str]


@contextlib.contextmanager
def pools(*made):
    try:
        yield made
    finally:
        for pool in reversed(made):
            pool.close()


def moved(source_layout, target_layout):
    """Bytes of one page of a plan, as a line."""
    runs = plan(source_layout, target_layout, relayout="allow").runs([1], [2])
    return f"{int(runs[:, 4].sum())} bytes a page in {len(runs)} run{'s' * (len(runs) > 1)}"


def buf_infos():
    with pools(PageMajorPool(**SHAPE)) as (pool,):
        _, lengths, items = pool.get_contiguous_buf_infos()
        assert len(lengths) == 1
        return f"one region: lengths {lengths}, item_lens {items}"


def get_copy():
    with pools(PageMajorPool(**SHAPE)) as (pool,):
        copied = pool.get_cpu_copy(torch.tensor([9, 4, 9]))
        keys, values = copied[0][0]
        return (
            f"{len(copied)} layers of chunks of K {tuple(keys.shape)} and V {tuple(values.shape)}"
        )


def load_copy():
    with pools(TokenMajorPool(**SHAPE), PageMajorPool(**SHAPE)) as (source, pool):
        fill(source)
        loc = torch.tensor([9, 4, 17])
        copied = source.get_cpu_copy(loc)
        pool.load_cpu_copy(copied, loc + 4)
        assert_equal(pool.get_cpu_copy(loc + 4), copied)
        return "loads, also what was copied out of a token-major pool"


def assert_equal(one, other):
    for layers in zip(one, other, strict=True):
        for chunks in zip(*layers, strict=True):
            for left, right in zip(*chunks, strict=True):
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def prefix_valid(kind, **shape):
    def commit():
        with pools(kind(**{**SHAPE, **shape})) as (pool,):
            keys, values = (
                torch.ones(6, pool.head_num, dim) for dim in (pool.head_dim, pool.v_head_dim)
            )
            pool.set_kv_buffer_prefix_valid(6, LOC, LENS, keys, values)
            rows = pool.get_key_buffer(6).reshape(pool.slots, -1).any(dim=1).nonzero().flatten()
            assert rows.tolist() == [4, 5]
            return f"writes slots {rows.tolist()} of loc {LOC.tolist()} at lengths {LENS.tolist()}"

    return commit


def prefix_valid_scaled():
    with pools(MXFP8Pool(**MX)) as (pool,):
        keys, values = (torch.ones(6, 2, dim).to(torch.float8_e4m3fn) for dim in (32, 64))
        scales = [torch.full((6, 2, blocks), 127, dtype=torch.uint8) for blocks in (1, 2)]
        pool.set_kv_buffer_prefix_valid(6, LOC, LENS, keys, values, *scales)
        stored = pool.get_cpu_copy(torch.arange(pool.slots))[1][0][2].view(torch.uint8)
        slots = stored.any(dim=2).any(dim=1).nonzero().flatten().tolist()
        assert slots == [4, 5]
        return f"writes rows and scales of slots {slots}"


def static_page_major():
    with pools(PageMajorPool(**SHAPE)) as (pool,):
        assert pool.k_buffer[0].ndim == 4
        return f"a pool of strided views {tuple(pool.k_buffer[0].shape)}"


def stages():
    shape = {**ROWS, "total_kv_heads": 2}
    whole = page_major(**{**shape, "layers": range(4)})
    parts = [
        (Rank(pp=stage, pp_size=2), page_major(**{**shape, "layers": layers}))
        for stage, layers in enumerate([range(2), range(2, 4)])
    ]
    owned = cover(parts, (Rank(), whole))
    assert [len(part.cells) for part in owned] == [4, 4]
    return "2 pipeline stages cover 4 layers of an envelope"


def speculation():
    with pools(FAMILIES["draft"]["unified"]()) as (pool,):
        return (
            f"{DRAFT.layer_num} draft layers in the same entry: item_len "
            f"{pool.layout.item_lens[0]}, in transfers and host copies"
        )


def offload():
    sizes = []
    for family in ("mla", "kv"):
        with pools(FAMILIES[family]["unified_entries" if family == "mla" else "unified"]()) as (
            pool,
        ):
            sizes.append(len(pool.get_cpu_copy(torch.tensor([4]))))
    with pools(window_pool()) as (pool,):
        copied = pool.get_cpu_copy(torch.tensor([4]))
        assert set(copied) == {"full", "swa", "swa_mask"}
    with pools(state_pool(arrangement="unified_entries")) as (pool,):
        assert len(pool.get_cpu_copy(torch.tensor([1]))[0]) == 2
    assert sizes == [3, 3]
    return "host copies of unified MLA, hybrid SWA and mamba pools"


def window_pool():
    shape = {key: value for key, value in SHAPE.items() if key != "start_layer"}
    return SWAPool.of_sizes(
        **shape,
        size_swa=8,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0, 2],
        pool_class=UnifiedPool,
    )


ROWS = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
    "total_kv_heads": 4,
}


def strict(source, destination, tp=(1, 1)):
    """The text with which `relayout="never"` answers."""
    try:
        check_pair(Side(source, tp[0], "never"), Side(destination, tp[1], "never"))
    except LayoutMismatchError as error:
        return str(error)
    raise AssertionError("the pair was not refused")


def other_tp():
    prefill = [page_major(**ROWS, head_first=first) for first in (0, 2)]
    decode = page_major(**{**ROWS, "kv_heads": 4})
    text = strict(prefill[0], decode, (2, 1))
    assert text.startswith("--enable-unified-memory does not support different prefill / decode")
    ranks = [(Rank(tp=tp, tp_size=2), layout) for tp, layout in enumerate(prefill)]
    lengths = [
        int(plan(layout, decode, relayout="allow", owned=owned).runs([1], [2])[:, 4].sum())
        for layout, owned in zip(prefill, cover(ranks, (Rank(), decode)), strict=True)
    ]
    assert sum(lengths) == decode.item_lens[0]
    return f"the same text with relayout=never; with allow {lengths} bytes a page from the 2 ranks"


def one_side_unified():
    prefill, decode = page_major(**ROWS), token_major(**ROWS)
    assert strict(prefill, decode).startswith("PD KV layout mismatch on the whole-envelope path")
    return f"the same text with relayout=never; with allow {moved(prefill, decode)}"


def host(layout, **options):
    device = PageMajorPool(**SHAPE)
    return pools(device, HostPool(device, layout=layout, pages=5, **options))


def flat_pages():
    with host("page_first") as (_, pool):
        fill(pool)
        page = pool.get_data_page(4)
        pool.set_from_flat_data_page(8, page)
        assert torch.equal(pool.get_data_page(8).view(torch.uint8), page.view(torch.uint8))
        assert len(pool.get_dummy_flat_data_page()) == len(page)
        return f"a page of {page.nbytes} bytes, K then V, there and back"


def split_heads():
    with host("page_head") as (_, pool):
        _, lengths = pool.get_split_heads_page_buffer_meta(torch.arange(4, 8), 2)
        return f"(K, V) of each head group: {lengths} bytes"


def every_layout():
    names = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
    for name in names:
        with host(name) as (_, pool):
            addresses, _ = pool.get_page_buffer_meta(torch.arange(4))
            assert addresses
    return f"{', '.join(names)}, with get_page_buffer_meta"


def every_backend():
    loc = torch.tensor([4, 5])
    for name in ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified"):
        for backend in ("kernel", "direct"):
            with host(name) as (device, pool):
                fill(device)
                pool.backup_from_device_all_layer(device, loc - 4, loc, backend)
                for layer in range(3):
                    pool.load_to_device_per_layer(device, loc - 4, loc + 4, layer, backend)
                assert_equal(device.get_cpu_copy(loc + 4), device.get_cpu_copy(loc))
    return "kernel and direct take every layout"


REFUSALS = (
    Refusal(
        "R1",
        "`PageMajorMHATokenToKVPool.get_contiguous_buf_infos()`",
        "page-major layout has no per-layer contiguous regions; KV transfer / disaggregation is "
        "unsupported",
        buf_infos,
    ),
    Refusal(
        "R2",
        "its `get_cpu_copy(indices)`",
        "CPU offloading is unsupported under the page-major layout",
        get_copy,
    ),
    Refusal(
        "R3",
        "its `load_cpu_copy(copy, indices)`",
        "CPU offloading is unsupported under the page-major layout",
        load_copy,
    ),
    Refusal(
        "R4",
        "its `set_kv_buffer_prefix_valid(...)`",
        "prefix-valid commit is unsupported under the page-major layout",
        prefix_valid(PageMajorPool),
    ),
    Refusal(
        "R5",
        "the unified pool's `set_kv_buffer_prefix_valid(...)`",
        "prefix-valid commit is unsupported under the unified layout",
        prefix_valid(UnifiedPool),
    ),
    Refusal(
        "R6",
        "`PageMajorMHATokenToKVPool(...)` since 0.5.19",
        "the strided 4-D envelope views were removed; the static-pool page-major layout is "
        "temporarily unsupported",
        static_page_major,
    ),
    Refusal(
        "R7",
        "unified memory with pipeline stages",
        f"{UNIFIED_BOTH} does not support pipeline parallelism",
        stages,
    ),
    Refusal(
        "R7",
        "unified memory with draft lanes",
        f"{UNIFIED_BOTH} does not support speculative decoding with the Mooncake transfer backend.",
        speculation,
    ),
    Refusal(
        "R7",
        "offload of unified MLA, mamba and hybrid SWA pools",
        "--enable-unified-memory decode KV offload does not support MLA models yet.",
        offload,
    ),
    Refusal(
        "R8",
        "envelopes between TP 2 and TP 1",
        "--enable-unified-memory does not support different prefill / decode attention TP sizes",
        other_tp,
    ),
    Refusal(
        "R9",
        "an envelope into a pool that has none",
        "PD KV layout mismatch on the whole-envelope path",
        one_side_unified,
    ),
    Refusal(
        "R10",
        "`set_kv_buffer_prefix_valid(...)` with head_dim 8, v_head_dim 16, there on a GPU",
        "prefix-valid commit requires equal-width K/V rows, got head_dim=8 v_head_dim=16.",
        prefix_valid(TokenMajorPool),
    ),
    Refusal(
        "R11",
        "`set_kv_buffer_prefix_valid(...)` of MXFP8 rows",
        "prefix-valid commit is unsupported for MXFP8 KV cache (it does not carry the scale "
        "buffers).",
        prefix_valid_scaled,
    ),
    Refusal(
        "R12",
        "flat pages of a host pool with two widths",
        "Models with head_dim != v_head_dim do not support the flat-page interface",
        flat_pages,
    ),
    Refusal(
        "R13",
        "its `get_split_heads_page_buffer_meta(indices, 2)`",
        "get_split_heads_page_buffer_meta requires layout='page_head', which is not supported for "
        "models with head_dim != v_head_dim.",
        split_heads,
    ),
    Refusal(
        "R14",
        "host layouts for two widths",
        "Unsupported layout for models with head_dim != v_head_dim",
        every_layout,
    ),
    Refusal(
        "R15",
        "IO backends for two widths",
        "Unsupported layout for models with head_dim != v_head_dim and io_backend='kernel'",
        every_backend,
    ),
)


def table():
    """docs/refusals.md."""
    lines = [
        "# What is refused elsewhere",
        "",
        "Calls that SGLang 0.5.17 to 0.5.23 refuses (with the beginning of its text), and what the "
        "same call gives here. Made by running them on a CPU (`make generated`); do not edit.",
        "",
        "| | call | refused there with | here |",
        "| --- | --- | --- | --- |",
    ]
    lines += (
        f"| {entry.number} | {entry.call} | {entry.text} | {entry.here()} |" for entry in REFUSALS
    )
    return "\n".join(lines) + "\n"

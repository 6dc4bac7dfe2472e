"""Pages and host copies between the more special ones of SGLang's pools and ours, both ways.

HND, MXFP8, an index (DSA, MiniMax), keys alone, a sliding window, recurrent states; with prefixes
and with last pages that are not full. `make test-sglang` runs it.
"""

import importlib.metadata
import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here: run `make test-sglang`", allow_module_level=True)

from pdxfer.layout import StateTensor
from pdxfer.pool import (
    DSAPool,
    HybridMambaPool,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    SparsePool,
    StatePool,
    SWAPool,
    TokenMajorPool,
    TokenPool,
    UnifiedPool,
)
from tests.peers.sglang_side import both_ways, copy, memory_pool, ours, theirs

VERSION = importlib.metadata.version("sglang")
pytestmark = pytest.mark.filterwarnings("default")
PHYSICAL = {} if VERSION == "0.5.18" else {"physical": True}
SIZE, HEADS, DIM, LAYERS, FIRST = 40, 2, 16, 3, 5
OURS = {"token_major": TokenMajorPool, "page_major": PageMajorPool, "unified": UnifiedPool}
CASES = [
    pytest.param((16, 0), id="whole pages"),
    pytest.param((13, 0), id="a last page that is not full"),
    pytest.param((16, 8), id="a prefix"),
    pytest.param((15, 5), id="a prefix inside of a page"),
]
"""(tokens, prefix)."""


def their_arguments(page=4, dtype=torch.bfloat16, size=SIZE, **more):
    return {
        "size": size,
        "page_size": page,
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": FIRST,
        "end_layer": FIRST + LAYERS - 1,
        **more,
    }


def our_arguments(page=8, dtype=torch.bfloat16, size=48, **more):
    return {
        "size": size,
        "page_size": page,
        "dtype": dtype,
        "layer_num": LAYERS,
        "start_layer": FIRST,
        **more,
    }


@pytest.fixture
def generator():
    return np.random.default_rng(5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("v_dim", [DIM, 32])
@pytest.mark.parametrize("kind", OURS)
def test_hnd(monkeypatch, generator, kind, v_dim, case):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    widths = {"head_num": HEADS, "head_dim": DIM, "v_head_dim": v_dim}
    pool = memory_pool.MHATokenToKVPool(**their_arguments(), **widths)
    assert pool.kv_cache_layout == "hnd"
    there = theirs(pool)
    keys = torch.randn(3, HEADS, DIM).bfloat16()
    values = torch.randn(3, HEADS, v_dim).bfloat16()
    loc = torch.tensor([4, 9, 30])
    pool.set_kv_buffer(layer(6), loc, keys, values)
    assert torch.equal(there.rows["full", "k", 6].get(loc), keys.view(torch.uint8))
    both_ways(there, ours(OURS[kind](**our_arguments(), **widths)), generator, *case)


def layer(layer_id):
    class Layer:
        pass

    made = Layer()
    made.layer_id = layer_id
    return made


class TestMXFP8:
    @staticmethod
    def pair(page, dim):
        shape = {"head_num": HEADS, "head_dim": dim, "v_head_dim": dim}
        dtype = torch.float8_e4m3fn
        size = max(SIZE, 3 * page)
        pool = memory_pool.MHATokenToKVPoolMXFP8(
            **their_arguments(page, dtype, size, head_num=HEADS, head_dim=dim, v_head_dim=dim)
        )
        mine = MXFP8Pool(
            **our_arguments(page if page == 128 else 8, dtype, size + 8 * (page < 128)), **shape
        )
        return theirs(pool), ours(mine)

    @pytest.mark.parametrize("case", CASES)
    def test_pages_with_flat_scales(self, generator, case):
        both_ways(*self.pair(4, 32), generator, *case)

    @pytest.mark.parametrize("case", [(256, 0), (256, 128), (200, 0)], ids=str)
    def test_pages_with_tiles_of_scales(self, generator, case):
        both_ways(*self.pair(128, 128), generator, *case)

    @pytest.mark.skipif(VERSION == "0.5.18", reason="0.5.18 has no host copies of MXFP8 pools")
    def test_host_copies(self):
        """Of tiles: for flat scales SGLang indexes float8_e8m0fnu, which torch has on no CPU."""
        there, mine = self.pair(128, 128)
        slots, to = torch.arange(128, 135), torch.arange(131, 138)
        dtypes = [torch.float8_e4m3fn] * 2 + [torch.float8_e8m0fnu] * 2
        copied = copy(there, mine, slots, to)
        assert [tensor.dtype for tensor in copied[0][0]] == dtypes
        copied = copy(mine, there, slots + 4, to)
        assert [tensor.dtype for tensor in copied[0][0]] == dtypes

    def test_names(self):
        there, mine = self.pair(128, 128)
        assert there.pool.store_dtype == mine.pool.store_dtype
        assert there.pool.get_kv_size_bytes() == mine.pool.get_kv_size_bytes()
        for left, right in ((there.pool.k_buffer, mine.pool.k_buffer),
                            (there.pool.v_scale_buffer, mine.pool.v_scale_buffer)):  # fmt: skip
            assert [(t.shape, t.dtype) for t in left] == [(t.shape, t.dtype) for t in right]
        if VERSION != "0.5.18":
            infos = there.pool.get_kv_scale_buf_infos()
            assert infos[1:] == mine.pool.get_kv_scale_buf_infos()[1:]


class TestDSA:
    @staticmethod
    def pair(packed, skip=(False, True, False)):
        dtype = torch.float8_e4m3fn if packed else torch.bfloat16
        shape = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "index_head_dim": 128}
        shape["kv_cache_dim"] = 128 + 4 + 128 if packed else 192
        pool = memory_pool.DSATokenToKVPool(
            **their_arguments(64, dtype, 192), **shape, skip_topk_layers=list(skip)
        )
        mine = DSAPool(**our_arguments(64, dtype, 256), **shape, skip_topk_layers=list(skip))
        return theirs(pool), ours(mine)

    @pytest.mark.parametrize("case", [(128, 0), (100, 0), (128, 64), (150, 30)], ids=str)
    @pytest.mark.parametrize("packed", [False, True])
    def test_pages(self, generator, packed, case):
        both_ways(*self.pair(packed), generator, *case)

    @pytest.mark.parametrize("tokens", [128, 100])
    @pytest.mark.parametrize("packed", [False, True])
    def test_host_copies(self, monkeypatch, packed, tokens):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        there, mine = self.pair(packed)
        slots = torch.cat([torch.arange(128, 192), torch.arange(64, 128)])
        to = torch.cat([torch.arange(64, 128), torch.arange(192, 256)])
        for source, target in ((there, mine), (mine, there)):
            given, before = source.snapshot(), target.snapshot()
            target.pool.load_cpu_copy(source.pool.get_cpu_copy(slots[:tokens]), to[:tokens])
            for key, wanted in before.items():
                moved = tokens if key[1] == ("latent", "rope") else 128  # whole pages of an index
                wanted[to[:moved]] = given[key][slots[:moved]]
                assert torch.equal(target.rows[key].get(target.slots_of("full")), wanted), key

    def test_index_keys_are_written_alike(self):
        there, mine = self.pair(False)
        keys = torch.randint(0, 255, (3, 128)).to(torch.uint8)
        scales = torch.rand(3)
        loc = torch.tensor([70, 130, 64])
        mine.pool.set_index_k_scale_buffer(5, loc, keys, scales)
        for name, content in (("index_k", keys), ("index_k_scale", scales)):
            there.rows["full", name, 5].put(
                loc, content.reshape(3, 1, -1).contiguous().view(torch.uint8)
            )
        pages = [1, 2]
        left, right = (side.pool.get_index_k_with_scale_buffer(5)[pages] for side in (there, mine))
        token = loc - 64
        for first, width in ((0, 128), (64 * 128, 4)):
            for one in (token % 64 * width + first + at for at in range(width)):
                assert torch.equal(left[token // 64, one], right[token // 64, one])

    def test_names(self):
        there, mine = self.pair(True)
        assert there.pool.kv_cache_dim == mine.pool.kv_cache_dim
        assert there.pool.dsa_kv_cache_store_fp8 == mine.pool.dsa_kv_cache_store_fp8
        # One page more here, of the larger size.
        assert there.pool.get_state_buf_infos()[2] == mine.pool.get_state_buf_infos()[2]
        assert there.pool.get_contiguous_buf_infos()[2] == mine.pool.get_contiguous_buf_infos()[2]


class TestSparse:
    @staticmethod
    def pool():
        return memory_pool.MiniMaxSparseKVPool(
            size=SIZE,
            page_size=4,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=DIM,
            idx_head_dim=12,
            dense_layer_ids=[6],
            sparse_layer_ids=[5, 7],
            disable_value_sparse_layer_ids=[5, 7],
            device="cpu",
            start_layer=FIRST,
            end_layer=FIRST + LAYERS,
        )

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
    def test_pages(self, generator, arrangement, case):
        mine = SparsePool(
            **our_arguments(),
            head_num=HEADS,
            head_dim=DIM,
            index_head_dim=12,
            index_layer_ids=[5, 7],
            arrangement=arrangement,
        )
        both_ways(theirs(self.pool()), ours(mine), generator, *case)

    def test_rows_are_where_its_setters_put_them(self):
        pool = self.pool()
        there = theirs(pool)
        keys = torch.randn(2, 1, 12).bfloat16()
        pool.set_index_k_buffer(layer(7), torch.tensor([9, 4]), keys)
        rows = there.rows["full", "index_k", 7].get(torch.tensor([9, 4]))
        assert torch.equal(rows, keys.view(torch.uint8))

    @pytest.mark.parametrize("case", CASES)
    def test_keys_alone(self, generator, case):
        there = theirs(self.pool().index_k_pool)
        mine = TokenPool(there.layout)
        both_ways(there, ours(mine), generator, *case)


class TestWindow:
    FULL, WINDOW = (0, 2, 4), (1, 3)

    def pair(self, kind, page=4, dtype=torch.bfloat16):
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        shape = {"head_num": HEADS, "head_dim": DIM}
        layers = {
            "swa_attention_layer_ids": list(self.WINDOW),
            "full_attention_layer_ids": list(self.FULL),
        }
        pool = SWAKVPool(
            size=SIZE, size_swa=24, page_size=page, dtype=dtype, device="cpu", **shape, **layers
        )
        mine = SWAPool.of_sizes(
            size=48, size_swa=32, page_size=page, dtype=dtype, layer_num=5, pool_class=OURS[kind],
            **shape, **layers,
        )  # fmt: skip
        return theirs(pool), ours(mine)

    @pytest.mark.parametrize("case", [(16, 0, 8), (13, 0, 5), (16, 4, 8), (15, 10, 8)], ids=str)
    @pytest.mark.parametrize("kind", OURS)
    def test_pages_of_both_groups(self, generator, kind, case):
        tokens, prefix, first = case
        both_ways(*self.pair(kind), generator, tokens, prefix, {"swa": first})

    @pytest.mark.parametrize("kind", OURS)
    @pytest.mark.parametrize("mapped", ["all", "some", "none"])
    def test_host_copies(self, kind, mapped):
        there, mine = self.pair(kind)
        slots, to = torch.tensor([9, 20, 11, 4]), torch.tensor([8, 21, 13, 30])
        for side in (there, mine):
            size = side.pool.full_kv_pool.size + 4
            mapping = torch.zeros(size + 1, dtype=torch.int64)
            mapping[-1] = -1
            known = {"all": [9, 20, 11, 4, 8, 21, 13, 30], "some": [9, 11, 8, 21], "none": []}
            for at, slot in enumerate(known[mapped]):
                mapping[slot] = at + 4
            side.pool.register_mapping(mapping)
        for source, target in ((there, mine), (mine, there)):
            given, before = source.snapshot(), target.snapshot()
            copied = copy(source, target, slots, to)
            assert (copied["swa"] is None) == (mapped == "none")
            moved = {"all": [0, 1, 2, 3], "some": [0], "none": []}[mapped]
            at = source.pool.full_to_swa_index_mapping
            of = target.pool.full_to_swa_index_mapping
            for key, wanted in before.items():
                if key[0] == "swa":
                    wanted[of[to[moved]]] = given[key][at[slots[moved]]]
                    assert torch.equal(target.rows[key].get(target.slots_of("swa")), wanted), key

    @pytest.mark.parametrize("kind", OURS)
    def test_writes_and_translations(self, kind):
        there, mine = self.pair(kind)
        loc, swa = torch.tensor([9, 20]), torch.tensor([5, 7])
        for side in (there, mine):
            mapping = torch.zeros(side.pool.full_kv_pool.size + 5, dtype=torch.int64)
            mapping[loc], mapping[-1] = swa, -1
            side.pool.register_mapping(mapping)
        ids = torch.tensor([9, -1, 20, 8])
        left, right = (side.pool.translate_loc_from_full_to_swa(ids) for side in (there, mine))
        assert left.tolist() == right.tolist() == [5, -1, 7, 0]
        keys, values = torch.randn(2, 2, HEADS, DIM).bfloat16()
        for number in range(5):
            for side in (there, mine):
                write = memory_pool.KVWriteLoc(loc, swa_loc=swa, **PHYSICAL)
                side.pool.set_kv_buffer(layer(number), write, keys.clone(), values.clone())
            group = "swa" if number in self.WINDOW else "full"
            at = swa if group == "swa" else loc
            for part, rows in (("k", keys), ("v", values)):
                for side in (there, mine):
                    got = side.rows[group, part, number].get(at)
                    assert torch.equal(got, rows.view(torch.uint8))

    @pytest.mark.parametrize("kind", OURS)
    def test_sizes(self, kind):
        there, mine = self.pair(kind)
        for side in (there, mine):
            halves = (side.pool.full_kv_pool, side.pool.swa_kv_pool)
            assert side.pool.get_kv_size_bytes() == tuple(
                sum(column) for column in zip(*(h.get_kv_size_bytes() for h in halves), strict=True)
            )
            assert side.pool.mem_usage == sum(side.pool.get_kv_size_bytes()) / (1 << 30)


class TestStates:
    CONV, TEMPORAL, LAYERS = (16, 3), (4, 8, 2), [1, 3]

    def their_pool(self):
        from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType

        class Shape:
            conv, temporal = [TestStates.CONV], TestStates.TEMPORAL

        params = Mamba2CacheParams.__new__(Mamba2CacheParams)
        object.__setattr__(params, "shape", Shape())
        object.__setattr__(params, "layers", self.LAYERS)
        kinds = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
        object.__setattr__(params, "dtype", kinds)
        pool = memory_pool.MambaPool(
            size=6,
            spec_state_size=0,
            cache_params=params,
            mamba_layer_ids=self.LAYERS,
            device="cpu",
        )
        for tensor in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
            tensor.copy_(torch.randn(tensor.shape))
        return pool

    def our_pool(self, arrangement="token_major"):
        pool = StatePool(
            size=9,
            tensors=(
                StateTensor("conv.0", self.CONV, "bfloat16"),
                StateTensor("temporal", self.TEMPORAL, "float32"),
            ),
            layer_ids=self.LAYERS,
            arrangement=arrangement,
        )
        for tensor in (*pool.conv, pool.temporal):
            tensor.copy_(torch.randn(tensor.shape))
        return pool

    @staticmethod
    def tensors(pool):
        held = getattr(pool, "mamba_cache", pool)
        return [*held.conv, held.temporal]

    def check(self, source, target, take, put, move):
        given = [tensor.clone() for tensor in self.tensors(source)]
        wanted = [tensor.clone() for tensor in self.tensors(target)]
        move()
        for left, right, got in zip(given, wanted, self.tensors(target), strict=True):
            right[:, put] = left[:, take]
            assert torch.equal(got, right)

    @pytest.mark.parametrize("arrangement", ["token_major", "unified_entries"])
    @pytest.mark.parametrize("take", [torch.tensor(2), torch.tensor([2, 5]), torch.tensor([3])])
    def test_host_copies(self, take, arrangement):
        put = take + 1
        sides = self.their_pool(), self.our_pool(arrangement)
        for source, target in (sides, sides[::-1]):

            def move(source=source, target=target):
                target.load_cpu_copy(source.get_cpu_copy(take), put)

            self.check(source, target, take, put, move)

    def test_slots_by_the_plan(self):
        import ctypes

        from pdxfer.layout import plan

        there, mine = self.their_pool(), self.our_pool()
        addresses, lengths, items = there.get_contiguous_buf_infos()
        theirs_of = type(mine)(size=6, tensors=mine.tensors, layer_ids=self.LAYERS)
        assert [r.length_bytes for r in theirs_of.layout.regions] == lengths
        assert [r.item_len for r in theirs_of.layout.regions] == items
        at = [part.address for part in mine.memory]
        for source, target, here, to in (
            (there, mine, addresses, at), (mine, there, at, addresses),
        ):  # fmt: skip
            layouts = (theirs_of.layout, mine.layout)
            if source is mine:
                layouts = layouts[::-1]

            def move(layouts=layouts, here=here, to=to):
                runs = plan(*layouts).runs([2, 5], [4, 1])
                for a, b, c, d, length in runs.tolist():
                    ctypes.memmove(to[c] + d, here[a] + b, length)

            self.check(source, target, torch.tensor([2, 5]), torch.tensor([4, 1]), move)

    @pytest.mark.parametrize("slot", [torch.tensor(2), torch.tensor([2]), None])
    @pytest.mark.parametrize("latent", [False, True])
    def test_attention_beside_them(self, latent, slot):
        shape = {"size": SIZE, "page_size": 4, "dtype": torch.bfloat16}
        mla = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
        states = self.their_pool()
        pool = memory_pool.HybridLinearKVPool(
            **shape, head_num=HEADS, head_dim=DIM, full_attention_layer_ids=[0, 2], device="cpu",
            mamba_pool=states, use_mla=latent, **(mla if latent else {}),
        )  # fmt: skip
        if latent:
            full = MLAPool(**shape, **mla, layer_num=2, layer_ids=[0, 2])
        else:
            full = PageMajorPool(
                **shape, head_num=HEADS, head_dim=DIM, layer_num=2, layer_ids=[0, 2]
            )
        mine = self.our_pool()
        hybrid = HybridMambaPool(full_kv_pool=full, mamba_pool=mine)
        pool.full_kv_pool.model_layer_ids = (0, 2)
        there, here = theirs(pool.full_kv_pool), ours(full)
        slots, to = torch.tensor([9, 4, 30]), torch.tensor([8, 21, 5])
        put = None if slot is None else slot + 3
        both = (there, states, pool), (here, mine, hybrid)
        for (side_a, state_a, wrapped_a), (side_b, state_b, wrapped_b) in (both, both[::-1]):
            given, before = side_a.snapshot(), side_b.snapshot()

            def move(a=wrapped_a, b=wrapped_b):
                b.load_cpu_copy(a.get_cpu_copy(slots, slot), to, put)

            if slot is None:
                move()
            else:
                self.check(state_a, state_b, slot, put, move)
            for key, wanted in before.items():
                wanted[to] = given[key][slots]
                assert torch.equal(side_b.rows[key].get(side_b.slots_of("full")), wanted), key
        assert pool.get_kv_size_bytes() == hybrid.get_kv_size_bytes()

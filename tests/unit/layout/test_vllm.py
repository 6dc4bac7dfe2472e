"""vLLM's block layouts against a numpy array of the named order; tiles of its CPU kernels."""

import dataclasses
import itertools

import numpy as np
import pytest

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import (
    Side,
    check_pair,
    mla,
    plan,
    token_major,
    vectorized_5d,
    vllm_blocks,
    vllm_cpu,
    vllm_mla_blocks,
)
from pdxfer.layout.builders import table

SHAPE = {
    "layers": [3, 4, 7],
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 5,
    "dtype": "float32",
}
AXES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 8 + 8}


def view(memory, order, axes=AXES):
    """The tensor `[L, B, H, N, C]` that an engine would make of the memory."""
    array = memory.view(np.float32).reshape([axes[axis] for axis in order])
    return array.transpose([order.index(axis) for axis in "LBHNC"])


@pytest.mark.parametrize("order", table.names(table.BLOCKS))
class TestOrders:
    def test_cells_are_where_the_view_has_them(self, order):
        layout = vllm_blocks(order=order, **SHAPE)
        numbers = np.arange(np.prod(list(AXES.values())), dtype=np.float32)
        tensor = view(numbers, order)
        memory = numbers.view(np.uint8)
        for (at, layer), slot, head in itertools.product(
            enumerate(SHAPE["layers"]), range(20), range(2)
        ):
            content = tensor[at, slot // 4, head, slot % 4]
            for part, expected in (("k", content[:8]), ("v", content[8:])):
                region, offset = layout.locate(part, layer, slot, head)
                assert region == 0
                assert memory[offset : offset + 32].view(np.float32).tolist() == expected.tolist()

    def test_one_region_for_all_layers(self, order):
        layout = vllm_blocks(order=order, **SHAPE)
        assert [(r.length_bytes, r.item_len) for r in layout.regions] == [(7680, 1536)]
        assert not layout.unified_memory
        assert layout.relayout == "allow"
        assert layout.groups[0].reserved_pages == 1

    def test_other_value_width(self, order):
        layout = vllm_blocks(order=order, **SHAPE, v_head_dim=4)
        assert layout.regions[0].length_bytes == 3 * 5 * 2 * 4 * 12 * 4
        k, v = (layout.locate(part, 4, 6, 1)[1] for part in "kv")
        assert v - k == 32

    def test_latent_rows(self, order):
        shape = {key: SHAPE[key] for key in ("layers", "page_size", "pages", "dtype")}
        widths = {"kv_lora_rank": 6, "qk_rope_head_dim": 2}
        layout = vllm_mla_blocks(order=order, **widths, **shape)
        other = mla(**widths, **shape)
        made = plan(layout, other)
        assert made.runs([2], [3])[:, 4].sum() == 3 * 4 * 32
        assert layout.locate("rope", 3, 0)[1] - layout.locate("latent", 3, 0)[1] == 24

    def test_page_counts_do_not_enter_the_fingerprint(self, order):
        one, other = (vllm_blocks(order=order, **{**SHAPE, "pages": n}) for n in (5, 900))
        assert one.fingerprint == other.fingerprint
        check_pair(Side(one, 1, "never"), Side(other, 1, "never"))

    def test_equal_orders_move_blocks_in_the_longest_runs(self, order):
        runs = plan(*[vllm_blocks(order=order, **SHAPE)] * 2).runs([1, 2, 4], [2, 3, 1])
        per_page = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}[order]
        assert len(runs) == per_page * 2  # pages 1 and 2 touch on both sides
        assert runs[:, 4].sum() == 3 * 1536


def test_orders_differ_in_their_fingerprints():
    made = {vllm_blocks(order=order, **SHAPE).fingerprint for order in table.names(table.BLOCKS)}
    assert len(made) == len(table.names(table.BLOCKS))


def test_a_strict_pair_of_two_orders_is_refused():
    pair = [vllm_blocks(order=order, **SHAPE) for order in ("LBHNC", "LHBNC")]
    with pytest.raises(LayoutMismatchError, match="head over all pages"):
        check_pair(Side(pair[0], 1, "never"), Side(pair[1], 1, "never"))


def test_sizes_that_an_engine_reports():
    """Tensor (128, 2, 128, 128), strides (32768, 16384, 128, 1) of float32, four layers."""
    layout = vllm_blocks(
        layers=range(4), kv_heads=2, head_dim=64, page_size=128, pages=128, dtype="float32"
    )
    plane = layout.planes_by_key["full", "k", 2][0]
    assert (plane.page_stride, plane.head_stride, plane.row_stride) == (131072, 65536, 512)
    assert plane.base == 2 * 128 * 131072
    runs = plan(layout, layout).runs([7], [9], layers=[2])
    assert runs.tolist() == [[0, plane.base + 7 * 131072, 0, plane.base + 9 * 131072, 131072]]


@pytest.mark.parametrize("order", ["", "BHNLC", "lbhnc", None])
def test_no_such_order(order):
    with pytest.raises(ConfigError, match="LBHNC, LBNHC"):
        vllm_blocks(order=order, **SHAPE)


class TestCPUTiles:
    """Keys transposed `[D, N]` in the first half of each (block, head), values in the second."""

    @pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])
    def test_keys_are_a_tile_and_values_rows(self, order):
        layout = vllm_cpu(isa="vec16", order=order, **SHAPE)
        outside = vllm_blocks(order=order, **SHAPE)
        for layer, page, head in itertools.product(SHAPE["layers"], range(5), range(2)):
            start = outside.locate("k", layer, page * 4, head)[1]
            assert layout.locate("k", layer, page * 4, head) == (0, start)
            for row in range(4):
                found = layout.locate("v", layer, page * 4 + row, head)[1]
                assert found == start + 4 * 32 + row * 32
        keys, values = (layout.planes_by_key["full", part, 3][0] for part in "kv")
        assert (keys.row_kind, keys.tile, keys.cell_bytes) == ("tile", "vllm_cpu_vec16", 128)
        assert (values.row_kind, values.cell_bytes) == ("token", 32)

    def test_amx_packs_values_too(self):
        layout = vllm_cpu(isa="amx", **SHAPE)
        assert {plane.row_kind for plane in layout.planes} == {"tile"}

    def test_whole_pages_move_and_part_of_one_does_not(self):
        made = plan(*[vllm_cpu(isa="vec", **SHAPE)] * 2)
        assert made.runs([1], [3], layers=[3]).tolist() == [[0, 512, 0, 1536, 512]]
        # a partial last page moves whole
        assert made.runs([1, 2], [3, 4], (0, 5), layers=[3])[:, 4].sum() == 1024
        with pytest.raises(ConfigError, match="move whole"):
            made.runs([1, 2], [3, 4], (2, 8))

    def test_sets_of_instructions_do_not_mix(self):
        with pytest.raises(LayoutMismatchError) as raised:
            plan(vllm_cpu(isa="vec", **SHAPE), vllm_cpu(isa="vec16", **SHAPE))
        assert raised.value.fields == {
            "tile of full/k": "prefill=vllm_cpu_vec, decode=vllm_cpu_vec16"
        }
        with pytest.raises(LayoutMismatchError, match="token rows"):
            plan(vllm_cpu(isa="vec", **SHAPE), vllm_blocks(**SHAPE))

    @pytest.mark.parametrize("isa", ["vec", "amx"])
    def test_tiles_of_another_block_size_say_block_size_and_not_head_dim(self, isa):
        other = {**SHAPE, "page_size": 8}
        with pytest.raises(LayoutMismatchError, match=r"same page size \(block size\)") as raised:
            plan(vllm_cpu(isa=isa, **SHAPE), vllm_cpu(isa=isa, **other))
        tiles = ["full/k", "full/v"] if isa == "amx" else ["full/k"]
        assert raised.value.fields == {
            f"page_size of {part}": "prefill=4, decode=8" for part in tiles
        }
        assert "head_dim" not in str(raised.value)

    def test_tiles_of_another_head_dim_say_elements(self):
        other = {**SHAPE, "page_size": 8, "head_dim": 16, "v_head_dim": 8}
        with pytest.raises(LayoutMismatchError) as raised:
            plan(vllm_cpu(isa="vec", **SHAPE), vllm_cpu(isa="vec", **other))
        assert raised.value.fields == {
            "head_dim of full/k": "prefill=8, decode=16",
            "page_size of full/k": "prefill=4, decode=8",
        }

    def test_tiles_that_differ_by_a_byte_are_refused(self):
        """Also where the difference is less than a byte for each token of the page."""
        mine = vllm_cpu(isa="vec", **SHAPE)
        planes = (
            dataclasses.replace(p, cell_bytes=p.cell_bytes - 1) if p.part == "k" else p
            for p in mine.planes
        )
        theirs = dataclasses.replace(mine, planes=tuple(planes))
        with pytest.raises(LayoutMismatchError) as raised:
            plan(mine, theirs)
        assert raised.value.fields == {"cell_bytes of full/k": "prefill=128, decode=127"}

    def test_a_tile_and_token_rows_of_one_head_dim_differ_in_the_tile_alone(self):
        with pytest.raises(LayoutMismatchError) as raised:
            plan(vllm_cpu(isa="vec", **SHAPE), vllm_blocks(**SHAPE))
        assert raised.value.fields == {"tile of full/k": "prefill=vllm_cpu_vec, decode=token rows"}

    def test_what_no_engine_has(self):
        with pytest.raises(ConfigError, match="isa is 'neon'"):
            vllm_cpu(isa="neon", **SHAPE)
        with pytest.raises(ConfigError, match="ends in NC"):
            vllm_cpu(isa="vec", order="LBNHC", **SHAPE)

    def test_heads_of_other_ranks(self):
        half = {**SHAPE, "kv_heads": 1, "total_kv_heads": 2, "head_first": 1}
        made = plan(vllm_cpu(isa="vec", **SHAPE), vllm_cpu(isa="vec", **half))
        runs = made.runs([1], [3], layers=[3])
        # the second (block, head) of 256 bytes
        assert runs.tolist() == [[0, 512 + 256, 0, 3 * 256, 256]]


VECTORS = {**SHAPE, "dtype": "bfloat16", "page_size": 8}


class TestVectorized5D:
    def test_a_page_of_a_head_is_one_tile(self):
        layout = vectorized_5d(**VECTORS)
        assert len(layout.regions) == 6
        assert layout.item_lens == (8 * 2 * 16,) * 6
        assert layout.locate("k", 4, 3 * 8, 1) == (1, 3 * 256 + 128)
        assert {plane.tile for plane in layout.planes} == {"vectorized_5d"}

    def test_pairs(self):
        made = plan(*[vectorized_5d(**VECTORS)] * 2)
        assert made.runs([1, 2], [3, 4], (0, 9), layers=[3])[:, 4].tolist() == [512, 512]
        with pytest.raises(LayoutMismatchError, match=r"tile of full/k.*token rows"):
            plan(vectorized_5d(**VECTORS), token_major(**VECTORS))

    @pytest.mark.parametrize("changes", [{"head_dim": 12}, {"page_size": 4}])
    def test_sizes_that_do_not_divide(self, changes):
        (name,) = changes
        with pytest.raises(ConfigError, match=f"{name} is {changes[name]}"):
            vectorized_5d(**{**VECTORS, **changes})

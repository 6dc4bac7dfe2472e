"""Sizes, offsets, strides and item lengths that engines' own pools have for the same shapes."""

import pytest

from pdxfer.layout import head_major, mla, page_major, token_major, unified_entries
from pdxfer.layout.builders.entries import entry_bytes, first_free_slot, unified_reserved_bytes

# 32 usable tokens and one reserved page of 4 tokens.
SHAPE = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}


def lengths(layout):
    return [region.length_bytes for region in layout.regions]


def bases(layout, part):
    return [plane.base for plane in layout.planes if plane.part == part]


class TestTokenMajor:
    def test_regions_are_keys_of_all_layers_then_values(self):
        layout = token_major(**SHAPE)
        assert lengths(layout) == [1152] * 6
        assert layout.item_lens == (128,) * 6
        order = [(p.part, p.layer) for p in sorted(layout.planes, key=lambda p: p.region)]
        assert order == [(part, layer) for part in "kv" for layer in range(3)]

    def test_other_value_width(self):
        layout = token_major(**SHAPE, v_head_dim=4)
        assert lengths(layout) == [1152] * 3 + [576] * 3
        assert layout.item_lens == (128,) * 3 + (64,) * 3

    def test_fp8_is_stored_as_bytes(self):
        layout = token_major(**{**SHAPE, "dtype": "float8_e4m3fn"})
        assert lengths(layout) == [576] * 6
        assert layout.item_lens == (64,) * 6

    @pytest.mark.parametrize(("slot", "head"), [(0, 0), (5, 1), (35, 1)])
    def test_address_formula(self, slot, head):
        layout = token_major(**SHAPE, v_head_dim=4)
        assert layout.locate("k", 2, slot, head) == (2, slot * 32 + head * 16)
        assert layout.locate("v", 2, slot, head) == (5, slot * 16 + head * 8)

    def test_head_major_has_the_same_regions(self):
        layout = head_major(**SHAPE)
        assert layout.regions == token_major(**SHAPE).regions
        # [pages, heads, rows, head_dim]: page 1, row 1, head 1
        assert layout.locate("k", 0, 5, 1) == (0, ((1 * 2 + 1) * 4 + 1) * 16)


class TestPageMajor:
    def test_one_buffer_of_page_envelopes(self):
        layout = page_major(**SHAPE)
        assert lengths(layout) == [6912]
        assert layout.item_lens == (768,)
        assert bases(layout, "k") == [0, 256, 512]
        assert bases(layout, "v") == [128, 384, 640]
        assert {plane.page_stride for plane in layout.planes} == {768}

    def test_other_value_width(self):
        layout = page_major(**SHAPE, v_head_dim=4)
        assert lengths(layout) == [5184]
        assert layout.item_lens == (576,)
        assert bases(layout, "k") == [0, 192, 384]
        assert bases(layout, "v") == [128, 320, 512]
        assert {plane.page_stride for plane in layout.planes} == {576}

    @pytest.mark.parametrize(("slot", "head"), [(0, 0), (5, 1), (35, 1)])
    def test_address_formula(self, slot, head):
        layout = page_major(**SHAPE, v_head_dim=4)
        page, row = divmod(slot, 4)
        block = page * 576 + 1 * 4 * (32 + 16)
        assert layout.locate("k", 1, slot, head) == (0, block + row * 32 + head * 16)
        assert layout.locate("v", 1, slot, head) == (0, block + 4 * 32 + row * 16 + head * 8)

    def test_page_of_one_token_is_one_slot_per_envelope(self):
        layout = page_major(**{**SHAPE, "page_size": 1, "pages": 33})
        assert [layout.locate(part, layer, 1, 0)[1] for layer in range(3) for part in "kv"] == [
            192, 224, 256, 288, 320, 352,
        ]  # fmt: skip

    def test_it_is_unified_and_moves_whole_unless_told_otherwise(self):
        layout = page_major(**SHAPE)
        assert layout.unified_memory
        assert layout.relayout == "never"
        assert not token_major(**SHAPE).unified_memory
        assert token_major(**SHAPE).relayout == "allow"


class TestUnifiedEntries:
    def test_entry_of_a_token(self):
        layout = unified_entries(**SHAPE)
        assert layout.item_lens == (768,)
        assert bases(layout, "k") == [0, 64, 128]
        assert bases(layout, "v") == [32, 96, 160]
        assert {plane.row_stride for plane in layout.planes} == {192}
        assert layout.unified_memory
        assert layout.relayout == "never"

    def test_same_size_as_page_major_in_another_order(self):
        entries, pages = unified_entries(**SHAPE), page_major(**SHAPE)
        assert entries.regions == pages.regions
        assert entries.fingerprint != pages.fingerprint

    def test_entries_are_padded_to_32_bytes(self):
        layout = unified_entries(**{**SHAPE, "kv_heads": 1, "layers": range(1)}, v_head_dim=16)
        assert layout.planes[0].row_stride == 64  # 16 + 32, padded
        assert layout.item_lens == (256,)

    def test_reserved_slots_of_a_shared_buffer(self):
        state_entry, page_size = 4288, 4
        reserved = unified_reserved_bytes([(entry_bytes(192), page_size), (state_entry, 1)])
        assert reserved == 4288
        assert first_free_slot(reserved, 192) == 23
        assert first_free_slot(reserved, state_entry) == 1


MLA_SHAPE = {
    "layers": range(3),
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}


class TestMla:
    def test_one_tensor_a_layer_holds_both_parts(self):
        layout = mla(**MLA_SHAPE)
        assert lengths(layout) == [1728] * 3
        assert layout.item_lens == (192,) * 3
        assert layout.locate("latent", 2, 5) == (2, 5 * 48)
        assert layout.locate("rope", 2, 5) == (2, 5 * 48 + 32)
        assert {plane.heads_total for plane in layout.planes} == {1}

    def test_page_envelope(self):
        layout = mla(**MLA_SHAPE, arrangement="page_major")
        assert layout.item_lens == (576,)
        assert layout.locate("rope", 1, 5) == (0, 576 + 192 + 48 + 32)

    def test_token_entries(self):
        layout = mla(**MLA_SHAPE, arrangement="unified_entries")
        assert layout.planes[0].row_stride == 160  # 3 rows of 48, padded
        assert layout.locate("rope", 1, 5) == (0, 5 * 160 + 48 + 32)

"""Numbers of every layout for one shape, by name; they are never edited, only added.

Each is (regions, item_len of the first, (region, offset) of a cell of each part, first 16 digits of
the fingerprint) at layer 5, page 3, row 1, head 3 of the shape that is named beside it.
"""

from pdxfer.layout import StateTensor

HEADS_SHAPE = {
    "layers": [4, 5, 6], "kv_heads": 2, "head_dim": 32, "v_head_dim": 64, "total_kv_heads": 4,
    "head_first": 2, "page_size": 32, "pages": 5, "dtype": "bfloat16",
}  # fmt: skip
OTHERS = {
    "page_unified": {"head_groups": 2},
    "vllm_cpu": {"isa": "vec16"},
    "mxfp8": {"dtype": "float8_e4m3fn", "interleaved": True},
}
"""What some take besides, or otherwise."""
KEYS_SHAPE = {
    "layers": [4, 5, 6], "heads": 2, "head_dim": 32, "heads_total": 4, "head_first": 2,
    "page_size": 32, "pages": 5, "dtype": "bfloat16",
}  # fmt: skip
LATENT_SHAPE = {
    "layers": [4, 5, 6], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "page_size": 32, "pages": 5,
    "dtype": "bfloat16",
}  # fmt: skip
STATES_SHAPE = {
    "layers": [4, 5, 6],
    "slots": 5,
    "tensors": [
        StateTensor("conv.0", (16, 3), "bfloat16", 0, (4, 4, 8)),
        StateTensor("temporal", (4, 2, 4), "float32"),
    ],
}
HEADS = {
    "token_major": (6, 4096, (1, 12480), (4, 24960), "b8b268c73d146c5d"),
    "head_major": (6, 4096, (1, 14400), (4, 28800), "abd034af09fe0a8e"),
    "page_major": (1, 36864, (0, 123072), (0, 127360), "fd72265a48a38cea"),
    "unified_entries": (1, 36864, (0, 112192), (0, 112384), "7856c981bfcbe0e6"),
    "layer_first": (6, 4096, (1, 12480), (4, 24960), "b8b268c73d146c5d"),
    "page_first": (2, 12288, (0, 37440), (1, 74880), "3f1fefd740671717"),
    "page_first_direct": (2, 12288, (0, 41152), (1, 82304), "57818265466ca870"),
    "page_head": (2, 12288, (0, 43264), (1, 86528), "947f3b2465bc49a3"),
    "page_unified": (1, 36864, (0, 135232), (0, 137344), "c55b036b39d6f2ac"),
    "LBHNC": (1, 36864, (0, 104640), (0, 104704), "6be1c0f2c6cd96d5"),
    "LBNHC": (1, 36864, (0, 98880), (0, 98944), "64882446059dbf2f"),
    "LHBNC": (1, 36864, (0, 110784), (0, 110848), "7e0f7e96ee7c8108"),
    "BLHNC": (1, 36864, (0, 129216), (0, 129280), "47ada6054333a970"),
    "BLNHC": (1, 36864, (0, 123456), (0, 123520), "5dd997c9108fab5a"),
    "BHLNC": (1, 36864, (0, 135360), (0, 135424), "aab2e9d34c8e5b31"),
    "vllm_blocks": (1, 36864, (0, 104640), (0, 104704), "6be1c0f2c6cd96d5"),
    "vllm_cpu": (1, 36864, (0, 104448), (0, 106624), "195d77400c2fe68f"),
    "vectorized_5d": (6, 4096, (1, 14336), (4, 28672), "60cffd744dc5f7a9"),
    "mxfp8": (12, 2048, (1, 6240), (10, 448), "d30219e9a1c5628c"),
    "k_only": (3, 4096, (1, 12480), "a7dcc7b0ed97a83f"),
}
LATENT = {
    "token_major": (3, 1536, (1, 4656), (1, 4688), "a76fc9f78362c298"),
    "page_major": (1, 4608, (0, 15408), (0, 15440), "b5d9f8f9af7600ee"),
    "unified_entries": (1, 5120, (0, 15568), (0, 15600), "15986cf0f2237813"),
    "layer_first": (3, 1536, (1, 4656), (1, 4688), "67aad895d555eb85"),
    "page_first": (1, 4608, (0, 14016), (0, 14048), "11824a4072beb49d"),
    "page_first_direct": (1, 4608, (0, 15408), (0, 15440), "057e7b84b7d19510"),
    "page_head": (1, 4608, (0, 14016), (0, 14048), "28ede4d119138376"),
    "page_unified": (1, 4608, (0, 15408), (0, 15440), "057e7b84b7d19510"),
    "LBHNC": (1, 4608, (0, 12336), (0, 12368), "56b7e4a6d4784b5b"),
    "LBNHC": (1, 4608, (0, 12336), (0, 12368), "07248886a0f581a1"),
    "LHBNC": (1, 4608, (0, 12336), (0, 12368), "8887a62d3f19fb77"),
    "BLHNC": (1, 4608, (0, 15408), (0, 15440), "a91b199cc7ef1b6c"),
    "BLNHC": (1, 4608, (0, 15408), (0, 15440), "057e7b84b7d19510"),
    "BHLNC": (1, 4608, (0, 15408), (0, 15440), "3829780266f445cd"),
    "mla": (3, 1536, (1, 4656), (1, 4688), "a76fc9f78362c298"),
    "vllm_mla_blocks": (1, 4608, (0, 12336), (0, 12368), "56b7e4a6d4784b5b"),
    "dsa": (6, 1536, (1, 4656), (1, 4688), "fc9466a66a824985"),
}
STATES = {
    "state": (6, 96, (1, 342), (4, 448), "9909be7edd13da11"),
    "state_entries": (1, 672, (0, 2166), (0, 2496), "f8579559c2487afc"),
}

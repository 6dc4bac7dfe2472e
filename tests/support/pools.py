"""Pools of every kind, and what their methods must do, written from the address formula alone."""

import ctypes
import itertools

import numpy as np
import torch

from pdxfer.layout.builders.state import StateTensor
from pdxfer.pool import (
    DraftLanes,
    MLAPool,
    MXFP8Pool,
    PageMajorPool,
    SparsePool,
    StatePool,
    TokenMajorPool,
    UnifiedPool,
)

SHAPE = {
    "size": 24,
    "page_size": 4,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 8,
    "v_head_dim": 16,
    "layer_num": 3,
    "start_layer": 5,
    "total_kv_heads": 6,
    "head_first": 2,
}
DRAFT = DraftLanes(layer_num=2, head_num=1, head_dim=8, start_layer=40)
MLA = {
    "size": 24,
    "page_size": 4,
    "dtype": torch.bfloat16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "layer_num": 3,
}
FP8 = {"dtype": torch.float8_e4m3fn, "head_dim": 16}
MX = {**SHAPE, "dtype": torch.float8_e4m3fn, "head_dim": 32, "v_head_dim": 64}


def kv(kind, **options):
    return lambda **more: kind(**{**SHAPE, **options, **more})


# By family: pools of one family hold the same parts of the same shapes in other places.
FAMILIES = {
    "kv": {
        "token": kv(TokenMajorPool),
        "page": kv(PageMajorPool),
        "unified": kv(UnifiedPool),
        "page of 1": kv(PageMajorPool, page_size=1),
        "unified of 8": kv(UnifiedPool, page_size=8),
    },
    "equal widths": {
        "token": kv(TokenMajorPool, v_head_dim=8),
        "page": kv(PageMajorPool, v_head_dim=8),
        "unified": kv(UnifiedPool, v_head_dim=8),
    },
    "fp8": {
        "token": kv(TokenMajorPool, **FP8),
        "page": kv(PageMajorPool, **FP8),
        "unified": kv(UnifiedPool, **FP8),
    },
    "draft": {
        "token": kv(TokenMajorPool, draft=DRAFT),
        "page": kv(PageMajorPool, draft=DRAFT),
        "unified": kv(UnifiedPool, draft=DRAFT),
    },
    "sparse": {
        "token": kv(SparsePool, index_head_dim=12, index_layer_ids=[5, 7]),
        "page": kv(SparsePool, index_head_dim=12, index_layer_ids=[5, 7], arrangement="page_major"),
    },
    "mla": {
        name: lambda arrangement=name, **more: MLAPool(
            **{**MLA, "arrangement": arrangement, **more}
        )
        for name in ("token_major", "page_major", "unified_entries")
    },
    "mxfp8": {
        "flat": lambda **more: MXFP8Pool(**{**MX, **more}),
        "tiles": lambda **more: MXFP8Pool(
            **{**MX, "size": 128, "page_size": 64, "interleaved": True, **more}
        ),
    },
}
KINDS = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]

STATE = (
    StateTensor("conv.0", (16, 3), "bfloat16"),
    StateTensor("conv.1", (3, 4), "bfloat16", axis=1, shard_groups=(1, 1, 2), tp=1, tp_size=2),
    StateTensor("temporal", (4, 8, 16), "float32"),
)


def state_pool(**options):
    return StatePool(**{"size": 5, "tensors": STATE, "layer_ids": (1, 3), **options})


def fill(pool, seed=0):
    """Random bytes everywhere, also where no cell is."""
    generator = np.random.default_rng(seed)
    for part in pool.memory:
        content = generator.integers(0, 256, part.length_bytes, np.uint8).tobytes()
        ctypes.memmove(part.address, content, part.length_bytes)


def snapshot(pool):
    """Every byte of every region, through no tensor."""
    return [
        np.frombuffer(ctypes.string_at(part.address, part.length_bytes), np.uint8).copy()
        for part in pool.memory
    ]


def assert_memory(pool, expected):
    for got, wanted in zip(snapshot(pool), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def parts_of_layer(layout, layer):
    """Parts of a layer in the order of a host copy; latent and rope are one row."""
    names = dict.fromkeys(plane.part for plane in layout.planes)
    present = [name for name in names if any(p.key[1:] == (name, layer) for p in layout.planes)]
    return [("latent", "rope")] if "latent" in present else [(name,) for name in present]


def row_places(layout, part, layer, slot):
    """(region, offset, length) of the bytes of one token of a part, head by head."""
    group = layout.groups[0]
    places = []
    for plane in layout.planes_by_key[group.name, part, layer]:
        for head in range(plane.head_first, plane.head_end):
            region, offset = layout.locate(part, layer, slot, head)
            if plane.row_kind == "tile":
                width = plane.cell_bytes // group.page_size
                token = slot % group.page_size
                offset += ((token % 32) * (group.page_size // 32) + token // 32) * width
                places.append((region, offset, width))
            else:
                places.append((region, offset, plane.cell_bytes))
    return places


def read_row(memory, layout, parts, layer, slot):
    """Bytes of one token: head by head, and inside of a head part by part."""
    by_part = [row_places(layout, part, layer, slot) for part in parts]
    return b"".join(
        memory[region][offset : offset + length].tobytes()
        for region, offset, length in itertools.chain(*zip(*by_part, strict=True))
    )


def write_row(memory, layout, parts, layer, slot, content):
    by_part = [row_places(layout, part, layer, slot) for part in parts]
    at = 0
    for region, offset, length in itertools.chain(*zip(*by_part, strict=True)):
        piece = np.frombuffer(content[at : at + length], np.uint8)
        memory[region][offset : offset + length] = piece
        at += length
    assert at == len(content)


def copied_rows(copied, layer_number, unit):
    """The bytes of each row of one unit of one layer of a host copy."""
    chunks = [
        [chunk] if isinstance(chunk, torch.Tensor) else chunk for chunk in copied[layer_number]
    ]
    rows = [tensors[unit].contiguous().view(torch.uint8).numpy() for tensors in chunks]
    return [row.tobytes() for block in rows for row in block]


def random_rows(generator, shape, dtype):
    """Rows of any bits that are no NaN."""
    values = torch.from_numpy(generator.integers(-448, 448, shape).astype(np.float32) / 8)
    return values.to(dtype)

"""Caches of shared memory for tests: a layout and the memory it describes, filled from a seed."""

from __future__ import annotations

import numpy as np

from pdxfer import memory
from pdxfer.layout import KVLayout, page_major, token_major

PAGE = 16


def small(builder=page_major, **changes) -> KVLayout:
    """A small layout: 4 layers, 2 heads of 32, pages of 16 tokens."""
    settings = {
        "layers": range(4),
        "kv_heads": 2,
        "head_dim": 32,
        "page_size": PAGE,
        "pages": 64,
        "dtype": "bfloat16",
    }
    return builder(**{**settings, **changes})


def small_token_major(**changes) -> KVLayout:
    """The same cells, a region a layer and part."""
    return small(token_major, **changes)


class SeededCache:
    """What a client attaches, with random bytes in it."""

    def __init__(self, layout: KVLayout, seed: int) -> None:
        self.layout = layout
        sizes = [region.length_bytes for region in layout.regions]
        offsets = np.cumsum([0, *(-(-size // 4096) * 4096 for size in sizes)]).tolist()
        self._shared = memory.allocate(offsets[-1])
        self.memory = tuple(
            self._shared.range(offset, size)
            for offset, size in zip(offsets[:-1], sizes, strict=True)
        )
        whole = np.frombuffer(self._shared.buffer, dtype=np.uint8)
        self.regions = [
            whole[offset : offset + size] for offset, size in zip(offsets[:-1], sizes, strict=True)
        ]
        rng = np.random.default_rng(seed)
        for region in self.regions:
            region[:] = rng.integers(0, 256, size=region.size, dtype=np.uint8)

    def snapshot(self) -> list[np.ndarray]:
        """A copy of every byte."""
        return [region.copy() for region in self.regions]

    def cell(self, part, layer, slot, head, group="full") -> np.ndarray:
        """The bytes of one cell, in place."""
        region, offset = self.layout.locate(part, layer, slot, head, group)
        plane = next(p for p in self.layout.planes if (p.part, p.layer) == (part, layer))
        return self.regions[region][offset : offset + plane.cell_bytes]


def expect(source, destination, before, source_pages, destination_pages, tokens) -> None:
    """Whole pools: the request's cells are the source's, every other byte is as before."""
    kept = SeededCache.__new__(SeededCache)
    kept.layout, kept.regions = destination.layout, before
    for token in range(-(-tokens // PAGE) * PAGE):
        from_slot = int(source_pages[token // PAGE]) * PAGE + token % PAGE
        to_slot = int(destination_pages[token // PAGE]) * PAGE + token % PAGE
        for plane in source.layout.planes:
            for head in range(plane.head_first, plane.head_first + plane.heads):
                kept.cell(plane.part, plane.layer, to_slot, head)[:] = source.cell(
                    plane.part, plane.layer, from_slot, head
                )
    for region, wanted in zip(destination.regions, before, strict=True):
        assert np.array_equal(region, wanted)

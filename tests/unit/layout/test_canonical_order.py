"""The canonical order of a chunk's bytes, as the specification's worked example has it."""

import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import Pages, PlannedChunk, page_major, plan, token_major

SHAPE = {
    "layers": range(2),
    "kv_heads": 2,
    "head_dim": 4,
    "v_head_dim": 2,
    "page_size": 2,
    "pages": 12,
    "dtype": "uint8",
}
CELL_BYTES = {"k": 4, "v": 2}


def test_destination_bytes_follow_the_worked_example():
    layout = token_major(**SHAPE)
    made = plan(page_major(**SHAPE), layout, relayout="allow")
    expected = []
    for page, row in ((5, 1), (9, 0), (9, 1)):
        if row == 0 or page == 5:
            rows = [1] if page == 5 else [0, 1]
            for layer in range(2):
                for part, size in CELL_BYTES.items():
                    for each in rows:
                        for head in range(2):
                            region, at = layout.locate(part, layer, page * 2 + each, head)
                            expected += [(region, at + byte) for byte in range(size)]
    pages = {"full": Pages(np.array([5, 9]))}
    pieces = made.destination_pieces(pages, {"full": (1, 4)})
    found = [(r, at + byte) for r, at, size in pieces.tolist() for byte in range(size)]
    assert found == expected


def test_stretches_of_a_large_chunk_are_planned_one_by_one():
    source, destination = page_major(**SHAPE), token_major(**SHAPE)
    made = plan(source, destination, relayout="allow")
    ids = {"full": Pages(np.arange(1, 11))}
    chunk = PlannedChunk(made, ids, ids, {"full": (3, 19)})
    parts = list(chunk.intervals(runs_max=int(made.runs_per_page * 3)))
    assert [part.ranges["full"] for part in parts] == [(3, 8), (8, 14), (14, 19)]
    assert [part.first_byte for part in parts] == [0, 5 * 24, 11 * 24]
    assert parts[1].exact_ranges == {"full": (3, 20)}
    (same,) = chunk.intervals(runs_max=1 << 20)
    assert same is chunk


def test_pieces_outside_the_pages_are_refused():
    layout = token_major(**SHAPE)
    made = plan(layout, layout)
    with pytest.raises(ConfigError, match=r"hold tokens \[0, 4\), the range is \[0, 6\)"):
        made.destination_pieces({"full": Pages([1, 2])}, {"full": (0, 6)})
    with pytest.raises(ConfigError, match="appeared before"):
        made.destination_pieces({"full": Pages([1, 1])}, {"full": (0, 4)})

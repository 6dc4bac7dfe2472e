"""Outlines of requests: filled in row by row they are the runs of the plan."""

import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import Pages, combine, page_major, plan, token_major

HEADS = {"layers": range(3), "kv_heads": 2, "head_dim": 4, "dtype": "float16"}


def filled_in(outline):
    """Rows and staging offsets, by the words of `Outline`'s docstring."""
    runs, offsets = [], []
    for row in range(outline.rows):
        span = outline.spans[np.searchsorted(outline.spans[:, 0], row, side="right") - 1]
        page, index = divmod(row - span[0], span[6])
        entry = outline.entries[span[5] + index]
        source_id = outline.source_ids[span[2] + page]
        destination_id = outline.destination_ids[span[3] + page]
        assert span[8] <= source_id < span[9]
        assert span[10] <= destination_id < span[11]
        runs.append(
            [
                entry[5],
                entry[0] + source_id * entry[3],
                entry[6],
                entry[1] + destination_id * entry[4],
                entry[2],
            ]
        )
        offsets.append(span[1] + page * span[7] + entry[7])
    return np.array(runs, np.int64).reshape(-1, 5), np.array(offsets, np.int64)


def two_groups(build, page_size):
    return combine(
        build(**HEADS, page_size=page_size, pages=96 // page_size + 2, group="full"),
        build(**HEADS, page_size=page_size, pages=96 // page_size + 2, group="window"),
    )


@pytest.mark.parametrize("layers", [None, [1], [0, 2]])
@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (8, 16)])
@pytest.mark.parametrize("builders", [(token_major, page_major), (page_major, token_major)])
def test_rows_are_the_runs_of_pages_that_do_not_touch(builders, sizes, layers):
    compiled = plan(
        *(two_groups(build, size) for build, size in zip(builders, sizes, strict=True)),
        relayout="allow",
    )
    # Every other page from the end on: no page touches the one before it.
    source, destination = (
        {
            name: Pages(np.arange(96 // size, 0, -1)[::2], first_token=first)
            for name, first in (("full", 0), ("window", 16))
        }
        for size in sizes
    )
    ranges = {"full": (3, 40), "window": (16, 48)}
    outline = compiled.outline(source, destination, ranges, layers=layers)
    batches = compiled.batches(source, destination, ranges, layers=layers)
    runs, offsets = filled_in(outline)
    np.testing.assert_array_equal(runs, batches.runs)
    np.testing.assert_array_equal(offsets, np.cumsum(runs[:, 4]) - runs[:, 4])
    assert outline.length_bytes == batches.length_bytes > 0


def test_pages_that_touch_stay_rows_of_their_own():
    layout = page_major(**HEADS, page_size=8, pages=12)
    compiled = plan(layout, layout)
    pages = {"full": Pages(np.arange(1, 11))}
    outline = compiled.outline(pages, pages, {"full": (0, 80)})
    assert outline.rows == 10
    assert len(compiled.batches(pages, pages, {"full": (0, 80)}).runs) == 1


def test_nothing_to_move_is_an_empty_outline():
    layout = page_major(**HEADS, page_size=8, pages=12)
    pages = {"full": Pages([1])}
    outline = plan(layout, layout).outline(pages, pages, {"full": (4, 4)})
    assert (outline.rows, outline.length_bytes) == (0, 0)
    assert len(outline.spans) == len(outline.entries) == 0


def test_ids_are_checked_as_for_batches():
    layout = page_major(**HEADS, page_size=8, pages=12)
    compiled = plan(layout, layout)
    good, bad = {"full": Pages([1])}, {"full": Pages([12])}
    with pytest.raises(ConfigError, match="destination page id 12"):
        compiled.outline(good, bad, {"full": (0, 8)})
    with pytest.raises(ConfigError, match="appeared before"):
        compiled.outline({"full": Pages([1, 2])}, {"full": Pages([3, 3])}, {"full": (0, 16)})

"""Pairs that others refuse or get wrong: the page that tells of them is what happens."""

from pathlib import Path

import pytest

from tests.support.transfer_rows import ROWS

PAGE = Path(__file__).resolve().parents[3] / "docs/transfers.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.pair)
def test_a_row_is_what_happens(row):
    line = f"| {row.pair} | {row.there} | {row.here()} |"
    assert line in PAGE.read_text(encoding="utf-8").splitlines(), "run `make generated`"


def test_the_page_has_every_row():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len(rows) == len(ROWS) + 2

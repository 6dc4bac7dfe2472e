"""Everything that is refused elsewhere works here, and the page that says so is what happens."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support import refusals

PAGE = Path(__file__).resolve().parents[3] / "docs/refusals.md"


@pytest.mark.parametrize(
    "entry", refusals.REFUSALS, ids=lambda entry: f"{entry.number} {entry.call}"
)
def test_the_call_works_as_the_page_says(entry):
    line = f"| {entry.number} | {entry.call} | {entry.text} | {entry.here()} |"
    assert line in PAGE.read_text(encoding="utf-8").splitlines(), "run `make generated`"


def test_the_page_has_every_refusal():
    numbers = {entry.number for entry in refusals.REFUSALS}
    assert numbers == {f"R{number}" for number in range(1, 16)}
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| R")
    ]
    assert len(rows) == len(refusals.REFUSALS)

"""docs/architecture.md names what exists, and is short enough to be read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`([\w./]+(?:\.py|\.cpp|\.md|/))`", TEXT)))


def test_it_has_at_most_120_lines():
    assert len(TEXT.splitlines()) <= 120


def test_the_first_screen_of_the_readme_leads_to_it():
    assert "docs/architecture.md" in "\n".join(README.splitlines()[:48])


@pytest.mark.parametrize("place", PLACES)
def test_a_file_or_folder_that_it_names_exists(place):
    ours = ROOT / "pdxfer"
    roots = (ROOT, ROOT / "native", ours, ours / "layout", ours / "protocol")
    assert any((root / place).exists() for root in roots), place


def test_every_package_has_a_room_in_the_table():
    packages = [p.parent for p in (ROOT / "pdxfer").glob("*/__init__.py")]
    assert [p.name for p in packages if f"`{p.name}/`" not in TEXT] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("client/receiving.py", "def _receive"),
        ("agent/decode.py", "def _receive"),
        ("agent/sender.py", ".path.post("),
        ("protocol/prefill/posting.py", "PlannedChunk("),
        ("layout/compiled.py", "def batches"),
        ("layout/compiled.py", "def source_pieces"),
        ("layout/canonical_order.py", "def pieces_in_order"),
        ("agent/receiver.py", "CommitArrived()"),
    ],
)
def test_a_step_of_the_walk_is_where_it_says(file, name):
    assert name in (ROOT / "pdxfer" / file).read_text(encoding="utf-8")

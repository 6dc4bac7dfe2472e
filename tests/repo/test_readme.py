"""What the README tells a reader to type exists, and its example prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_BOOK = (ROOT / "deploy/README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_first_screen_fits():
    first = README.split("## More of the demo")[0]
    assert len(first.splitlines()) <= 45


def test_every_make_target_exists():
    named = set(re.findall(r"make ([a-z-]+)", README + RUN_BOOK))
    assert {"demo", "test"} <= named
    assert named <= TARGETS


def test_every_command_is_told_and_exists():
    told = set(re.findall(r"`pdxfer ([a-z]+)`", README))
    assert told == {entry.name for entry in COMMANDS}
    used = set(re.findall(r"^    pdxfer ([a-z]+)", RUN_BOOK, re.MULTILINE))
    assert used <= told


@pytest.mark.parametrize(
    "flags", sorted({flags.split()[0] for flags in re.findall(r'FLAGS="([^"]+)"', README)})
)
def test_every_flag_of_the_demo_exists(flags, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert flags in capsys.readouterr().out


@pytest.mark.ucx
def test_the_example_prints_what_it_says():
    pytest.importorskip("torch")
    [program], [printed] = blocks("python"), blocks("text")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed

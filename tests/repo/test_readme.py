"""What the README tells a reader to type exists, and its example prints what it says."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer import client, errors
from pdxfer.cli.main import COMMANDS, main
from pdxfer.protocol.state import RETURNED_AT_DECODE, RETURNED_AT_PREFILL

EXAMPLES = ("both ends", "async", "own cache", "engine tensors", "ranks")
CALLS = "## The client in one table"
STATES = "`room` is a number from 1"
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_BOOK = (ROOT / "deploy/README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def rows(heading):
    """Cells of the first table behind a heading, without its two head lines."""
    table = re.search(r"(?:^\|.*\|\n)+", README.split(heading)[1], re.MULTILINE)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def test_every_call_in_the_table_of_the_client_exists():
    calls = re.findall(r"`(\w+)\.(\w+)(?:\(([\w, ]*)\))?`", str([row[0] for row in rows(CALLS)]))
    assert len(calls) > 10
    for kind, name, arguments in calls:
        found = getattr(getattr(client, kind), name)
        for argument in filter(None, arguments.split(", ")):
            assert argument in inspect.signature(found).parameters
    options = [name for row in rows(CALLS)[:1] for name in re.findall(r"`(\w+)`", row[1])]
    for kind in (client.PrefillClient, client.DecodeClient):
        assert set(options) <= set(inspect.signature(kind).parameters)


def test_the_table_of_states_is_that_of_the_code():
    def whose(state):
        at_prefill, at_decode = (
            state in each for each in (RETURNED_AT_PREFILL, RETURNED_AT_DECODE)
        )
        return "yes" if at_decode else "at prefill" if at_prefill else ""

    assert [(row[0], row[2]) for row in rows(STATES)] == [
        (state.name, whose(state)) for state in client.State
    ]


def test_every_error_that_is_told_exists():
    told = re.findall(r"`(\w+Error)`", README)
    assert {kind.__name__ for kind in vars(errors).values() if inspect.isclass(kind)} >= (
        set(told) - {"TimeoutError"}
    )


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


def test_every_example_says_what_it_prints():
    assert re.findall(r"^```(python|text)$", README, re.MULTILINE) == ["python", "text"] * len(
        EXAMPLES
    )


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(program, printed, id=name)
        for name, program, printed in zip(EXAMPLES, blocks("python"), blocks("text"), strict=True)
    ],
)
def test_the_example_prints_what_it_says(program, printed):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed

"""Table and progress."""

import io

from pdxfer.demo.options import Side, WorkerOptions
from pdxfer.demo.show import Progress, Row, table


def row(**changes):
    values = {
        "prompt_tokens": 40,
        "tokens_equal": True,
        "cache_equal": True,
        "length_bytes": 393216,
        "pages": 3,
        "sends": 3,
        "runs": 3,
        "lane": "tcp",
        "seconds": 0.001,
        "commit_s": 0.0005,
    }
    return Row(**{**values, **changes})


def test_the_table_says_equal_or_different():
    head, first, second = table([row(), row(tokens_equal=False)]).splitlines()
    assert head.split()[:5] == ["prompt", "tokens", "cache", "bytes", "pages"]
    assert first.split()[:4] == ["40", "EQUAL", "EQUAL", "393,216"]
    assert first.split()[4:] == ["3", "3", "3", "tcp", "0.39", "0.50", "ms"]
    assert second.split()[1:3] == ["DIFFERENT", "EQUAL"]


def test_the_table_names_the_two_sides_where_there_is_something_to_tell():
    head, first = table([row()], (Side("page-major", 2), Side("unified", 1, 64))).splitlines()
    assert head.split()[-2:] == ["prefill", "decode"]
    assert first.endswith("0.50 ms  page-major TP 2 page 16  unified TP 1 page 64")


def test_progress_off_a_terminal_is_one_line_a_step():
    stream = io.StringIO()
    progress = Progress(2, stream)
    progress.step("one")
    progress.step("two")
    progress.step("more than was planned")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("] one")
    assert "." in lines[0]
    assert lines[1] == "[########################] two"
    assert len(lines) == 3


def test_options_cross_a_channel():
    side = Side("unified", 2, 64)
    options = WorkerOptions("llama", "", 0, "float32", "name", "/s", "tcp", 80, side, True)
    assert WorkerOptions.from_event(options.to_event()) == options

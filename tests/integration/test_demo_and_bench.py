"""The demo and the bench as a person runs them: processes, daemons, exit codes."""

import json
import subprocess
import sys

import pytest

from pdxfer.demo.options import Side
from pdxfer.demo.run import DemoOptions
from pdxfer.demo.run import run as run_demo

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


def pdxfer(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pdxfer.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def rows(output):
    """Prompt tokens to the other columns."""
    lines = [line.split() for line in output.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in {"40", "300", "1000"}}


@pytest.mark.parametrize(
    ("arguments", "lane"),
    [((), "tcp"), (("--embedded", "--lane", "cma", "--dtype", "bfloat16"), "cma")],
)
def test_a_cache_crosses_and_the_tokens_are_equal(arguments, lane):
    pytest.importorskip("transformers")
    done = pdxfer("demo", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(done.stdout)
    assert set(table) == {"40", "300", "1000"}
    for columns in table.values():
        assert columns[:2] == ["EQUAL", "EQUAL"]
        assert columns[6] == lane


def test_other_weights_are_told_by_the_tokens_and_by_the_exit_code():
    pytest.importorskip("transformers")
    done = pdxfer("demo", "--negative", "--lane", "cma")
    assert done.returncode == 1, done.stdout + done.stderr
    table = rows(done.stdout)
    assert set(table) == {"40", "300", "1000"}
    for columns in table.values():
        assert columns[:2] == ["DIFFERENT", "EQUAL"]
        assert columns[6] == "cma"


@pytest.mark.parametrize(
    ("model", "embedded", "prefill", "decode"),
    [
        ("qwen3", False, Side("page-major", 2, 64), Side("page-first-direct", 4, 16)),
        ("deepseek-v3", True, Side("token-major", 2, 16), Side("unified", 1, 64)),
    ],
    ids=["heads to host pools that share each of them", "latent rows"],
)
def test_unlike_sides_hold_the_same_cache(model, embedded, prefill, decode, capfd):
    pytest.importorskip("transformers")
    options = DemoOptions(
        model=model, embedded=embedded, prefill=prefill, decode=decode, prompt_tokens=(20, 75)
    )
    assert run_demo(options) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith(str(decode))]
    assert [line.split()[:3] for line in lines] == [
        [count, "EQUAL", "EQUAL"] for count in ("20", "75")
    ]
    assert all(f"{prefill}  " in line for line in lines)


def test_a_quick_bench_verifies_every_byte(tmp_path):
    file = tmp_path / "bench.json"
    done = pdxfer("bench", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    measured = {(sample["case"], sample["mover"]) for sample in report["samples"]}
    assert len(measured) == 3 * 5
    assert {mover for _, mover in measured} == {"memcpy", "writev", "stream", "tcp", "cma"}
    assert len(report["plan_ns_per_run"]) == 3
    assert all(len(values) == 50 for values in report["latency_us"].values())
    assert report["transports"]["tcp"].startswith("tcp")
    assert "cma" in report["transports"]["cma"]

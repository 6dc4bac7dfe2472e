"""Medians, checks and the table."""

import json

from pdxfer.bench.report import Report, percentile, text
from pdxfer.bench.throughput import Sample


def sample(mover, seconds, source=0.1, target=0.1, case="2 MiB x 8"):
    return Sample(case, mover, 1_000_000_000, seconds, source, target)


def report():
    made = Report(machine={"cores": 2}, transports={"tcp": "tcp/lo", "cma": "cma"})
    made.samples = [sample("writev", 1.0), sample("writev", 3.0), sample("writev", 2.0)]
    made.samples += [sample("stream", 1.0, 0.2, 0.2), sample("tcp", 1.0, 0.4, 0.3)]
    made.samples += [sample("cma", 2.0)]
    made.latency_us = {"tcp put and flush": [100.0] * 4, "tcp client to client": [300.0] * 4}
    return made


def test_medians_not_means():
    rows = {row.mover: row for row in report().rows()}
    assert rows["writev"].rate == 0.5
    assert rows["writev"].best == 1.0
    assert rows["tcp"].cpu == 0.4 + 0.3


def test_checks_are_met_or_missed():
    checks = {check.what.partition(": ")[2]: check for check in report().checks()}
    assert not checks["CPU a GB, tcp over raw stream"].met
    assert checks["GB/s, cma over process_vm_writev"].met
    assert checks["us of client to client beyond put and flush, p50"].value == 200.0


def test_a_lane_left_out_is_not_checked():
    made = report()
    made.samples = [s for s in made.samples if s.mover not in {"tcp", "cma"}]
    made.latency_us = {}
    assert made.checks() == []


def test_percentiles():
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([4.0], 0.99) == 4.0


def test_json_and_table_hold_everything():
    made = report()
    assert json.loads(json.dumps(made.to_json()))["samples"][0]["mover"] == "writev"
    lines = text(made).splitlines()
    assert any(line.startswith("MISSED 2 MiB x 8: CPU") for line in lines)
    assert any("tcp client to client" in line and "300" in line for line in lines)

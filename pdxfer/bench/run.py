"""The whole bench, in one run on one machine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pdxfer.bench import report as reports
from pdxfer.bench.one_page import client_latency_us
from pdxfer.bench.plan_cost import plan_ns_per_run
from pdxfer.bench.report import Report, machine
from pdxfer.bench.throughput import MOVERS, Bench, started


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line chose."""

    lanes: tuple[str, ...] = ("tcp", "cma")
    repeats: int = 7
    rounds: int = 1000
    quick: bool = False
    json_file: str = ""


def run(options: BenchOptions) -> int:
    """Measure, print, write JSON; 0 when every byte was right, whatever the speed."""
    report = measure(options)
    print(reports.text(report))
    if options.json_file:
        Path(options.json_file).write_text(
            json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8"
        )
    return 0


def measure(options: BenchOptions) -> Report:
    """All figures."""
    with started(quick=options.quick) as bench:
        for lane in options.lanes:
            bench.open_lane(lane)
        report = Report(machine(bench.ucx_version), transports=bench.transports)
        _throughput(bench, report, options)
        for lane in options.lanes:
            for what, commit in (("put and flush", False), ("put, flush and commit", True)):
                _note(f"one page over {lane}: {what}")
                report.latency_us[f"{lane} {what}"] = bench.latency_us(
                    lane, options.rounds, commit=commit
                )
        for case in bench.cases:
            report.plan_ns[case.name] = plan_ns_per_run(case, options.repeats)
    for lane in options.lanes:
        _note(f"one page over {lane}: client to client through two daemons")
        report.latency_us[f"{lane} client to client"] = client_latency_us(lane, options.rounds)
    return report


def _throughput(bench: Bench, report: Report, options: BenchOptions) -> None:
    """Movers take turns within a repeat, so that a busy moment of the machine meets them all."""
    for case in bench.cases:
        for repeat in range(options.repeats + 1):
            _note(f"{case.name}: repeat {repeat} of {options.repeats}")
            for mover in (*MOVERS, *options.lanes):
                sample = bench.move(case, mover)
                if repeat:  # the first one warms up
                    report.samples.append(sample)


def _note(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()

"""The bench's figures: medians, a table, JSON with every raw sample."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pdxfer import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.bench.throughput import Sample

TCP_CPU_RATIO_MAX = 1.5
"""CPU seconds a GB of the tcp lane over the raw stream's, both sides, 2 MiB runs."""
CMA_RATE_RATIO_MIN = 0.8
"""GB/s of the cma lane over one process_vm_writev a run, 2 MiB and 32 KiB runs."""
PLAN_NS_MAX = 25.0
"""A run of the plan, where there are thousands."""
COMMIT_OVERHEAD_US_MAX = 250.0
"""Client to client beyond put and flush of the engine, p50, one page of 32 KiB."""


@dataclass
class Report:
    """Everything measured."""

    machine: dict[str, object]
    samples: list[Sample] = field(default_factory=list)
    plan_ns: dict[str, float] = field(default_factory=dict)
    """Time of one plan, by case."""
    latency_us: dict[str, list[float]] = field(default_factory=dict)
    """Times of every round, by `lane what`."""
    transports: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Raw samples, medians and checks as plain values."""
        return {
            "schema": 1,
            "machine": self.machine,
            "transports": self.transports,
            "samples": [asdict(sample) for sample in self.samples],
            "medians": [asdict(row) for row in self.rows()],
            "plan_ns_per_run": self.plan_ns,
            "latency_us": self.latency_us,
            "checks": [asdict(check) for check in self.checks()],
        }

    def rows(self) -> list[Row]:
        """One row per case and mover, in the order they were first run."""
        keys = dict.fromkeys((sample.case, sample.mover) for sample in self.samples)
        return [self._row(case, mover) for case, mover in keys]

    def _row(self, case: str, mover: str) -> Row:
        chosen = [s for s in self.samples if (s.case, s.mover) == (case, mover)]

        def middle(value: Callable[[Sample], float]) -> float:
            return statistics.median(value(sample) for sample in chosen)

        return Row(
            case,
            mover,
            middle(lambda s: s.length_bytes / s.seconds / 1e9),
            max(s.length_bytes / s.seconds / 1e9 for s in chosen),
            middle(lambda s: s.source_cpu_s / s.length_bytes * 1e9),
            middle(lambda s: s.target_cpu_s / s.length_bytes * 1e9),
        )

    def checks(self) -> list[Check]:
        """The figures that pdxfer promises, where this run measured what they need."""
        rows = {(row.case, row.mover): row for row in self.rows()}
        cases = list(dict.fromkeys(row.case for row in rows.values()))
        found: list[Check] = []
        for case in cases[:1]:
            if (case, "tcp") in rows:
                ratio = rows[case, "tcp"].cpu / rows[case, "stream"].cpu
                what = f"{case}: CPU a GB, tcp over raw stream"
                found.append(Check(what, ratio, "at most", TCP_CPU_RATIO_MAX))
        for case in cases[:2]:
            if (case, "cma") in rows:
                ratio = rows[case, "cma"].rate / rows[case, "writev"].rate
                what = f"{case}: GB/s, cma over process_vm_writev"
                found.append(Check(what, ratio, "at least", CMA_RATE_RATIO_MIN))
        found += [
            Check(f"{case}: ns a run of the plan", self.plan_ns[case], "at most", PLAN_NS_MAX)
            for case in cases[1:]
        ]
        for lane in self.transports:
            flush, whole = (
                self.latency_us.get(f"{lane} {what}", [])
                for what in ("put and flush", "client to client")
            )
            if flush and whole:
                extra = statistics.median(whole) - statistics.median(flush)
                what = f"32 KiB over {lane}: us of client to client beyond put and flush, p50"
                found.append(Check(what, extra, "at most", COMMIT_OVERHEAD_US_MAX))
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one case by one mover."""

    case: str
    mover: str
    rate: float
    """GB/s."""
    best: float
    """GB/s of the best repeat."""
    source_cpu: float
    """CPU seconds a GB."""
    target_cpu: float

    @property
    def cpu(self) -> float:
        """CPU seconds a GB of both sides."""
        return self.source_cpu + self.target_cpu


@dataclass(frozen=True, slots=True)
class Check:
    """A figure beside what it should be."""

    what: str
    value: float
    sense: str
    """`at most` or `at least`."""
    limit: float

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


def machine(ucx_version: str) -> dict[str, object]:
    """What the figures were measured on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        if line.startswith("model name")
    ]
    return {
        "pdxfer": __version__,
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ucx": ucx_version,
        "load_1min": os.getloadavg()[0],
    }


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the sorted values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def text(report: Report) -> str:
    """The report for a person."""
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    lines = [about, ""]
    head = f"{'case':<21}{'by':<9}{'GB/s':>6}{'best':>7}{'CPU s/GB':>10}{'source':>8}{'target':>8}"
    lines.append(head)
    last = ""
    for row in report.rows():
        case = row.case if row.case != last else ""
        last = row.case
        lines.append(
            f"{case:<21}{row.mover:<9}{row.rate:>6.2f}{row.best:>7.2f}"
            f"{row.cpu:>10.2f}{row.source_cpu:>8.2f}{row.target_cpu:>8.2f}"
        )
    lines += ["", f"{'one page of 32 KiB':<30}{'p50 us':>8}{'p99 us':>8}"]
    lines += [
        f"{what:<30}{percentile(values, 0.5):>8.0f}{percentile(values, 0.99):>8.0f}"
        for what, values in report.latency_us.items()
    ]
    lines += ["", "checks"]
    lines += [
        f"{'met   ' if check.met else 'MISSED'} {check.what}: {check.value:.2f} "
        f"({check.sense} {check.limit:g})"
        for check in report.checks()
    ]
    return "\n".join(lines)

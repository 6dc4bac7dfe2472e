"""What a request costs to plan, in nanoseconds a run."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdxfer.bench.cases import Case


def plan_ns_per_run(case: Case, repeats: int) -> float:
    """Median over `repeats` requests of the case's pages, compiled plan, ids checked."""
    source, destination = case.page_lists
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        runs = case.plan.runs(source, destination)
        samples.append((time.perf_counter_ns() - start) / len(runs))
    return statistics.median(samples)

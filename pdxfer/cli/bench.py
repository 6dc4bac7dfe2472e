"""`pdxfer bench`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdxfer.bench import crowded
from pdxfer.bench.run import BenchOptions
from pdxfer.bench.run import run as run_bench
from pdxfer.fabric.lanes import library_lanes
from pdxfer.launch.child import ChildFailedError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    default = BenchOptions()
    parser.add_argument(
        "--lane",
        action="append",
        choices=library_lanes("ucx"),
        help="lane to measure; may be repeated; default: every lane",
    )
    parser.add_argument(
        "--crowded",
        type=int,
        nargs="?",
        const=1_000_000,
        metavar="PAGES",
        help="only: small rooms alone, and beside one room of so many scattered pages",
    )
    parser.add_argument(
        "--repeats", type=int, default=default.repeats, help="how often each transfer is repeated"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=default.rounds,
        help="how many latencies are measured of each kind",
    )
    parser.add_argument("--quick", action="store_true", help="a small part of each case, once")
    parser.add_argument("--json", metavar="FILE", default="", help="write every raw sample there")


def run(options: argparse.Namespace) -> int:
    """0 when every byte was right; 2 when the bench could not run or a byte was wrong."""
    chosen = BenchOptions(
        lanes=tuple(options.lane or reversed(library_lanes("ucx"))),
        repeats=1 if options.quick else options.repeats,
        rounds=min(options.rounds, 50) if options.quick else options.rounds,
        quick=options.quick,
        json_file=options.json,
    )
    try:
        if options.crowded is not None:
            for lane in chosen.lanes:
                print(f"{lane}, {options.crowded:,} pages in the huge room")
                print(crowded.table(crowded.measure(lane, options.crowded)))
            return 0
        return run_bench(chosen)
    except (ChildFailedError, RuntimeError) as error:
        sys.stderr.write(f"pdxfer bench: {error}\n")
        return 2

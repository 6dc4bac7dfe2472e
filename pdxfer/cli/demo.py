"""`pdxfer demo`."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from pdxfer.launch.child import ChildFailedError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--lane", choices=["tcp", "cma"], default="tcp", help="how bytes travel")
    parser.add_argument(
        "--embedded", action="store_true", help="agents inside the workers instead of two daemons"
    )
    parser.add_argument(
        "--negative",
        action="store_true",
        help="give the decode side other weights: must say DIFFERENT and exit with 1",
    )
    parser.add_argument(
        "--model",
        choices=["llama", "smollm2"],
        default="llama",
        help="llama: seeded random weights; smollm2: real weights and text",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")


def run(options: argparse.Namespace) -> int:
    """0 EQUAL, 1 DIFFERENT, 2 cannot run here."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"pdxfer demo needs {' and '.join(missing)}: pip install 'pdxfer[demo,ucx]'\n"
        )
        return 2
    if options.model == "smollm2" and options.negative:
        sys.stderr.write("pdxfer demo: --negative needs --model llama, which has other weights\n")
        return 2
    if options.model == "smollm2":
        from pdxfer.demo.smollm2 import check_installed

        check_installed()
    from pdxfer.demo.run import DemoOptions
    from pdxfer.demo.run import run as run_demo

    try:
        return run_demo(
            DemoOptions(
                lane=options.lane,
                embedded=options.embedded,
                negative=options.negative,
                model=options.model,
                dtype=options.dtype,
            )
        )
    except ChildFailedError as error:
        sys.stderr.write(f"pdxfer demo: {error}\n")
        return 2

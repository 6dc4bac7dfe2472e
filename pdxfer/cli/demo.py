"""`pdxfer demo`."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from pdxfer.demo.options import DEVICE_LAYOUTS, HOST_LAYOUTS, KV_HEADS, PAGE_SIZE, Side
from pdxfer.fabric.lanes import offered
from pdxfer.launch.child import ChildFailedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--lane", choices=offered(), default="tcp", help="how bytes travel")
    parser.add_argument(
        "--embedded", action="store_true", help="agents inside the workers instead of two daemons"
    )
    parser.add_argument(
        "--negative",
        action="store_true",
        help="give the decode side other weights: must say DIFFERENT and exit with 1 (`make demo` "
        "then ends with make's own 2)",
    )
    parser.add_argument(
        "--model",
        choices=list(KV_HEADS),
        default="llama",
        help="smollm2: real weights and text; the others: seeded random weights",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for role, layouts in (
        ("prefill", DEVICE_LAYOUTS),
        ("decode", (*DEVICE_LAYOUTS, *HOST_LAYOUTS)),
    ):
        parser.add_argument(
            f"--{role}-layout",
            choices=layouts,
            default="page-major",
            help=f"how the pools of {role} are laid out",
        )
        parser.add_argument(
            f"--{role}-tp",
            type=int,
            default=1,
            metavar="N",
            help=f"ranks of {role}; each has a pool of its own",
        )
    parser.add_argument(
        "--page-size",
        type=_page_sizes,
        default=(PAGE_SIZE, PAGE_SIZE),
        metavar="A:B",
        help="tokens of a page at prefill and at decode",
    )


def _page_sizes(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    try:
        sizes = int(first), int(second)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers of tokens") from None
    return sizes


def run(options: argparse.Namespace) -> int:
    """0 EQUAL, 1 DIFFERENT, 2 cannot run here."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"pdxfer demo needs {' and '.join(missing)}. In a checkout of pdxfer: make demo, or "
            "pip install '.[demo,ucx]'\n"
        )
        return 2
    if options.model == "smollm2" and options.negative:
        sys.stderr.write("pdxfer demo: --negative needs seeded weights: --model llama\n")
        return 2
    prefill_page_size, decode_page_size = options.page_size
    prefill = Side(options.prefill_layout, options.prefill_tp, prefill_page_size)
    decode = Side(options.decode_layout, options.decode_tp, decode_page_size)
    prefill.check("prefill", options.model)
    decode.check("decode", options.model)
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
                prefill=prefill,
                decode=decode,
            )
        )
    except ChildFailedError as error:
        sys.stderr.write(f"pdxfer demo: {error}\n")
        return 2

"""What `layer_done` costs the thread that calls it.

    python -m pdxfer.bench.layer_done [--rooms 60] [--lane tcp] [--busy]

A model tells the end of each layer on the one thread that must not wait. Both daemons run; each
room begins one page of 32 layers, and the caller sleeps before each layer, as a model computes. A
function that does nothing is timed in the same way. With `--busy` another thread of the same
interpreter never stops computing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer import memory
from pdxfer.bench.not_waiting import Spinner
from pdxfer.bench.one_page import Cache
from pdxfer.client import DecodeClient, PrefillClient
from pdxfer.launch.daemons import DaemonPair
from pdxfer.layout import page_major

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LAYERS: Final = 32
_LAYER_S: Final = 0.001
_WAIT_S: Final = 30.0
_PAGE: Final = 1


def _timed_us(call: Callable[[int], object]) -> list[float]:
    """How long the call took for each layer, each after a sleep."""
    took = []
    for layer in range(_LAYERS):
        time.sleep(_LAYER_S)
        start = time.perf_counter_ns()
        call(layer)
        took.append((time.perf_counter_ns() - start) / 1e3)
    return took


def series(lane: str, rooms: int, *, busy: bool) -> dict[str, list[float]]:
    """Microseconds of each call, by what was called; every room commits."""
    layout = page_major(
        layers=range(_LAYERS), kv_heads=8, head_dim=128, page_size=16, pages=4, dtype="bfloat16"
    )
    found: dict[str, list[float]] = {"nothing": [], "layer_done": []}
    with (
        DaemonPair(lane) as daemons,
        memory.allocate(layout.regions[0].length_bytes) as source,
        memory.allocate(layout.regions[0].length_bytes) as destination,
        PrefillClient(daemons.prefill.socket, Cache(layout, [source.range()])) as prefill,
        DecodeClient(daemons.decode.socket, Cache(layout, [destination.range()])) as decode,
        Spinner() if busy else contextlib.nullcontext(),
    ):
        for room in range(1, rooms + 1):
            receiving = decode.receive(room, prefill.addresses, [_PAGE])
            sending = prefill.open(room)
            sending.begin([_PAGE])
            found["nothing"] += _timed_us(lambda layer: None)
            found["layer_done"] += _timed_us(sending.layer_done)
            receiving.wait(_WAIT_S)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", type=int, default=60)
    parser.add_argument("--lane", default="tcp")
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args(arguments)
    found = series(options.lane, options.rooms, busy=options.busy)
    sys.stdout.write(f"{'call':<12}{'calls':>8}{'p50 us':>10}{'p99 us':>10}{'max us':>10}\n")
    for name, took in found.items():
        p50, p99 = (float(np.percentile(took, share)) for share in (50, 99))
        sys.stdout.write(f"{name:<12}{len(took):>8}{p50:>10.1f}{p99:>10.1f}{max(took):>10.1f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What `open`, `receive` and `finished` cost the thread that calls them, beside a busy one.

    python -m pdxfer.bench.not_waiting [--calls 2000] [--lane tcp]

An engine asks for transfers on the one thread that must not wait. Here another thread of the same
interpreter never stops computing, and the caller sleeps 2 ms before each call, as between the steps
of an engine. A function that does nothing is timed in the same way: what the interpreter itself
costs is in both. Both daemons run; each transfer is given up behind its call, outside the time.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer import memory
from pdxfer.bench.cases import one_page
from pdxfer.bench.one_page import Cache
from pdxfer.client import DecodeClient, PrefillClient, Transfer
from pdxfer.launch.daemons import DaemonPair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SLEEP_S: Final = 0.002
_PAGE: Final = 1


class Spinner(threading.Thread):
    """A thread that computes in pure Python until the end of a `with` block."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = False

    def run(self) -> None:
        """Count."""
        count = 0
        while not self._stopped:
            count += 1

    def __enter__(self) -> Spinner:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped = True
        self.join()


def timed_us(call: Callable[[int], Transfer | None], calls: int) -> list[float]:
    """How long each call took, each after a sleep; what it returns is given up, untimed."""
    took: list[float] = []
    for number in range(1, calls + 1):
        time.sleep(_SLEEP_S)
        start = time.perf_counter_ns()
        transfer = call(number)
        took.append((time.perf_counter_ns() - start) / 1e3)
        if transfer is not None:
            transfer.abort("timed")
    return took


def series(lane: str, calls: int) -> dict[str, list[float]]:
    """Microseconds of each call, by what was called."""
    layout = one_page()
    with (
        DaemonPair(lane) as daemons,
        memory.allocate(layout.regions[0].length_bytes) as source,
        memory.allocate(layout.regions[0].length_bytes) as destination,
        PrefillClient(daemons.prefill.socket, Cache(layout, [source.range()])) as prefill,
        DecodeClient(daemons.decode.socket, Cache(layout, [destination.range()])) as decode,
        Spinner(),
    ):
        addresses = prefill.addresses

        def finished(number: int) -> None:
            decode.finished()

        return {
            "nothing": timed_us(lambda number: None, calls),
            "open": timed_us(lambda number: prefill.open(number, wait=False), calls),
            "receive": timed_us(
                lambda number: decode.receive(number, addresses, [_PAGE], wait=False), calls
            ),
            "finished": timed_us(finished, calls),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--lane", default="tcp")
    options = parser.parse_args(arguments)
    found = series(options.lane, options.calls)
    sys.stdout.write(
        f"{'call':<10}{'p50 us':>10}{'p99 us':>10}{'max us':>10}{'p99 above nothing':>20}\n"
    )
    base = float(np.percentile(found["nothing"], 99))
    for name, took in found.items():
        p50, p99 = (float(np.percentile(took, share)) for share in (50, 99))
        sys.stdout.write(
            f"{name:<10}{p50:>10.1f}{p99:>10.1f}{max(took):>10.1f}{p99 - base:>20.1f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

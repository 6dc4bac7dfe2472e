"""The target process: owns the destination, says when all has arrived, compares every byte."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.bench import _pieces
from pdxfer.bench.buffers import Buffers, cpu_s, now_ns
from pdxfer.bench.cases import all_cases
from pdxfer.bench.lane import TargetLane
from pdxfer.launch.channel import Channel, Event, number, text
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.fabric.base import LocalRegion


class Target:
    """Answers the parent's orders, one at a time."""

    def __init__(self, channel: Channel, options: Event) -> None:
        self._channel = channel
        self._buffers = Buffers.from_fds(
            number(options, "source_fd"), number(options, "destination_fd")
        )
        self._cases = {case.name: case for case in all_cases(quick=bool(options["quick"]))}
        self._lanes: dict[str, TargetLane] = {}
        self._regions: dict[tuple[str, str], list[LocalRegion]] = {}
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(limits.CHILD_STEP_TIMEOUT_S)
        channel.send(
            event="ready",
            pid=os.getpid(),
            address=self._buffers.destination.address,
            port=listener.getsockname()[1],
        )
        with listener:
            self._stream, _ = listener.accept()
        self._stream.settimeout(None)

    def serve(self) -> None:
        """Until the parent closes the channel."""
        orders: dict[str, Callable[[Event], None]] = {
            "open": self._open,
            "regions": self._tell_regions,
            "arm": self._arm,
            "commits": self._commits,
            "verify": self._verify,
        }
        while True:
            order = self._channel.receive(None)
            orders[text(order, "do")](order)

    def _open(self, order: Event) -> None:
        lane = self._lanes[text(order, "lane")] = TargetLane(text(order, "lane"))
        self._channel.send(event="opened", address=lane.open().hex())

    def _tell_regions(self, order: Event) -> None:
        """Register a case's regions, or one page, with a lane."""
        lane, name = text(order, "lane"), text(order, "case")
        key = (lane, name)
        if key not in self._regions:
            address = self._buffers.destination.address
            if name:
                case = self._cases[name]
                lengths = [region.length_bytes for region in case.layout.regions]
                bases = case.bases(address).tolist()
            else:
                lengths, bases = [number(order, "page_bytes")], [address]
            self._regions[key] = self._lanes[lane].register(bases, lengths)
        regions = self._regions[key]
        self._channel.send(
            event="regions",
            addresses=[region.address for region in regions],
            lengths=[region.length_bytes for region in regions],
            rkeys=[region.rkey.hex() for region in regions],
        )

    def _arm(self, order: Event) -> None:
        """Blank the pool, wait for the bytes, say what that cost here."""
        case, mover = self._cases[text(order, "case")], text(order, "mover")
        self._buffers.blank_destination()
        cpu = cpu_s()
        self._channel.send(event="armed")
        if mover == "stream":
            there = case.bases(self._buffers.destination.address)
            _pieces.receive_runs(self._stream.fileno(), case.batches.runs, there)
        elif mover in self._lanes:
            self._lanes[mover].wait_commit()
        else:
            self._channel.receive(limits.CHILD_STEP_TIMEOUT_S)  # told when the source is done
        self._channel.send(event="arrived", end_ns=now_ns(), cpu_s=cpu_s() - cpu)

    def _commits(self, order: Event) -> None:
        lane = self._lanes[text(order, "lane")]
        self._channel.send(event="armed")
        arrivals = []
        for _ in range(number(order, "rounds")):
            lane.wait_commit()
            arrivals.append(now_ns())
        self._channel.send(event="arrivals", arrivals=arrivals)

    def _verify(self, order: Event) -> None:
        self._channel.send(
            event="verified", wrong=self._buffers.verify(self._cases[text(order, "case")])
        )


def run(channel: Channel, options: Event) -> None:
    """What the parent starts."""
    Target(channel, options).serve()


if __name__ == "__main__":
    child_main(run)

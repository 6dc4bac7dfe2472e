"""The source process: owns the bytes, moves them by whichever mover it is told."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import numpy as np

from pdxfer.bench import _pieces
from pdxfer.bench.buffers import Buffers, cpu_s, now_ns
from pdxfer.bench.cases import all_cases
from pdxfer.bench.lane import SourceLane
from pdxfer.fabric.base import RemoteRegion
from pdxfer.launch.channel import Channel, Event, number, numbers, text, texts
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.bench.cases import Case
    from pdxfer.fabric.base import LocalRegion


class Source:
    """Answers the parent's orders, one at a time."""

    def __init__(self, channel: Channel, options: Event) -> None:
        self._channel = channel
        self._buffers = Buffers.from_fds(
            number(options, "source_fd"), number(options, "destination_fd")
        )
        self._cases = {case.name: case for case in all_cases(quick=bool(options["quick"]))}
        self._target_pid = number(options, "target_pid")
        self._target_address = number(options, "target_address")
        self._stream = socket.create_connection(("127.0.0.1", number(options, "port")))
        self._lanes: dict[str, SourceLane] = {}
        self._local: dict[tuple[str, str], list[LocalRegion]] = {}
        self._generation = 0

    def serve(self) -> None:
        """Until the parent closes the channel."""
        orders: dict[str, Callable[[Event], None]] = {
            "connect": self._connect,
            "move": self._move,
            "latency": self._latency,
        }
        while True:
            order = self._channel.receive(None)
            orders[text(order, "do")](order)

    def _connect(self, order: Event) -> None:
        lane = SourceLane(text(order, "lane"))
        self._lanes[text(order, "lane")] = lane
        lane.connect(bytes.fromhex(text(order, "address")))
        self._channel.send(
            event="connected", transports=lane.transports, ucx=lane.fabric.runtime.version
        )

    def _move(self, order: Event) -> None:
        case, mover = self._cases[text(order, "case")], text(order, "mover")
        runs = case.batches.runs
        here = case.bases(self._buffers.source.address)
        move: Callable[[], None]
        if mover == "memcpy":
            there = case.bases(self._buffers.destination.address)
            move = lambda: _pieces.copy_runs(runs, here, there)  # noqa: E731
        elif mover == "writev":
            away = case.bases(self._target_address)
            move = lambda: _pieces.vm_write_runs(self._target_pid, runs, here, away)  # noqa: E731
        elif mover == "stream":
            move = lambda: _pieces.send_runs(self._stream.fileno(), runs, here)  # noqa: E731
        else:
            move = self._by_lane(case, mover, order)
        cpu, start_ns = cpu_s(), now_ns()
        move()
        end_ns = now_ns()
        self._channel.send(event="moved", start_ns=start_ns, end_ns=end_ns, cpu_s=cpu_s() - cpu)

    def _by_lane(self, case: Case, name: str, order: Event) -> Callable[[], None]:
        lane = self._lanes[name]
        if (name, case.name) not in self._local:
            bases = case.bases(self._buffers.source.address)
            self._local[name, case.name] = lane.register(bases.tolist(), _lengths(case))
        local, remote = self._local[name, case.name], _remote(order)
        batches = case.batches
        self._generation += 1
        generation = self._generation
        return lambda: lane.put_and_commit(generation, batches.runs, batches.splits, local, remote)

    def _latency(self, order: Event) -> None:
        """One page at a time: until it is flushed, or until its commit is at the target."""
        lane, commit = self._lanes[text(order, "lane")], bool(order["commit"])
        local = lane.register([self._buffers.source.address], [number(order, "page_bytes")])
        runs = np.array([[0, 0, 0, 0, number(order, "page_bytes")]], np.int64)
        splits = np.array([0, 1], np.int64)
        starts, ends = [], []
        put = lane.put_and_commit if commit else lane.put
        for _ in range(number(order, "rounds")):
            self._generation += 1
            starts.append(now_ns())
            put(self._generation, runs, splits, local, _remote(order))
            ends.append(now_ns())
        self._channel.send(event="timed", starts=starts, ends=ends)


def _lengths(case: Case) -> list[int]:
    return [region.length_bytes for region in case.layout.regions]


def _remote(order: Event) -> list[RemoteRegion]:
    return [
        RemoteRegion(address, length, bytes.fromhex(rkey))
        for address, length, rkey in zip(
            numbers(order, "addresses"),
            numbers(order, "lengths"),
            texts(order, "rkeys"),
            strict=True,
        )
    ]


def run(channel: Channel, options: Event) -> None:
    """What the parent starts."""
    Source(channel, options).serve()


if __name__ == "__main__":
    child_main(run)

"""Every case by every mover, in turns, each byte compared; and one-page latency of the lanes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from pdxfer import limits, memory
from pdxfer.bench.buffers import Buffers
from pdxfer.bench.cases import Case, all_cases, one_page
from pdxfer.launch.channel import number, numbers, real, text
from pdxfer.launch.child import Child

MOVERS: Final = ("memcpy", "writev", "stream")
"""Contenders that need no UCX: one memcpy, one process_vm_writev a run; a raw TCP stream."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer."""

    case: str
    mover: str
    length_bytes: int
    seconds: float
    source_cpu_s: float
    target_cpu_s: float


class Bench:
    """The two processes and what they share. Made by `started`."""

    def __init__(self, source: Child, target: Child, cases: list[Case]) -> None:
        self._source = source
        self._target = target
        self.cases = cases
        self.transports: dict[str, str] = {}
        """What each lane really uses, as UCX names it."""
        self.ucx_version = ""

    def open_lane(self, lane: str) -> None:
        """Connect source and target over a lane."""
        self._target.send(do="open", lane=lane)
        address = text(self._target.receive("opened"), "address")
        self._source.send(do="connect", lane=lane, address=address)
        connected = self._source.receive("connected")
        self.transports[lane] = text(connected, "transports")
        self.ucx_version = text(connected, "ucx")

    def move(self, case: Case, mover: str) -> Sample:
        """One transfer, verified.

        Raises:  ChildFailedError when a process fails; RuntimeError when a byte is wrong.
        """
        where = self._regions(mover, case.name) if mover in self.transports else {}
        self._target.send(do="arm", case=case.name, mover=mover)
        self._target.receive("armed")
        self._source.send(do="move", case=case.name, mover=mover, **where)
        moved = self._source.receive("moved")
        passive = mover in {"memcpy", "writev"}
        if passive:
            self._target.send(do="done")
        arrived = self._target.receive("arrived")
        end_ns = number(moved if passive else arrived, "end_ns")
        self._target.send(do="verify", case=case.name)
        wrong = text(self._target.receive("verified"), "wrong")
        if wrong:
            raise RuntimeError(f"{case.name} by {mover}: {wrong}")
        return Sample(
            case.name,
            mover,
            case.length_bytes,
            (end_ns - number(moved, "start_ns")) / 1e9,
            real(moved, "cpu_s"),
            real(arrived, "cpu_s"),
        )

    def latency_us(self, lane: str, rounds: int, *, commit: bool) -> list[float]:
        """One page `rounds` times: post to flushed, or post to the commit at the target."""
        page_bytes = one_page().item_lens[0]
        where = self._regions(lane, "", page_bytes)
        if commit:
            self._target.send(do="commits", lane=lane, rounds=rounds)
            self._target.receive("armed")
        self._source.send(
            do="latency", lane=lane, rounds=rounds, commit=commit, page_bytes=page_bytes, **where
        )
        timed = self._source.receive("timed")
        ends = numbers(timed, "ends")
        if commit:
            ends = numbers(self._target.receive("arrivals"), "arrivals")
        starts = numbers(timed, "starts")
        return [(end - start) / 1e3 for start, end in zip(starts, ends, strict=True)]

    def _regions(self, lane: str, case: str, page_bytes: int = 0) -> dict[str, object]:
        self._target.send(do="regions", lane=lane, case=case, page_bytes=page_bytes)
        told = self._target.receive("regions")
        return {name: told[name] for name in ("addresses", "lengths", "rkeys")}


@contextmanager
def started(*, quick: bool) -> Iterator[Bench]:
    """Allocate both pools, fill the source, start both processes."""
    cases = all_cases(quick=quick)
    size = max(case.memory_bytes for case in cases)
    with ExitStack() as stack:
        print(f"two pools of {size >> 20} MiB", file=sys.stderr)
        source, destination = (stack.enter_context(memory.allocate(size)) for _ in range(2))
        buffers = Buffers(source, destination)
        buffers.fill_source()
        fds = {"source_fd": source.fd, "destination_fd": destination.fd}
        target = stack.enter_context(
            Child("target", "pdxfer.bench.target", pass_fds=[*fds.values()], quick=quick, **fds)
        )
        ready = target.receive("ready", limits.CHILD_START_TIMEOUT_S)
        child = stack.enter_context(
            Child(
                "source",
                "pdxfer.bench.source",
                pass_fds=[*fds.values()],
                quick=quick,
                target_pid=number(ready, "pid"),
                target_address=number(ready, "address"),
                port=number(ready, "port"),
                **fds,
            )
        )
        yield Bench(child, target, cases)

"""The in-memory lane: the second implementer of `fabric.base`, with faults that tests ask for.

All fabrics of a `Hub` share one process; a write is a memory copy. By itself nothing moves: `step`
carries out one run, flush or commit of one path, chosen by the caller's random generator, so that a
seed fixes every interleaving. `Hub(automatic=True)` moves everything at once and wakes the loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pdxfer.errors import ConfigError, LocalProtocolError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    Capabilities,
    CommitArrived,
    CommitSent,
    Destination,
    FabricEvent,
    GenerationClosed,
    LocalRegion,
    PathClosed,
    PathOpened,
    RemoteRegion,
    Scope,
    SenderLost,
    SenderPlaces,
)
from pdxfer.fabric.lanes import LaneSettings

_ADDRESS_BYTES: Final = 8


@dataclass(slots=True)
class _Run:
    generation: int
    source: int
    destination: int
    length_bytes: int


@dataclass(slots=True)
class _BatchEnd:
    generation: int
    ticket: int
    length_bytes: int
    runs: int


@dataclass(slots=True)
class _Commit:
    generation: int
    ticket: int
    payload: bytes


@dataclass(slots=True)
class _CancelEnd:
    generation: int


_Work = _Run | _BatchEnd | _Commit | _CancelEnd


@dataclass
class Hub:
    """Where the fabrics of one process meet."""

    automatic: bool = False
    fabrics: dict[bytes, InprocFabric] = field(default_factory=dict)
    """The fabrics by their addresses."""
    frozen: set[bytes] = field(default_factory=set)
    """Addresses of sending fabrics whose work does not move (a stopped process)."""
    late: list[_LateBytes] = field(default_factory=list)
    """What the network still holds of broken paths."""
    bytes_moved: int = 0

    def ready(self) -> list[InprocPath | _LateBytes]:
        """Whatever has work that can move."""
        paths = [
            path
            for fabric in self.fabrics.values()
            if fabric.address not in self.frozen
            for path in fabric.paths.values()
            if path.work
        ]
        return [*paths, *self.late]

    def step(self, rng: random.Random) -> bool:
        """Carry out one piece of work of a randomly chosen path; False when there is none."""
        ready = self.ready()
        if not ready:
            return False
        rng.choice(ready).step()
        return True

    def kill(self, fabric: InprocFabric) -> None:
        """The process of a fabric dies: its work is gone, every peer hears of it."""
        for peer, path in list(fabric.paths.items()):
            path.work.clear()
            path.receiver.lost(fabric.incarnation, "the sender died", path.life)
            fabric.paths.pop(peer, None)
        for other in self.fabrics.values():
            for path in list(other.paths.values()):
                if path.receiver is fabric:
                    path.fail("the receiver died")
        self.fabrics.pop(fabric.address, None)


class _LateBytes:
    """Writes that had left a sender when its path broke: they land, then the receiver hears of it.

    As on TCP: what is in socket buffers arrives behind the sender's back.
    """

    def __init__(self, path: InprocPath, runs: list[_Run]) -> None:
        self._hub = path.fabric.hub
        self._receiver = path.receiver
        self._sender = path.fabric.incarnation
        self._life = path.life
        self._runs = deque(runs)

    def goes_to(self, receiver: InprocFabric, sender: bytes) -> bool:
        """Whether these are writes of a sender into a receiver."""
        return (self._receiver, self._sender) == (receiver, sender)

    def step(self) -> None:
        """Land one run; behind the last one tell the receiver."""
        if self._runs:
            run = self._runs.popleft()
            self._receiver.place(self._sender, run.generation, run)
            return
        self._hub.late.remove(self)
        self._receiver.lost(self._sender, "the path broke", self._life)


class InprocPath(SenderPlaces):
    """Work of one sender towards one receiver, in order."""

    def __init__(self, fabric: InprocFabric, receiver: InprocFabric, peer: bytes) -> None:
        self.peer = peer
        self.fabric = fabric
        self.receiver = receiver
        self.life = receiver._receivers.get(fabric.incarnation, 0)
        """Life of the receive side that the path was opened to."""
        self.work: deque[_Work] = deque()
        self.closed = False
        self._failed: dict[int, str] = {}
        """Generation to the first error of its batches."""

    def post_runs(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> list[int]:
        """See `fabric.base.SenderPlaces`."""
        self._check_open()
        for run in runs.tolist():
            _check_run(run, source, destination)
        tickets: list[int] = []
        for begin, end in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True):
            total = 0
            for region, offset, to_region, to_offset, length in runs[begin:end].tolist():
                address = source[region].address + offset
                to_address = destination[to_region].address + to_offset
                self.work.append(_Run(generation, address, to_address, length))
                total += length
            ticket = self.fabric.next_ticket()
            tickets.append(ticket)
            self.work.append(_BatchEnd(generation, ticket, total, end - begin))
        self.fabric.move_at_once(self)
        return tickets

    def commit(self, generation: int, payload: bytes) -> int:
        """See `fabric.base.Path`."""
        self._check_open()
        ticket = self.fabric.next_ticket()
        self.work.append(_Commit(generation, ticket, payload))
        self.fabric.move_at_once(self)
        return ticket

    def cancel(self, generation: int) -> None:
        """See `fabric.base.Path`."""
        self._check_open()
        kept: deque[_Work] = deque()
        for item in self.work:
            if item.generation != generation:
                kept.append(item)
            elif isinstance(item, _BatchEnd):
                self.fabric.tell(
                    BatchEnded(self.peer, generation, item.ticket, 0, item.runs, "cancelled")
                )
            elif isinstance(item, _Commit):
                self.fabric.tell(CommitSent(self.peer, generation, item.ticket, "cancelled"))
        kept.append(_CancelEnd(generation))
        self.work = kept
        self.fabric.move_at_once(self)

    def close(self) -> None:
        """See `fabric.base.Path`."""
        self.fail("")

    def fail(self, reason: str, *, late_runs: int = 0) -> None:
        """End every ticket, tell both ends. Idempotent.

        With `late_runs` that many of the runs not carried out land later, and the end of the path
        is not `drained`.
        """
        if self.closed:
            return
        left = [item for item in self.work if isinstance(item, _Run)][:late_runs]
        self.closed = True
        work, self.work = self.work, deque()
        why = reason or "the path was closed"
        for item in work:
            if isinstance(item, _BatchEnd):
                self.fabric.tell(
                    BatchEnded(self.peer, item.generation, item.ticket, 0, item.runs, why)
                )
            elif isinstance(item, _Commit):
                self.fabric.tell(CommitSent(self.peer, item.generation, item.ticket, why))
            elif isinstance(item, _CancelEnd) and not left:
                self.fabric.tell(Cancelled(self.peer, item.generation))
        self.fabric.paths.pop(self.peer, None)
        self.fabric.tell(PathClosed(self.peer, reason, drained=not left))
        if left:
            self.fabric.hub.late.append(_LateBytes(self, left))
        else:
            self.receiver.lost(self.fabric.incarnation, why, self.life)

    def step(self) -> None:
        """Carry out the next piece of work."""
        item = self.work.popleft()
        match item:
            case _Run():
                self.receiver.place(self.fabric.incarnation, item.generation, item)
                self.fabric.hub.bytes_moved += item.length_bytes
            case _BatchEnd():
                self.fabric.tell(
                    BatchEnded(
                        self.peer, item.generation, item.ticket, item.length_bytes, item.runs
                    )
                )
            case _Commit():
                self.receiver.tell(CommitArrived(self.fabric.incarnation, item.payload))
                self.fabric.tell(CommitSent(self.peer, item.generation, item.ticket))
            case _CancelEnd():
                self.fabric.tell(Cancelled(self.peer, item.generation))

    def _check_open(self) -> None:
        if self.closed:
            raise LocalProtocolError(f"the path to {self.peer.hex()[:12]} is closed")


class InprocFabric:
    """One agent's end of the hub. `incarnation` is the agent's incarnation."""

    lane = "inproc"
    version = ""

    def __init__(self, hub: Hub, incarnation: bytes, *, scope: Scope = Scope.SENDER) -> None:
        self.hub = hub
        self.incarnation = incarnation
        self.address = os.urandom(_ADDRESS_BYTES)
        self.capabilities = Capabilities(
            places_at_receiver=scope is Scope.GENERATION,
            revoke_scope=scope,
            needs_pidfd=scope is Scope.NOTHING,
        )
        self._placing: set[tuple[bytes, int]] = set()
        """(sender, generation) whose bytes are placed, where that is the receiver's to say."""
        self.paths: dict[bytes, InprocPath] = {}
        self._events: list[FabricEvent] = []
        self._regions: dict[int, LocalRegion] = {}
        self._owners: dict[int, object] = {}
        self._receivers: dict[bytes, int] = {}
        """Sender to the life of the receive side made for it; each has another."""
        self._lives = 0
        self._watched: set[bytes] = set()
        self._tickets = 0
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        hub.fabrics[self.address] = self

    def fileno(self) -> int:
        """See `fabric.base.Fabric`."""
        return self._eventfd

    def take_events(self) -> list[FabricEvent]:
        """See `fabric.base.Fabric`."""
        with contextlib.suppress(BlockingIOError, OSError):  # nothing there, or closed
            os.eventfd_read(self._eventfd)
        events, self._events = self._events, []
        return events

    def register(self, address: int, length_bytes: int, owner: object) -> LocalRegion:
        """See `fabric.base.Fabric`."""
        region = LocalRegion(len(self._owners) + 1, address, length_bytes, b"inproc")
        self._owners[region.region_id] = owner
        self._regions[region.region_id] = region
        return region

    def deregister(self, region: LocalRegion) -> None:
        """See `fabric.base.Fabric`."""
        self._regions.pop(region.region_id, None)
        self._owners[region.region_id] = None

    def send_address(self) -> bytes:
        """See `fabric.base.Fabric`."""
        return self.address

    def connect(self, peer: bytes, address: bytes, timeout_s: float) -> InprocPath:
        """See `fabric.base.Fabric`."""
        receiver = self.hub.fabrics.get(address[:_ADDRESS_BYTES])
        life = int.from_bytes(address[_ADDRESS_BYTES:], "little")
        path = InprocPath(self, receiver or self, peer)
        if receiver is None or receiver._receivers.get(self.incarnation) != life:
            path.closed = True
            self.tell(PathOpened(peer, "", f"no receiver answered within {timeout_s} s"))
            return path
        self.paths[peer] = path
        self.tell(PathOpened(peer, "inproc"))
        return path

    def open_receiver(self, peer: bytes) -> bytes:
        """See `fabric.base.Fabric`."""
        if peer not in self._receivers:
            self._lives += 1
            self._receivers[peer] = self._lives
        return self.address + self._receivers[peer].to_bytes(8, "little")

    def watch_sender(self, peer: bytes, address: bytes) -> None:
        """See `fabric.base.Fabric`."""
        if address not in self.hub.fabrics:
            raise ConfigError(f"no sender at {address.hex()}")
        self._watched.add(peer)

    def close_receiver(self, peer: bytes) -> None:
        """See `fabric.base.Fabric`."""
        self._receivers.pop(peer, None)
        self._events = [e for e in self._events if not (_of_receiver(e) and e.peer == peer)]
        sender = next((f for f in self.hub.fabrics.values() if f.incarnation == peer), None)
        for path in list(sender.paths.values()) if sender is not None else []:
            if path.receiver is self:
                path.fail("the receiver was closed")
        if self.capabilities.revoke_scope is not Scope.NOTHING:
            # What was on its way has nowhere to land.
            self.hub.late = [late for late in self.hub.late if not late.goes_to(self, peer)]

    def open_generation(self, peer: bytes, generation: int, destination: Destination) -> None:
        """See `fabric.base.Fabric`."""
        self._placing.add((peer, generation))

    def close_generation(self, peer: bytes, generation: int) -> None:
        """See `fabric.base.Fabric`."""
        if not self.capabilities.places_at_receiver:
            return
        self._placing.discard((peer, generation))
        self.tell(GenerationClosed(peer, generation))

    def close(self, deadline_s: float) -> None:
        """See `fabric.base.Fabric`."""
        for path in list(self.paths.values()):
            path.fail("the fabric was closed")
        self.hub.fabrics.pop(self.address, None)
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    # -- used by paths and the hub -----------------------------------------------------------
    def place(self, sender: bytes, generation: int, run: _Run) -> None:
        """One run arrives; a receiver that places drops what is of no open generation."""
        if self.capabilities.places_at_receiver and (sender, generation) not in self._placing:
            return
        ctypes.memmove(run.destination, run.source, run.length_bytes)

    def tell(self, event: FabricEvent) -> None:
        """Queue an event for `take_events`."""
        if self._eventfd < 0:
            return
        if not self._events:
            os.eventfd_write(self._eventfd, 1)
        self._events.append(event)

    def lost(self, sender: bytes, reason: str, life: int) -> None:
        """The connection from a sender to one receive side broke, which ends with it."""
        if self._receivers.get(sender) != life:
            return  # closed before: no event follows
        if sender in self._watched:
            del self._receivers[sender]
            self._watched.discard(sender)
            self.tell(SenderLost(sender, reason))

    def next_ticket(self) -> int:
        """A ticket never used before."""
        self._tickets += 1
        return self._tickets

    def move_at_once(self, path: InprocPath) -> None:
        """Automatic hubs move everything at once."""
        while self.hub.automatic and path.work:
            path.step()


def _of_receiver(event: FabricEvent) -> TypeGuard[CommitArrived | SenderLost]:
    return isinstance(event, CommitArrived | SenderLost)


def _check_run(
    run: list[int], source: Sequence[LocalRegion], destination: Sequence[RemoteRegion]
) -> None:
    for side, index, offset, regions in (
        ("source", run[0], run[1], source),
        ("destination", run[2], run[3], destination),
    ):
        inside = 0 <= index < len(regions)
        if not inside or offset < 0 or run[4] <= 0 or offset + run[4] > regions[index].length_bytes:
            raise LocalProtocolError(
                f"a run of {run[4]} bytes at offset {offset} leaves {side} region {index}"
            )


def make(lane: str, settings: LaneSettings) -> InprocFabric:
    """Refuse: fabrics of a hub are made by whoever has the hub.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"lane {lane} joins the agents of one process, for tests; offer another lane",
        fields={"lane": lane},
    )

"""What a lane is to an agent: the one interface behind which bytes travel.

Implemented by `fabric.ucx` (UCX lanes) and `fabric.inproc` (memory, with faults). An agent owns
one `Fabric` per lane; all methods are called on the agent's loop thread and tell their end through
events that `drain` returns. Only the agent's state tables decide what an event means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a lane can promise."""

    places_at_receiver: bool
    """The receiver places each byte itself, so closing a generation is a proof."""
    handler_proves_silence: bool
    """Decode's own endpoint failing proves that nothing more lands from that sender (UCX tcp)."""
    needs_pidfd: bool
    """Only the writer's death proves silence besides `drained` (cma, mapped)."""


# -- events ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PathOpened:
    """A path asked for with `connect` is usable, or failed (`error` not empty)."""

    peer: bytes
    transports: str
    """What the lane really uses, as the library names it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """A batch of writes ended: every put completed and flushed, or the first error of any."""

    peer: bytes
    generation: int
    ticket: int
    length_bytes: int
    """Bytes placed at the peer; less than asked for only with an error."""
    runs: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CommitSent:
    """A commit left behind all batches of its generation, or failed."""

    peer: bytes
    generation: int
    ticket: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nothing of this generation is unposted or in flight on this path any more."""

    peer: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class PathClosed:
    """A sending path to `peer` that was open is closed; the last event of that path.

    This side writes nothing more on it and its source memory is free.
    """

    peer: bytes
    error: str
    drained: bool = True
    """False: writes were in flight when it ended, and bytes that the network had taken by then may
    still land at the peer. Then only the peer's own fence proves silence, not this event."""


@dataclass(frozen=True, slots=True)
class CommitArrived:
    """Decode: a commit payload came on the lane from `peer`, behind its bytes."""

    peer: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class SenderLost:
    """Decode: the path of `peer` has ended, or broken; its receive side is gone."""

    peer: bytes
    error: str


FabricEvent = PathOpened | Posted | CommitSent | Cancelled | PathClosed | CommitArrived | SenderLost


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A range registered with this fabric; valid until `deregister`."""

    region_id: int
    address: int
    length_bytes: int
    rkey: bytes


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A range of a peer that this agent may write."""

    address: int
    length_bytes: int
    rkey: bytes


class Path(Protocol):
    """Where one prefill incarnation writes to one decode incarnation, over one lane."""

    peer: bytes

    def post(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> list[int]:
        """Queue writes; one ticket per batch, one `Posted` per ticket, whatever happens.

        Shapes:  runs int64 [n, 5] = source region, source offset, destination region, destination
                 offset, length (bytes); splits int64 [batches + 1], batch b is rows
                 `splits[b]:splits[b + 1]`.
        Raises:  LocalProtocolError when a run leaves its region on either side (no put is posted),
                 or the path is closed.
        """
        ...

    def commit(self, generation: int, payload: bytes) -> int:
        """Send `payload` behind every batch of `generation`; one `CommitSent`.

        When a batch of the generation failed, nothing is sent and the event carries that error.
        """
        ...

    def cancel(self, generation: int) -> None:
        """Drop what is not posted (those tickets end with an error), wait for the rest.

        One `Cancelled` follows, behind every `Posted` of the generation.
        """
        ...

    def close(self) -> None:
        """Force the path closed; every outstanding ticket ends, then `PathClosed`. Idempotent."""
        ...


class Fabric(Protocol):
    """One lane of one agent."""

    lane: str
    capabilities: Capabilities
    version: str
    """Of the library behind the lane; peers agree in major.minor. Empty: there is none."""

    def fileno(self) -> int:
        """A descriptor that is readable when `drain` has something."""
        ...

    def drain(self) -> list[FabricEvent]:
        """Everything that happened since the last call, in order per path."""
        ...

    def register(self, address: int, length_bytes: int, owner: object) -> LocalRegion:
        """Register a range; `owner` is kept alive until `deregister` or `close`."""
        ...

    def deregister(self, region: LocalRegion) -> None:
        """Forget a range. The caller has proof that no write can reach it."""
        ...

    # prefill
    def send_address(self) -> bytes:
        """What this sender calls itself; decode is told it and takes no other's path."""
        ...

    def connect(self, peer: bytes, address: bytes, timeout_s: float) -> Path:
        """Open a path to a receiver; usable after its `PathOpened`."""
        ...

    # decode
    def open_receiver(self, peer: bytes) -> bytes:
        """Make the receive side for one sender incarnation; returns its address."""
        ...

    def watch_sender(self, peer: bytes, address: bytes) -> None:
        """Open decode's own endpoint to the sender, whose error is `SenderLost`."""
        ...

    def close_receiver(self, peer: bytes) -> None:
        """Destroy the receive side of one sender. Idempotent."""
        ...

    def close(self, deadline_s: float) -> None:
        """Drain, then force; releases every resource. Idempotent, bounded by `deadline_s`."""
        ...

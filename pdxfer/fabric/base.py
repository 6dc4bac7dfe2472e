"""What a lane is to an agent: the one interface behind which bytes travel.

An agent owns one `Fabric` per lane; all methods are called on the agent's loop thread and tell
their end through events that `take_events` returns. Only the agent's state tables decide what an
event means. Which lanes there are says `fabric.lanes`.

Two kinds of lane stand behind it. Where the *sender* places the bytes (UCX), a post is planned into
runs and written into the receiver's memory. Where the *receiver* places them, the sender gathers
intervals of the chunk's canonical order, says which chunk they are of on the lane itself, and the
receiver scatters them by its own plan; so it can close one generation for good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdxfer.layout import Pages, Plan, PlannedChunk


class Scope(Enum):
    """What the receiver can end by itself, so that nothing of it lands any more."""

    NOTHING = "nothing"
    """Only the writer's own word (`drained`) or its death proves silence: cma."""
    SENDER = "sender"
    """All writes of one sender, by the end of its receive side: UCX tcp."""
    GENERATION = "generation"
    """The writes of one generation, by `close_generation`: lanes whose receiver places."""


class Listener(Enum):
    """Which end of a lane waits to be connected to. The other end connects."""

    RECEIVER = "receiver"
    """Prefill connects to the address in `Attach` once it has it."""
    SENDER = "sender"
    """Decode connects to the address in `Accept` once it has it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a lane can promise."""

    places_at_receiver: bool
    """The receiver places each byte itself, by its own plan."""
    revoke_scope: Scope
    """What the receiver can end; that end is the proof `revoked`."""
    needs_pidfd: bool
    """Where the sender has not said `drained`, only the end of its process proves that it writes
    nothing more."""
    listener: Listener = Listener.RECEIVER


# -- events ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PathOpened:
    """A path asked for with `connect` is usable, or failed (`error` not empty)."""

    peer: bytes
    transports: str
    """What the lane really uses, as the library names it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class BatchEnded:
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
    """Decode: the path from `peer` has ended or broken, and its receive side is gone."""

    peer: bytes
    error: str


@dataclass(frozen=True, slots=True)
class GenerationClosed:
    """Decode: from now on no byte of this generation from `peer` is placed.

    Follows `close_generation` on lanes whose scope is `Scope.GENERATION`, once.
    """

    peer: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class PlacingFailed:
    """Decode: what `peer` sent of a generation is not what was planned; nothing of it was placed.

    The lane places nothing more of that generation.
    """

    peer: bytes
    generation: int
    error: str


SenderEvent = PathOpened | BatchEnded | CommitSent | Cancelled | PathClosed
ReceiverEvent = CommitArrived | SenderLost | GenerationClosed | PlacingFailed
FabricEvent = SenderEvent | ReceiverEvent


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


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """What one `post` moves: an interval of one chunk of one source worker."""

    generation: int
    source_worker: int
    number: int
    """Number of the chunk, counted from 0 for each generation and source worker."""
    chunk: PlannedChunk
    source: Sequence[LocalRegion]
    """The source worker's memory, in the order of its layout's regions."""
    destination: Sequence[RemoteRegion]
    """The destination worker's memory, in the order of its layout's regions. A lane whose receiver
    places the bytes does not look at it."""


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where the bytes of one source worker go, for lanes whose receiver places them."""

    source_worker: int
    plan: Plan
    pages: Mapping[str, Pages]
    regions: Sequence[LocalRegion]
    """The destination worker's memory, in the order of its layout's regions."""


@dataclass(frozen=True, slots=True)
class Tickets:
    """What a post has queued: one `BatchEnded` follows for each ticket, whatever happens."""

    numbers: Sequence[int]
    length_bytes: int
    """Bytes that all tickets together move."""
    runs: int
    """Contiguous pieces that all tickets together take."""


class Path(Protocol):
    """Where one prefill incarnation writes to one decode incarnation, over one lane."""

    peer: bytes

    def post(self, write: Write) -> Tickets:
        """Queue an interval of a chunk, of more than zero bytes.

        Source memory stays as it is until the last `BatchEnded`.

        Raises:  LocalProtocolError when a run leaves its region on either side, or the path is
                 closed; ConfigError, ResourceError where the chunk cannot be planned. Nothing of
                 this post is sent then, and no `BatchEnded` follows.
        """
        ...

    def commit(self, generation: int, payload: bytes) -> int:
        """Send `payload` behind every batch of `generation`; one `CommitSent`.

        When a batch of the generation failed, nothing is sent and the event carries that error.
        """
        ...

    def cancel(self, generation: int) -> None:
        """Drop what is not posted (those tickets end with an error), wait for the rest.

        One `Cancelled` follows, behind every `BatchEnded` of the generation.
        """
        ...

    def close(self) -> None:
        """Force the path closed; every outstanding ticket ends, then `PathClosed`. Idempotent."""
        ...


class SenderPlaces(ABC):
    """The half of a path that plans runs, for lanes whose sender writes into the receiver."""

    def post(self, write: Write) -> Tickets:
        """Plan the chunk and queue its runs; see `Path.post`."""
        batches = write.chunk.batches()
        numbers = self.post_runs(
            write.generation, batches.runs, batches.splits, write.source, write.destination
        )
        return Tickets(numbers, batches.length_bytes, len(batches.runs))

    @abstractmethod
    def post_runs(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> list[int]:
        """Queue writes; one ticket per batch, one `BatchEnded` per ticket, whatever happens.

        Shapes:  runs int64 [n, 5] = source region, source offset, destination region, destination
                 offset, length (bytes); splits int64 [batches + 1], batch b is rows
                 `splits[b]:splits[b + 1]`.
        Raises:  LocalProtocolError when a run leaves its region on either side (no put is posted),
                 or the path is closed.
        """


class SenderPlacesFabric:
    """The half of a fabric that a lane whose sender places has nothing to do for."""

    def open_generation(self, peer: bytes, generation: int, destination: Destination) -> None:
        """Nothing to do: the sender knows where bytes go."""

    def close_generation(self, peer: bytes, generation: int) -> None:
        """Nothing to do: no event follows, and the proof comes from elsewhere."""


class Fabric(Protocol):
    """One lane of one agent."""

    lane: str
    capabilities: Capabilities
    version: str
    """Version of the library behind the lane, whose major.minor has to be the same at both ends;
    empty where there is no library."""

    def fileno(self) -> int:
        """A descriptor that is readable when `take_events` has something."""
        ...

    def take_events(self) -> list[FabricEvent]:
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
        """The address that this sender calls itself by.

        Decode is told it, and takes a path from no other.
        """
        ...

    def connect(self, peer: bytes, address: bytes, timeout_s: float) -> Path:
        """Open a path to a receiver; usable after its `PathOpened`."""
        ...

    # decode
    def open_receiver(self, peer: bytes) -> bytes:
        """Make the receive side for one sender incarnation; returns its address."""
        ...

    def watch_sender(self, peer: bytes, address: bytes) -> None:
        """Open decode's own endpoint to the sender, whose error is `SenderLost`.

        Where the sender listens, this is what connects the path.
        """
        ...

    def open_generation(self, peer: bytes, generation: int, destination: Destination) -> None:
        """Let bytes of one generation from one source worker of `peer` be placed.

        Called before the peer is told the pages, once for each source worker that owes something.
        Lanes whose sender places do nothing here.
        """
        ...

    def close_generation(self, peer: bytes, generation: int) -> None:
        """Place nothing of this generation any more; `GenerationClosed` follows where it is proof.

        Lanes whose sender places do nothing here, and no event follows.
        """
        ...

    def close_receiver(self, peer: bytes) -> None:
        """Destroy the receive side of one sender. Idempotent."""
        ...

    def close(self, deadline_s: float) -> None:
        """Drain, then force; releases every resource. Idempotent, bounded by `deadline_s`."""
        ...

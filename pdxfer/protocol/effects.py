"""What the machines ask their agent to do. Plain records: an agent, or a test, carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdxfer.errors import PdxferError
from pdxfer.protocol.state import State
from pdxfer.wire.messages import CommitPayload, Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a control message to a peer life."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a peer life all our workers: `Attach` from decode, `Accept` from prefill."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Post:
    """Write runs of one worker's memory into a peer worker's memory."""

    peer: bytes
    generation: int
    source_worker: int
    destination_worker: int
    runs: NDArray[np.int64]
    splits: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PostCommit:
    """Send the commit of one source worker behind its bytes."""

    peer: bytes
    generation: int
    payload: CommitPayload


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop what is not posted of a generation, wait for the rest, report `Cancelled`."""

    peer: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class OpenPath:
    """Connect the lane to a decode life; answered by `PathOpened`."""

    peer: bytes
    lane: str
    address: bytes


@dataclass(frozen=True, slots=True)
class ClosePath:
    """Close the sending path to a peer life; answered by `PathClosed`."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class WatchSender:
    """Open decode's own endpoint to a prefill life, whose error is `SenderLost`."""

    peer: bytes
    lane: str
    address: bytes


@dataclass(frozen=True, slots=True)
class Show:
    """Tell the worker: the outcome first, then the board's word."""

    worker: int
    slot: int
    state: State
    error: PdxferError | None = None
    prefix_tokens: int | None = None
    fence: str = ""
    """The proof at FAILED; `quarantined` at QUARANTINED."""
    length_bytes: int = 0
    runs: int = 0
    aux: bytes = b""
    lane: str = ""
    generation: int = 0
    peers: tuple[bytes, ...] = ()
    """Lives of the other side that this transfer is bound to."""
    detail: dict[str, object] = field(default_factory=dict)
    """For the log line: room, generation, peers."""


@dataclass(frozen=True, slots=True)
class Free:
    """No write can reach the memory of this departed worker any more: unmap and deregister it."""

    worker: int


Effect = (
    Tell | Announce | Post | PostCommit | Cancel | OpenPath | ClosePath | WatchSender | Show | Free
)

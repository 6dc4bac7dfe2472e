"""What the machines ask their agent to do. Plain records: an agent, or a test, carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdxfer.errors import PdxferError
from pdxfer.layout import Pages, Plan, PlannedChunk
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


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """Move one chunk of one worker's memory into a peer worker's memory.

    Answered by `on_batch` for each part that ends, the last one with `ended`, or by
    `on_post_failed`.
    """

    peer: bytes
    generation: int
    source_worker: int
    destination_worker: int
    number: int
    """Number of the chunk, counted from 0 for each leg."""
    chunk: PlannedChunk


@dataclass(frozen=True, slots=True)
class PostCommit:
    """Send the commit of one source worker behind its bytes. Who posted states the runs in it."""

    peer: bytes
    generation: int
    payload: CommitPayload


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop what is not posted of a generation, wait for the rest, report `Cancelled`."""

    peer: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class ForgetLeg:
    """The send of this leg is final: nothing of it will be posted, committed or cancelled."""

    peer: bytes
    generation: int
    source_worker: int


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


@dataclass(frozen=True, slots=True, eq=False)
class OpenGeneration:
    """Let the bytes of one source worker be placed, on lanes whose receiver places them."""

    peer: bytes
    generation: int
    source_worker: int
    destination_worker: int
    plan: Plan
    pages: Mapping[str, Pages]


@dataclass(frozen=True, slots=True)
class CloseGeneration:
    """Let nothing of a generation from a peer life be placed any more.

    Answered by `on_generation_closed` on lanes where that is a proof.
    """

    peer: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Show:
    """Tell the worker: the outcome first, then the board's word."""

    worker: int
    slot: int
    state: State
    error: PdxferError | None = None
    prefix_tokens: int | None = None
    fence: str = ""
    """At FAILED the proof by which the pages came back; at QUARANTINED the word `quarantined`."""
    length_bytes: int = 0
    runs: int = 0
    aux: bytes = b""
    lane: str = ""
    generation: int = 0
    peers: tuple[bytes, ...] = ()
    """Lives of the other side that this transfer is bound to."""
    detail: dict[str, object] = field(default_factory=dict)
    """What the log line says beside the state: room, generation, peers."""


@dataclass(frozen=True, slots=True)
class ShowReturned:
    """Tell the worker of source pages that are its own again before the send has ended."""

    worker: int
    slot: int
    tokens: int
    """The pages of tokens below this one are back, in all layers and groups."""
    chunks: int
    """The chunks below this number are back."""
    wake: bool = True
    """Whether to wake those who wait for the pages. Where it is False a `Show` follows, which wakes
    them."""


@dataclass(frozen=True, slots=True)
class Free:
    """No write can reach the memory of this departed worker any more: unmap and deregister it."""

    worker: int


Effect = (
    Tell
    | Announce
    | Post
    | PostCommit
    | Cancel
    | ForgetLeg
    | OpenPath
    | ClosePath
    | WatchSender
    | OpenGeneration
    | CloseGeneration
    | Show
    | ShowReturned
    | Free
)

_WORDS = (Tell, Announce, Show, ShowReturned, Free)


def lane_work_first(effects: list[Effect]) -> list[Effect]:
    """The effects in the order in which they are carried out: bytes before anybody is told.

    Lane work keeps its order, and so do words to peers and workers. Telling is what takes time: a
    write that waits behind a control message is late for nothing.
    """
    return sorted(effects, key=lambda effect: isinstance(effect, _WORDS))

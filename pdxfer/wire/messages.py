"""The messages between agents, as typed records.

One record a message; the tag field is `t`. Field names on the wire are the names here. Every field
added after a release has a default. `proto/SPEC.md` describes each one; `proto/schema.yaml` is held
equal to this file by a test.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""0 to 2**64 - 1; anything else is refused while decoding."""
Positive = Annotated[int, msgspec.Meta(ge=1)]
"""1 to 2**64 - 1."""
Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""Random 128-bit id of one life of an agent."""
MaybeIncarnation = Annotated[bytes, msgspec.Meta(max_length=16)]
"""An incarnation, or empty; no other length (checked by the codec)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of every message between agents."""


# -- records inside messages -----------------------------------------------------------------
class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an instance; index `(pp * cp_size + cp) * tp_size + tp`."""

    tp: Natural
    """Attention tensor-parallel rank."""
    tp_size: Positive
    """Attention tensor-parallel ranks."""
    pp: Natural = 0
    """Pipeline stage."""
    pp_size: Positive = 1
    """Pipeline stages."""
    cp: Natural = 0
    """Context-parallel rank."""
    cp_size: Positive = 1
    """Context-parallel ranks."""


class RegionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered range of a worker, as one peer may write it."""

    address: Natural
    """Unsigned 64-bit address in the agent that registered it."""
    length_bytes: Natural
    """Length of the range; no write may leave it."""
    rkeys: dict[str, bytes] = {}
    """Remote key of the range for each lane, by the lane's name."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent tells about one attached worker."""

    worker_id: Natural
    """Number that its agent gave the worker; it names the worker in every other message."""
    instance: str
    """Name of the model instance it belongs to."""
    rank: RankInfo
    """Which rank of its instance the worker is, and how many ranks there are."""
    layout: dict[str, object]
    """The worker's layout, as `KVLayout.to_wire()` writes it."""
    regions: list[RegionInfo]
    """The worker's memory: one range for each region of the layout, in its order."""
    item_lens: list[Natural]
    """Bytes of one page in each region."""
    page_size: Natural
    """Tokens of a page of the first group."""
    attention_tp: Natural
    """Attention tensor-parallel size."""
    unified_memory: bool
    """Whether the layout is a whole envelope."""
    relayout: str
    """`allow` or `never`."""
    model: str = ""
    """`name@revision`; empty: not compared."""
    ignore_parts: list[str] = []
    """Parts that may exist on one side only."""


class PairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one pair of workers, as its digest."""

    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    destination_worker: Natural
    """Number of the decode worker, as its agent gave it."""
    digest: bytes
    """Digest of the planes, the owned cells and the order version; decode compares it with its own.
    Empty while the source instance is not complete."""


class PairReject(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one pair of workers that cannot be joined."""

    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    destination_worker: Natural
    """Number of the decode worker, as its agent gave it."""
    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error, the same on both sides."""
    fields: dict[str, str] = {}
    """What differs: the name of each field, with the values of both sides."""


class GroupPages(msgspec.Struct, frozen=True, kw_only=True):
    """Page ids of one group."""

    first_token: Natural
    """Token that row 0 of the first page stands for."""
    encoding: str
    """`i4` or `i8` (packed little-endian ids), `r4` or `r8` (packed (first, count) runs)."""
    ids: bytes
    """The ids in that encoding, in the order of the tokens; none for a page that is skipped."""
    skipped: bytes = b""
    """Tokens for which there is no page: packed little-endian 64-bit pairs (first, end), in order,
    each of them whole pages."""


class TokenRange(msgspec.Struct, frozen=True, kw_only=True):
    """`[first, end)` in tokens of the request."""

    first: Natural
    """First token."""
    end: Natural
    """One past the last token."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one live generation is."""

    generation: Positive
    """Number of the receive, as the decode life of this session counts them."""
    bytes_done: Natural
    """Bytes written or placed so far."""


# -- session ---------------------------------------------------------------------------------
class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of either side; every version can read it."""

    version: Natural
    """Protocol version that the sender speaks."""
    role: str
    """`prefill` or `decode`."""
    features: list[str] = []
    """Optional abilities; an unknown name is ignored."""
    lanes: list[str] = []
    """Lanes offered, best first."""
    ucx_version: str = ""
    """Version of the UCX that the agent has loaded; empty where it has none."""
    boot_id: str = ""
    """Identifies one boot of one machine and the agent's pid namespace. Two agents with the same
    value seem to be on one host."""
    uid: int = -1
    """User id of the agent; -1 where it does not tell."""
    local_socket: str = ""
    """Path of the Unix socket on which the agent meets neighbours, which are agents of its host;
    empty where it has none."""
    nonce: bytes = b""
    """16 random bytes. A peer that returns them over the local socket has proven that it is on the
    same host."""


class Attach(Message, frozen=True, kw_only=True, tag="attach"):
    """Decode tells all its workers, and where prefill may write. Sent anew when one changes."""

    revision: Natural
    """Rises with each `Attach` of a session."""
    workers: list[WorkerInfo]
    """All workers of the agent."""
    siblings: list[WorkerInfo] = []
    """Source workers of the same instances that other prefill agents hold, without their regions. A
    prefill agent needs every rank of an instance to know which bytes its own workers owe."""
    lane: str
    """Lane that decode has chosen for this prefill agent."""
    lane_address: bytes
    """Address on that lane of the receive side made for this prefill life."""


class Accept(Message, frozen=True, kw_only=True, tag="accept"):
    """Prefill's answer to `Attach`, and sent anew when a prefill worker comes or goes."""

    revision: Natural
    """Revision of the `Attach` that this answers."""
    workers: list[WorkerInfo]
    """All workers of the agent."""
    plans: list[PairPlan]
    """One entry for each pair of workers that fits."""
    rejects: list[PairReject] = []
    """One entry for each pair of workers that does not fit. The verdict stands until one of the two
    attaches anew."""
    lane: str
    """Lane that the `Attach` named."""
    lane_address: bytes
    """What the sender calls itself on the lane; decode watches its path to that address, and so
    learns of the sender's end."""


class LaneFailed(Message, frozen=True, kw_only=True, tag="lane_failed"):
    """Prefill: the lane of this `Attach` could not be opened, or its path has broken and is closed.

    No write over it is or will be in flight. Decode attaches anew, over this lane or the next one.
    """

    revision: Natural
    """Revision of the `Attach` that named the lane."""
    lane: str
    """Lane that has failed."""
    text: str
    """Why the lane has failed."""


class Reject(Message, frozen=True, kw_only=True, tag="reject"):
    """The whole session is refused, or ended for what its peer sent."""

    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error."""
    retryable: bool = False
    """Whether the same request may succeed later without any change."""
    fields: dict[str, str] = {}
    """What differs: the name of each field, with the values of both sides."""


class StaleSession(Message, frozen=True, kw_only=True, tag="stale"):
    """A message named another life of this agent; it was not acted on."""

    incarnation: Incarnation
    """The life that answers."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent each `HEARTBEAT_INTERVAL_S`; renews leases at once, also ahead of numbered messages."""

    after: Natural = 0
    """Highest number that its sender had used. All else that the heartbeat says counts only once
    that number has been received."""
    oldest_live_generation: Natural = 0
    """From decode: the mark. Nothing is asked any more of this prefill life for a smaller
    generation. Prefill sends 0."""
    progress: list[Progress] = []
    """From prefill: the live generations of which bytes were placed since its last heartbeat."""


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The sender closes the session in order."""

    reason: str = ""
    """For the log of the other side."""


# -- transfers -------------------------------------------------------------------------------
class Receive(Message, frozen=True, kw_only=True, tag="receive"):
    """Decode binds a room at one source worker."""

    room: Positive
    """Number of the request, chosen outside of pdxfer and equal on both sides; it only brings send
    and receive together."""
    generation: Positive
    """Number of this receive: new for each receive of the decode life, and never used again."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    destination_worker: Natural
    """Number of the decode worker, as its agent gave it."""
    receiver_index: Natural
    """Rank index of the decode worker."""
    receiver_count: Positive
    """How many decode workers receive this room; the send ends when all of them are served."""
    place: Place | None = None
    """The pages, where the decode worker named them with the receive; None: a `Place` follows."""
    must_exist: bool = False
    """Whether a source worker that has no live send of the room answers `Failed` at once instead of
    waiting for it."""


class Place(Message, frozen=True, kw_only=True, tag="place"):
    """Decode tells where the pages of a generation go."""

    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    tokens: Natural
    """Tokens of the whole request; must equal that of the send."""
    prefix_tokens: Natural = 0
    """How many first tokens decode has already; what moves is `[prefix_tokens, tokens)`."""
    groups: dict[str, GroupPages] = {}
    """Page ids per group; empty where this source worker owes nothing."""


class Matched(Message, frozen=True, kw_only=True, tag="matched"):
    """Prefill: the room's send exists and is bound to this generation."""

    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """Prefill announces a chunk; before its first byte where the receiver places the bytes."""

    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    number: Natural
    """Counts the chunks of a generation and source worker from 0, without gaps."""
    ranges: dict[str, list[TokenRange]]
    """Tokens of each group that move, in order: several ranges where decode skips pages."""
    layers: list[Natural] | None = None
    """Global ids of the layers that move; None: all layers."""
    length_bytes: Natural
    """Bytes of this chunk from this source worker; decode compares them with its own sum."""
    last: bool
    """Whether this is the last chunk of the source worker."""


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """Decode: the transfer is final, its pages are the decode worker's."""

    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The sender's part of a generation failed. It proves nothing about writes; `Drained` does."""

    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error."""
    retryable: bool = False
    """Whether the same request may succeed later without any change."""
    fields: dict[str, str] = {}
    """What is wrong: names and values."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Decode: stop writing for this generation, or for all of an older life, and say `Drained`."""

    generation: Natural = 0
    """Number of the receive to stop; 0 where `decode_incarnation` names a whole life."""
    decode_incarnation: MaybeIncarnation = b""
    """Not empty: stop every generation of that older decode life."""
    reason: str = ""
    """Why; the other side tells its worker and writes it to its log."""


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """Prefill: nothing of this generation is unposted, in flight or will be written."""

    generation: Natural = 0
    """The generation of the `Abort` that this answers; 0 where it named a whole life."""
    decode_incarnation: MaybeIncarnation = b""
    """The life that the `Abort` named; empty where it named one generation."""


class CommitPayload(msgspec.Struct, frozen=True, kw_only=True):
    """What travels on the lane behind the last byte of one source worker."""

    decode_incarnation: Incarnation
    """The decode life that receives; together with `generation` it names the transfer."""
    generation: Positive
    """Number of the receive that this is about, as its `Receive` gave it."""
    source_worker: Natural
    """Number of the prefill worker, as its agent gave it."""
    sender_index: Natural
    """Rank index of the prefill worker. Where several send `aux`, that of the lowest index
    counts."""
    length_bytes: Natural
    """Bytes that this source worker has written for this generation; decode compares them with its
    plan."""
    runs: Natural
    """How many contiguous writes these bytes took."""
    digest: bytes
    """Digest of the plan of this pair of workers."""
    aux: bytes = b""
    """Opaque bytes from worker to worker, at most `AUX_BYTES_MAX`."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Every control frame: who, to whom, which session, number, acknowledgement, message."""

    source: Incarnation
    """Incarnation of the sender, 16 bytes."""
    destination: MaybeIncarnation
    """Incarnation that the frame is meant for; empty in the first `Hello`."""
    session: Positive
    """Number of the session, counted by the decode life and never used again. It tells a session
    from an older one of the same two lives."""
    number: Natural
    """From 1 in each direction of a session; 0: outside the numbering (`Hello`, `StaleSession`,
    heartbeats, pure acknowledgements). `ack + 1` on a pure acknowledgement asks to send again from
    there."""
    ack: Natural
    """Highest number received without a gap."""
    message: AnyMessage | None = None
    """The message; None: the frame only acknowledges."""


AnyMessage = (
    Hello
    | Attach
    | Accept
    | Reject
    | LaneFailed
    | StaleSession
    | Heartbeat
    | Bye
    | Receive
    | Place
    | Matched
    | Chunk
    | Committed
    | Failed
    | Abort
    | Drained
)

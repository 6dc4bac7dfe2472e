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
    """Base of every message."""


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
    """Of the range; no write may leave it."""
    rkeys: dict[str, bytes] = {}
    """Lane name to remote key."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent tells about one attached worker."""

    worker_id: Natural
    """Number that its agent gave it; names it in every other message."""
    instance: str
    """Name of the model instance it belongs to."""
    rank: RankInfo
    """Its place in the instance, and the sizes."""
    layout: dict[str, object]
    """`KVLayout.to_wire()`."""
    regions: list[RegionInfo]
    """One per region of the layout, in order."""
    item_lens: list[Natural]
    """Bytes of one page in each region."""
    page_size: Natural
    """Of the first group, in tokens."""
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
    """`worker_id` at prefill."""
    destination_worker: Natural
    """`worker_id` at decode."""
    digest: bytes
    """Of planes, owned cells and order version; decode compares it with its own. Empty: the
    source instance is not complete yet."""


class PairReject(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one pair of workers that cannot be joined."""

    source_worker: Natural
    """`worker_id` at prefill."""
    destination_worker: Natural
    """`worker_id` at decode."""
    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error, the same on both sides."""
    fields: dict[str, str] = {}
    """What differs: name to both values."""


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
    """Of the decode incarnation of the session."""
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
    """Of the loaded UCX; empty: none."""
    boot_id: str = ""
    """Identifies one boot of one machine and its pid namespace; equal: same host."""
    uid: int = -1
    """User id of the agent; -1: not told."""
    local_socket: str = ""
    """Path of the agent's Unix socket for neighbours, agents of its host; empty: none."""
    nonce: bytes = b""
    """16 bytes; returned over the local socket, they prove that the peer is on the same host."""


class Attach(Message, frozen=True, kw_only=True, tag="attach"):
    """Decode tells all its workers, and where prefill may write. Sent anew when one changes."""

    revision: Natural
    """Rises with each `Attach` of a session."""
    workers: list[WorkerInfo]
    """All workers of the agent."""
    siblings: list[WorkerInfo] = []
    """Source workers of the same instances that other prefill agents hold, without regions: the
    cover needs every rank of an instance."""
    lane: str
    """Lane that decode chose."""
    lane_address: bytes
    """Address of the receive worker made for this prefill incarnation."""


class Accept(Message, frozen=True, kw_only=True, tag="accept"):
    """Prefill's answer to `Attach`, and sent anew when a prefill worker comes or goes."""

    revision: Natural
    """Of the `Attach` it answers."""
    workers: list[WorkerInfo]
    """All workers of the agent."""
    plans: list[PairPlan]
    """One per pair that fits."""
    rejects: list[PairReject] = []
    """One per pair that does not; it keeps this verdict until one side attaches anew."""
    lane: str
    """Lane of the `Attach`."""
    lane_address: bytes
    """What the send side calls itself on the lane; decode learns of its end over its path."""


class LaneFailed(Message, frozen=True, kw_only=True, tag="lane_failed"):
    """Prefill: the lane of this `Attach` could not be opened, or its path has broken and is closed.

    No write over it is or will be in flight. Decode attaches anew, over this lane or the next one.
    """

    revision: Natural
    """Of the `Attach` whose lane it was."""
    lane: str
    """Lane that failed."""
    text: str
    """Why."""


class Reject(Message, frozen=True, kw_only=True, tag="reject"):
    """The whole session is refused, or ended for what its peer sent."""

    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error."""
    retryable: bool = False
    """Whether the same may succeed later without any change."""
    fields: dict[str, str] = {}
    """What differs: name to both values."""


class StaleSession(Message, frozen=True, kw_only=True, tag="stale"):
    """A message named another life of this agent; it was not acted on."""

    incarnation: Incarnation
    """The life that answers."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent each `HEARTBEAT_INTERVAL_S`; renews leases at once, also ahead of numbered messages."""

    after: Natural = 0
    """Highest number that its sender had used: all else that the heartbeat says counts only once
    that number has been received."""
    oldest_live_generation: Natural = 0
    """Decode: no smaller generation is asked of this prefill life any more. 0 from prefill."""
    progress: list[Progress] = []
    """Prefill: live generations of which bytes were placed since its last heartbeat."""


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The sender closes the session in order."""

    reason: str = ""
    """For the log of the other side."""


# -- transfers -------------------------------------------------------------------------------
class Receive(Message, frozen=True, kw_only=True, tag="receive"):
    """Decode binds a room at one source worker."""

    room: Positive
    """Chosen outside, equal on both sides; only brings the two together."""
    generation: Positive
    """New for each receive of the decode incarnation, never reused."""
    source_worker: Natural
    """`worker_id` at prefill."""
    destination_worker: Natural
    """`worker_id` at decode."""
    receiver_index: Natural
    """Rank index of the decode worker."""
    receiver_count: Positive
    """Decode workers that receive this room; the send ends when all are served."""
    place: Place | None = None
    """The pages, where the receive was given them."""
    must_exist: bool = False
    """Whether a source worker that has no live send of the room answers `Failed` at once instead of
    waiting for it."""


class Place(Message, frozen=True, kw_only=True, tag="place"):
    """Decode tells where the pages of a generation go."""

    generation: Positive
    """Of the `Receive`."""
    source_worker: Natural
    """`worker_id` at prefill."""
    tokens: Natural
    """Of the whole request; must equal that of the send."""
    prefix_tokens: Natural = 0
    """Tokens that decode has already; what moves is `[prefix_tokens, tokens)`."""
    groups: dict[str, GroupPages] = {}
    """Page ids per group; empty where this source worker owes nothing."""


class Matched(Message, frozen=True, kw_only=True, tag="matched"):
    """Prefill: the room's send exists and is bound to this generation."""

    generation: Positive
    """Of the `Receive`."""
    source_worker: Natural
    """`worker_id` at prefill."""


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """Prefill announces a chunk; before its first byte where the receiver places the bytes."""

    generation: Positive
    """Of the `Receive`."""
    source_worker: Natural
    """`worker_id` at prefill."""
    number: Natural
    """From 0, per generation and source worker, without gaps."""
    ranges: dict[str, list[TokenRange]]
    """Tokens of each group that move, in order: several ranges where decode skips pages."""
    layers: list[Natural] | None = None
    """Global layers; None: all."""
    length_bytes: Natural
    """Bytes of this chunk from this source worker; decode compares its own sum."""
    last: bool
    """Whether no chunk follows."""


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """Decode: the transfer is final, its pages are the decode worker's."""

    generation: Positive
    """Of the `Receive`."""


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The sender's part of a generation failed. No proof of anything: that is `Drained`."""

    generation: Positive
    """Of the `Receive`."""
    source_worker: Natural
    """`worker_id` at prefill."""
    code: str
    """Wire code of the error class."""
    text: str
    """Exact text of the error."""
    retryable: bool = False
    """Whether the same request may succeed later without any change."""
    fields: dict[str, str] = {}
    """What is wrong: name to value."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Decode: stop writing for this generation, or for all of an older life, and say `Drained`."""

    generation: Natural = 0
    """The one to stop; 0: all of `decode_incarnation`."""
    decode_incarnation: MaybeIncarnation = b""
    """Not empty: every generation of that life; `generation` is 0 then."""
    reason: str = ""
    """For the log of the other side."""


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """Prefill: nothing of this generation is unposted, in flight or will be written."""

    generation: Natural = 0
    """As in the `Abort`; 0: all of `decode_incarnation`."""
    decode_incarnation: MaybeIncarnation = b""
    """As in the `Abort`."""


class CommitPayload(msgspec.Struct, frozen=True, kw_only=True):
    """What travels on the lane behind the last byte of one source worker."""

    decode_incarnation: Incarnation
    """With `generation` names the transfer."""
    generation: Positive
    """Of the `Receive`."""
    source_worker: Natural
    """`worker_id` at prefill."""
    sender_index: Natural
    """Rank index of the prefill worker; the lowest that gave any `aux` wins."""
    length_bytes: Natural
    """Bytes this source worker wrote for this generation; decode compares."""
    runs: Natural
    """Contiguous writes they took."""
    digest: bytes
    """Of the pair's plan."""
    aux: bytes = b""
    """Opaque bytes from worker to worker, at most `AUX_BYTES_MAX`."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Every control frame: who, to whom, which session, number, acknowledgement, message."""

    source: Incarnation
    """Incarnation of the sender, 16 bytes."""
    destination: MaybeIncarnation
    """Incarnation meant; empty in the first `Hello`."""
    session: Positive
    """Counter of the decode incarnation, one per session that it asks for, never reused: tells a
    session from an older one of the same two lives."""
    number: Natural
    """From 1 in each direction of a session; 0: outside the numbering (`Hello`, `StaleSession`,
    heartbeats, pure acknowledgements). `ack + 1` on a pure acknowledgement asks to send again from
    there."""
    ack: Natural
    """Highest number received without a gap."""
    message: AnyMessage | None = None
    """None: a pure acknowledgement."""


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

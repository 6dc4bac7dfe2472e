"""The messages between a worker and the agent beside it, as typed records.

They travel length-prefixed over a Unix stream socket, file descriptors beside them. Both ends are
of one version: a difference is refused in the first exchange, with both versions.
"""

from __future__ import annotations

import msgspec

from pdxfer.wire.messages import GroupPages, RankInfo


class LocalMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base. `request` pairs a worker's request with the one answer it gets."""

    request: int = 0


class TransferMessage(LocalMessage, frozen=True, kw_only=True):
    """Base of what a worker says of one transfer: the use of a board slot.

    The worker chooses both numbers: a free slot of its board, and for each use of a slot the
    sequence number after its last one. The slot is the transfer's until the worker's `ReleaseSlot`,
    also where the agent refuses the transfer: the board then shows FAILED.
    """

    transfer: int
    """Slot of the worker's status board that shows the transfer."""
    sequence: int
    """Counts the uses of the slot; the first is 1."""


# -- worker to agent -------------------------------------------------------------------------
class WorkerHello(LocalMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker."""

    version: str
    """`pdxfer.__version__` of the worker."""
    role: str
    """`prefill` or `decode`."""
    pid: int


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One region of the worker's cache."""

    kind: str
    """`memfd`: the next descriptor of the message, mapped by the agent. `address`: memory of this
    very process, allowed only from the agent's own process (embedded)."""
    length_bytes: int
    offset_bytes: int = 0
    """Where the region begins in the memfd."""
    fd_index: int = -1
    """Which descriptor of the message; several regions may share one."""
    address: int = 0


class HeldTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Decode: a transfer that an agent left when it died, whose pages may still be written.

    It goes on in a slot of the new board: FENCING, then QUARANTINED, FAILED once it is proven.
    """

    transfer: int
    """Slot of the new board, chosen as for a new transfer."""
    sequence: int
    life: bytes
    """Incarnation of the agent that died."""
    room: int
    groups: dict[str, GroupPages]
    prefill: list[str]
    """Addresses of the prefill agents that were told the pages."""
    writers: list[bytes]
    """Incarnations of those that may still write, at least one."""


class AttachWorker(LocalMessage, frozen=True, kw_only=True, tag="attach"):
    """Hands the worker's layout and memory to the agent; descriptors ride beside it."""

    instance: str
    rank: RankInfo
    layout: dict[str, object]
    relayout: str
    ignore_parts: list[str]
    memory: list[MemoryInfo]
    held: list[HeldTransfer] = []
    """Decode: what an agent that died has left. Where it cannot be held, nothing is attached."""


class ConnectPeer(LocalMessage, frozen=True, kw_only=True, tag="connect"):
    """Decode: join this prefill address and answer with the plan, or with the refusal."""

    prefill: list[str]
    timeout_s: float


class ChunkTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Pages to send: what one `send` says."""

    groups: dict[str, GroupPages]
    tokens: int | None
    """Tokens of the whole request, known at the latest with the last chunk."""
    layers: list[int] | None
    last: bool
    aux: bytes


class PlaceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes: what `place` says."""

    tokens: int
    prefix_tokens: int
    groups: dict[str, GroupPages]


class OpenSend(TransferMessage, frozen=True, kw_only=True, tag="open"):
    """Prefill: hold the room for a send; with `chunk` also its first pages.

    Its answer is the board, which shows the transfer, or a `Refused` of this request.
    """

    room: int
    deadline_s: float
    lease_s: float
    chunk: ChunkTerms | None = None


class SendChunk(TransferMessage, frozen=True, kw_only=True, tag="send"):
    """Prefill: pages of an opened room.

    No answer but the board; should they be refused, a `Refused` of the opening's request.
    """

    chunk: ChunkTerms


class BeginChunk(TransferMessage, frozen=True, kw_only=True, tag="begin"):
    """Prefill: pages of an opened room, in all layers; each goes at its `LayerDone`.

    Answered as `SendChunk` is.
    """

    chunk: ChunkTerms


class LayerDone(TransferMessage, frozen=True, kw_only=True, tag="layer_done"):
    """Prefill: a layer of the chunk that was begun may go. Answered as `SendChunk` is."""

    layer: int
    event: int = 0
    """Number of a GPU event of this very process that comes first (embedded); 0: none."""


class OpenReceive(TransferMessage, frozen=True, kw_only=True, tag="receive"):
    """Decode: bind a room; with `place` also its pages.

    The answer is the board, which shows the transfer, or a `Refused` of this request.
    """

    room: int
    prefill: list[str]
    deadline_s: float
    unreachable_s: float | None = None
    """How long a prefill address may go without an answer. Then the receive fails, retryable; None:
    it waits until its deadline."""
    must_exist: bool = False
    """Whether the receive fails, retryable, where a source worker has no live send of the room when
    it is told of it."""
    place: PlaceTerms | None = None


class PlacePages(TransferMessage, frozen=True, kw_only=True, tag="place"):
    """Decode: where the pages of a received room go.

    Only the board answers; should the pages be refused, a `Refused` of the opening's request comes.
    """

    place: PlaceTerms


class AbortTransfer(TransferMessage, frozen=True, kw_only=True, tag="abort"):
    """Either role: give the transfer up. No answer but the board."""

    reason: str


class ReleaseSlot(TransferMessage, frozen=True, kw_only=True, tag="release"):
    """The worker has seen the final state; the slot may be used again."""


class WritersEnded(TransferMessage, frozen=True, kw_only=True, tag="writers_ended"):
    """Decode: the worker has seen the processes end of all that may write a `HeldTransfer`."""


class AskStatus(LocalMessage, frozen=True, kw_only=True, tag="ask_status"):
    """Anybody whom the socket lets in: what is this agent doing? Needs no hello."""


class Together(LocalMessage, frozen=True, kw_only=True, tag="together"):
    """What a worker asks for at once: acted on in order, each as if it had come alone."""

    messages: list[
        ConnectPeer
        | OpenSend
        | SendChunk
        | BeginChunk
        | LayerDone
        | OpenReceive
        | PlacePages
        | AbortTransfer
        | ReleaseSlot
        | AskStatus
    ]


# -- agent to worker -------------------------------------------------------------------------
class AgentHello(LocalMessage, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `WorkerHello`; the board's memfd and an eventfd ride beside it."""

    version: str
    role: str
    incarnation: bytes
    addresses: list[str]
    """Control addresses of a prefill agent: what decode passes as `prefill=`."""
    board_slots: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One attached worker."""

    worker_id: int
    pid: int
    instance: str
    rank: int
    """Index of the worker's rank in its instance."""
    length_bytes: int
    """Bytes of the memory that the worker has attached."""
    transfers: int
    """How many transfers of the worker are live, as its status board has them."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One live transfer."""

    worker_id: int
    room: int
    generation: int
    """Number of the receive; 0 at prefill, where one send may serve several receives."""
    state: str
    peers: list[str]
    """Incarnations of the other side, hexadecimal; at FENCING and QUARANTINED those that nothing
    proves silent yet."""
    reason: str = ""
    """Why the transfer is ending; empty while nothing is wrong."""


class AgentStatus(LocalMessage, frozen=True, kw_only=True, tag="status"):
    """Answer to `AskStatus`."""

    version: str
    role: str
    pid: int
    incarnation: bytes
    addresses: list[str]
    lanes: list[str]
    """Lanes that the agent offers, best first."""
    lanes_in_use: list[str]
    ucx_version: str
    workers: list[WorkerStatus]
    live_transfers: int
    """How many transfers are not final. Those of a worker that has gone count until no byte of them
    can land."""
    transfers: list[TransferStatus]
    """The live transfers one by one, quarantined ones first, at most
    `limits.STATUS_TRANSFERS_MAX`."""
    stopping: bool


class Attached(LocalMessage, frozen=True, kw_only=True, tag="attached"):
    """Answer to `AttachWorker`."""

    worker_id: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one source rank and this worker: a plan, or why there is none."""

    rank: RankInfo
    """Rank of the source worker in its instance."""
    summary: dict[str, object] | None = None
    error: Refused | None = None


class Connected(LocalMessage, frozen=True, kw_only=True, tag="connected"):
    """Answer to `ConnectPeer`: the plan of all pairs together, or why there is none."""

    summary: dict[str, object] | None = None
    error: Refused | None = None
    verdicts: list[Verdict] = []
    """One verdict for each source rank, as far as they are known."""


class Refused(LocalMessage, frozen=True, kw_only=True, tag="refused"):
    """Answer to any request that failed: an error of `pdxfer.errors` as it travels.

    The refusal of an opening comes before the board shows FAILED.
    """

    code: str
    text: str
    retryable: bool
    fields: dict[str, str]


class Outcome(LocalMessage, frozen=True, kw_only=True, tag="outcome"):
    """What the board's word cannot hold. Sent before the board shows the state it belongs to."""

    transfer: int
    sequence: int
    state: int
    prefix_tokens: int | None = None
    """At prefill, from READY on: how many first tokens decode has already."""
    error: Refused | None = None
    """The transfer's error, at FENCING, QUARANTINED and FAILED."""
    length_bytes: int = 0
    runs: int = 0
    aux: bytes = b""
    """At decode, at COMMITTED: what the prefill worker sent beside the cache."""
    lane: str = ""
    times: tuple[float, ...] = ()
    """`time.monotonic()` of this host, as the agent learnt of it: matched, first byte, last byte,
    committed; 0: not known, or not yet."""


class Writer(LocalMessage, frozen=True, kw_only=True, tag="writer"):
    """Decode: a process of this host may soon write into the worker's pages by itself.

    A descriptor of that process rides beside it. Sent before that process is told any page of this
    worker: should the agent die, its end proves that it writes nothing more.
    """

    incarnation: bytes
    """Incarnation of the prefill agent in that process."""


class TransferWriters(LocalMessage, frozen=True, kw_only=True, tag="transfer_writers"):
    """Decode: all processes that may write pages of a transfer; only where there are several.

    The board has room for one. Sent before any of them is told a page.
    """

    transfer: int
    sequence: int
    incarnations: list[bytes]
    """Incarnations of the prefill agents in those processes; a `Writer` has come for each."""


FromWorker = (
    WorkerHello
    | AttachWorker
    | ConnectPeer
    | OpenSend
    | SendChunk
    | BeginChunk
    | LayerDone
    | OpenReceive
    | PlacePages
    | AbortTransfer
    | ReleaseSlot
    | WritersEnded
    | Together
    | AskStatus
)
FromAgent = (
    AgentHello | Attached | Connected | Refused | Outcome | Writer | TransferWriters | AgentStatus
)

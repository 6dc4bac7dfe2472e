"""The records of a send: a `LiveSend` for each room and prefill worker, with its `SendLeg`s."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdxfer.errors import LocalProtocolError, PdxferError
from pdxfer.layout import KVLayout, Pages, Plan
from pdxfer.protocol.prefill.extent import Extent
from pdxfer.protocol.prefill.returning import Returning
from pdxfer.protocol.ranges import Ranges
from pdxfer.protocol.state import State
from pdxfer.protocol.tables import SendingEvent, advance_sending
from pdxfer.wire.messages import Chunk as ChunkMessage
from pdxfer.wire.messages import Place, Receive


@dataclass(slots=True)
class LiveChunk:
    """One `send`: pages of some groups, the token range they cover, the layers they hold."""

    pages: dict[str, Pages]
    ranges: Ranges
    layers: tuple[int, ...] | None
    last: bool


@dataclass(slots=True)
class SendLeg:
    """What one source worker owes one transfer: (decode life, generation)."""

    peer: bytes
    receive: Receive
    plan: Plan | None
    """None: this worker owes the destination nothing."""
    place: Place | None = None
    """The placement without its page ids, which are in `pages`."""
    pages: dict[str, Pages] = field(default_factory=dict)
    chunks_posted: int = 0
    announcements: list[ChunkMessage] = field(default_factory=list)
    """Announcements of chunks that are posted and of which decode was not told yet."""
    bytes_planned: int = 0
    bytes_placed: int = 0
    runs: int = 0
    posts_in_flight: set[int] = field(default_factory=set)
    """Numbers of chunks that the lane has not ended."""
    batch_failed: bool = False
    """A write ended with an error: that proves nothing about where its bytes are."""
    commit_asked: bool = False
    sent: bool = False
    """Every byte is placed and the commit has left."""
    committed: bool = False
    drained: bool = True
    """Nothing of this leg is unposted or in flight."""

    @property
    def chunks_ended(self) -> int:
        """All chunks below this number are posted, and nothing of them is in flight."""
        return min(self.posts_in_flight, default=self.chunks_posted)

    @property
    def generation(self) -> int:
        """The generation of the decode life `peer` that this leg serves."""
        return self.receive.generation

    @property
    def pages_bytes(self) -> int:
        """Bytes that the page ids take here."""
        return sum(listed.ids.nbytes + 16 * len(listed.skipped) for listed in self.pages.values())

    @property
    def key(self) -> tuple[bytes, int]:
        """The decode life and generation, which name the transfer."""
        return (self.peer, self.receive.generation)


@dataclass(slots=True)
class LiveSend:
    """The send of one room at one prefill worker, to all decode workers that receive it."""

    worker: int
    room: int
    slot: int
    deadline: float
    """When the send fails unless every receiver has come, in seconds of the agent's clock."""
    lease_s: float
    layout: KVLayout
    extent: Extent
    """How far its chunks have come."""
    state: State = State.WAITING
    legs: dict[tuple[bytes, int], SendLeg] = field(default_factory=dict)
    receiver_count: int = 0
    """How many receivers the room has; 0: no receiver has come."""
    chunks: list[LiveChunk] = field(default_factory=list)
    begun: LiveChunk | None = None
    """Of all layers; what of it may go follows layer by layer."""
    layers_left: set[int] = field(default_factory=set)
    """Layers of it that may not go yet."""
    aux: bytes = b""
    given_bytes: int = 0
    """Of the budget of its worker."""
    error: PdxferError | None = None
    check_at: float = 0.0
    """When its deadlines are looked at next; at once when its state has changed."""
    returning: Returning = field(default_factory=Returning)
    moved: bool = True
    """Something came, was posted or flushed since the last tick."""
    moved_at: float = 0.0
    """The tick at which the send was last seen to have moved."""

    def advance(self, event: SendingEvent) -> None:
        """Take an event; the table decides."""
        self.state = advance_sending(self.state, event)
        self.moved, self.check_at = True, 0.0

    @property
    def complete(self) -> bool:
        """The last chunk has been given."""
        return self.extent.complete and not self.layers_left

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole request; None: the worker has not told them yet."""
        return self.extent.tokens

    @property
    def state_groups(self) -> frozenset[str]:
        """Groups whose ids pair by position."""
        return frozenset(group.name for group in self.layout.groups if group.kind == "state")

    @property
    def bound(self) -> bool:
        """Every receiver has come: no deadline of the send's own runs any more."""
        return self.receiver_count > 0 and len(self.legs) == self.receiver_count

    @property
    def matched(self) -> bool:
        """Every receiver has come and has placed its pages."""
        return self.bound and all(leg.place is not None for leg in self.legs.values())

    def begin(self, pages: dict[str, Pages], tokens: int | None, *, last: bool) -> None:
        """Take a chunk of all layers, of which nothing may go before its `add_layer`.

        Raises:
            ConfigError: the pages do not fit the tokens, or a chunk follows the last one; the send
                is unchanged.
            LocalProtocolError: layers of an earlier one are left.
        """
        self._check_none_left()
        checked = self.extent.check(pages, tokens, None, last=last)
        self.extent.take(checked)
        self.begun = LiveChunk(checked.pages, checked.ranges, None, last)
        self.layers_left = set(self.layout.layers)
        self.moved = True

    def add_layer(self, layer: int) -> None:
        """Let a layer of what was begun go.

        Raises:
            LocalProtocolError: it may go already, or nothing has been begun that has it.
        """
        if self.begun is None or layer not in self.layers_left:
            raise LocalProtocolError(
                f"room {self.room}: layer {layer} is done already, or nothing was begun that has "
                "it: each layer of the cache once after begin()"
            )
        self.layers_left.discard(layer)
        begun, last = self.begun, self.begun.last and not self.layers_left
        self.chunks.append(LiveChunk(begun.pages, begun.ranges, (layer,), last))
        self.moved = True

    def _check_none_left(self) -> None:
        if self.layers_left:
            raise LocalProtocolError(
                f"room {self.room}: layers {sorted(self.layers_left)} of the chunk that was begun "
                "are not done; tell each before the next chunk"
            )

    def add_chunk(
        self,
        pages: dict[str, Pages],
        tokens: int | None,
        layers: list[int] | None,
        *,
        last: bool,
    ) -> LiveChunk:
        """Append a chunk behind the earlier ones of its layers.

        Raises:
            ConfigError: the pages do not fit the tokens, or a chunk follows the last one; the send
                is unchanged.
            LocalProtocolError: layers of a chunk that was begun are left.
        """
        self._check_none_left()
        checked = self.extent.check(pages, tokens, layers, last=last)
        self.extent.take(checked)
        self.moved = True
        chunk = LiveChunk(
            checked.pages, checked.ranges, None if layers is None else tuple(layers), last
        )
        self.chunks.append(chunk)
        return chunk

"""The records of a send: one `Sending` a room and prefill worker, one `Leg` a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdxfer.errors import ConfigError, PdxferError
from pdxfer.layout import KVLayout, Pages, Plan
from pdxfer.protocol.prefill.returning import Returning
from pdxfer.protocol.ranges import Ranges
from pdxfer.protocol.state import State
from pdxfer.protocol.tables import SendingEvent, advance_sending
from pdxfer.wire.messages import Chunk as ChunkMessage
from pdxfer.wire.messages import Place, Receive


@dataclass(slots=True)
class Chunk:
    """One `send`: pages of some groups, the token range they cover, the layers they hold."""

    pages: dict[str, Pages]
    ranges: Ranges
    layers: tuple[int, ...] | None
    last: bool


@dataclass(slots=True)
class Leg:
    """What one source worker owes one transfer: (decode life, generation)."""

    peer: bytes
    receive: Receive
    plan: Plan | None
    """None: this worker owes the destination nothing."""
    place: Place | None = None
    """Without its page ids, which are in `pages`."""
    pages: dict[str, Pages] = field(default_factory=dict)
    chunks_posted: int = 0
    announcements: list[ChunkMessage] = field(default_factory=list)
    """Of chunks posted, not told yet."""
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
    """Nothing unposted, nothing in flight."""

    @property
    def chunks_ended(self) -> int:
        """All chunks below this number are posted, and nothing of them is in flight."""
        return min(self.posts_in_flight, default=self.chunks_posted)

    @property
    def generation(self) -> int:
        """Of the decode life `peer`."""
        return self.receive.generation

    @property
    def pages_bytes(self) -> int:
        """Bytes that the page ids take here."""
        return sum(listed.ids.nbytes for listed in self.pages.values())

    @property
    def key(self) -> tuple[bytes, int]:
        """Names the transfer."""
        return (self.peer, self.receive.generation)


@dataclass(slots=True)
class Sending:
    """The send of one room at one prefill worker, to all decode workers that receive it."""

    worker: int
    room: int
    slot: int
    deadline: float
    """While unmatched; seconds on the agent's clock."""
    lease_s: float
    layout: KVLayout
    shares_pages: bool = False
    """A context parallel rank: it owes, and may hold, a share of the pages."""
    state: State = State.WAITING
    legs: dict[tuple[bytes, int], Leg] = field(default_factory=dict)
    receiver_count: int = 0
    """0: no receiver has come."""
    chunks: list[Chunk] = field(default_factory=list)
    token_ends: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """(group, layer) to the token where its next chunk begins; layer None: all layers."""
    tokens: int | None = None
    aux: bytes = b""
    error: PdxferError | None = None
    check_at: float = 0.0
    """When its deadlines are looked at next; at once when its state has changed."""
    returning: Returning = field(default_factory=Returning)
    moved: bool = True
    """Something came, was posted or flushed since the last tick."""
    moved_at: float = 0.0
    """The tick that saw it last."""

    def advance(self, event: SendingEvent) -> None:
        """Take an event; the table decides."""
        self.state = advance_sending(self.state, event)
        self.moved, self.check_at = True, 0.0

    @property
    def complete(self) -> bool:
        """The last chunk has been given."""
        return bool(self.chunks) and self.chunks[-1].last

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

    def add_chunk(
        self,
        pages: dict[str, Pages],
        tokens: int | None,
        layers: list[int] | None,
        *,
        last: bool,
    ) -> Chunk:
        """Append a chunk behind the earlier ones of its layers.

        Raises:
            ConfigError: the pages do not fit the tokens, or a chunk follows the last one; the send
                is unchanged.
        """
        if self.complete:
            raise ConfigError(f"room {self.room}: a chunk follows the one given with last=True")
        total = self.tokens if tokens is None else tokens
        if self.tokens is not None and total != self.tokens:
            raise ConfigError(f"room {self.room}: tokens={tokens} after tokens={self.tokens}")
        ranges, ends = self._ranges(pages, total, layers, last=last)
        self.token_ends.update(ends)
        if last and total is None:
            states = self.state_groups
            total = max((end for name, (_, end) in ranges.items() if name not in states), default=0)
        self.tokens, self.moved = total, True
        chunk = Chunk(pages, ranges, None if layers is None else tuple(layers), last)
        self.chunks.append(chunk)
        return chunk

    def _ranges(
        self, pages: dict[str, Pages], total: int | None, layers: list[int] | None, *, last: bool
    ) -> tuple[Ranges, dict[tuple[str, int | None], int]]:
        sizes = {group.name: group.page_size for group in self.layout.groups}
        ranges: Ranges = {}
        ends: dict[tuple[str, int | None], int] = {}
        keys: list[int | None] = [None] if layers is None else list(layers)
        for name, listed in pages.items():
            if name in self.state_groups:
                if not last:
                    raise ConfigError(
                        f"room {self.room}: ids of state group {name} go with the last chunk, when "
                        "the state is final"
                    )
                ranges[name] = (0, len(listed.ids))
                continue
            starts = {self._end(name, key) for key in keys}
            if len(starts) != 1:
                raise ConfigError(
                    f"room {self.room}: layers {layers} of group {name} stand at different tokens "
                    f"{sorted(starts)}; send them in separate chunks"
                )
            first = starts.pop()
            if listed.first_token and listed.first_token < first:
                raise ConfigError(
                    f"room {self.room}: first_token={listed.first_token} of group {name}, but its "
                    f"earlier chunks end at token {first}; pages are sent once"
                )
            first = max(first, listed.first_token)
            end = first + len(listed.ids) * sizes[name]
            if total is not None and end > total:
                spare = (end - total) // sizes[name]
                if spare:
                    raise ConfigError(
                        f"room {self.room}: {len(listed.ids)} page(s) of group {name} from token "
                        f"{first} on cover {end} tokens, tokens={total} needs {spare} less"
                    )
                end = total
            elif (
                last
                and total is not None
                and end < total
                and layers is None
                and not self.shares_pages
            ):
                raise ConfigError(
                    f"room {self.room}: the pages of group {name} end at token {end}, "
                    f"tokens={total}; give the missing pages or the right tokens"
                )
            ranges[name] = (first, end)
            pages[name] = Pages(listed.ids, first)
            ends.update({(name, key): end for key in keys})
        return ranges, ends

    def _end(self, group: str, layer: int | None) -> int:
        whole = self.token_ends.get((group, None), 0)
        if layer is None:
            return max([whole, *(v for (g, _), v in self.token_ends.items() if g == group)])
        return self.token_ends.get((group, layer), whole)

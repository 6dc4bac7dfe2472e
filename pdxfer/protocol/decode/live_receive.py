"""The records of a receive: one `LiveReceive` a generation, one `ReceiveLeg` a source worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdxfer.errors import PdxferError
from pdxfer.layout import KVLayout, Pages, Plan
from pdxfer.protocol.decode.proofs import Side
from pdxfer.protocol.state import State
from pdxfer.protocol.tables import ReceivingEvent, advance_receiving

SourceKey = tuple[bytes, int]
"""(prefill life, worker id there)."""


@dataclass(slots=True)
class ReceiveLeg:
    """What one source worker owes one transfer."""

    sender_index: int
    plan: Plan | None
    """The plan of this pair; None: the worker owes nothing, and is told of the room so that its
    send ends."""
    expected_bytes: int = 0
    matched: bool = False
    committed: bool = False
    runs: int = 0
    aux: bytes = b""


@dataclass(slots=True)
class LiveReceive:
    """The receive of one room at one decode worker; its generation is never used again."""

    worker: int
    room: int
    generation: int
    slot: int
    prefill: tuple[str, ...]
    """Addresses whose workers make up the source instance."""
    deadline: float
    """When the receive fails unless it is matched, in seconds of the agent's clock."""
    layout: KVLayout
    unreachable_s: float | None = None
    """How long an address may go without an answer while the receive is not bound, counted from
    when its link was made or lost its session. Then the receive fails, retryable; None: only its
    deadline fails it."""
    must_exist: bool = False
    """Whether a source worker that has no live send of the room, when it is told of it, fails the
    receive; retryable."""
    state: State = State.WAITING
    legs: dict[SourceKey, ReceiveLeg] = field(default_factory=dict)
    """What each source worker owes; empty until the source instance is complete."""
    pages: dict[str, Pages] | None = None
    """The pages of each group; None: the worker has not placed the receive yet."""
    tokens: int = 0
    prefix_tokens: int = 0
    given_bytes: int = 0
    """Of the budget of its worker."""
    error: PdxferError | None = None
    told: dict[bytes, set[Side]] = field(default_factory=dict)
    """Prefill lives that know pages of this generation, and the receive sides over which they may
    still write them."""
    bound: set[bytes] = field(default_factory=set)
    """Prefill lives that know the room is held."""
    proofs: dict[bytes, str] = field(default_factory=dict)
    """Prefill life to the proof that it can write no more: drained, revoked, dead."""
    origin: bytes = b""
    """The older life of this agent that received it; empty: this life did."""
    fence_deadline: float = 0.0
    check_at: float = 0.0
    """When its deadlines are looked at next; at once when its state has changed."""
    moved: bool = True
    """There was a sign since the last tick that bytes of it move."""
    moved_at: float = 0.0
    """The tick at which the last sign was seen."""
    bytes_moved: dict[bytes, int] = field(default_factory=dict)
    """Bytes that each prefill life has moved, as its heartbeats say."""
    lanes: set[str] = field(default_factory=set)

    def advance(self, event: ReceivingEvent) -> None:
        """Take an event; the table decides."""
        self.state = advance_receiving(self.state, event)
        self.moved, self.check_at = True, 0.0

    def note_progress(self, peer: bytes, bytes_done: int) -> None:
        """A prefill life says how far it is; only bytes that are owed and new are a sign."""
        owed = sum(leg.expected_bytes for key, leg in self.legs.items() if key[0] == peer)
        if self.bytes_moved.get(peer, 0) < bytes_done <= owed:
            self.bytes_moved[peer], self.moved = bytes_done, True

    @property
    def why_stuck(self) -> str:
        """What a matched receive that does not move waits for, in words."""
        owing = [leg for leg in self.legs.values() if leg.plan is not None]
        missing = sorted(leg.sender_index for leg in owing if not leg.committed)
        who = f"source ranks (rank {', '.join(str(index) for index in missing)})"
        return f"{len(missing)} of {len(owing)} {who} have not sent all they owe"

    @property
    def unproven(self) -> set[bytes]:
        """Prefill lives that may still write."""
        return self.told.keys() - self.proofs.keys()

    @property
    def fence(self) -> str:
        """The proof that took most: what `TransferError.fence` says."""
        if self.unproven:
            return "quarantined"
        for name in ("dead", "revoked"):
            if name in self.proofs.values():
                return name
        return "drained"

    @property
    def committed(self) -> bool:
        """Every source worker that owes something has sent its commit."""
        return bool(self.legs) and all(
            leg.committed for leg in self.legs.values() if leg.plan is not None
        )

    @property
    def matched(self) -> bool:
        """Every source worker has its send, and pages are placed."""
        return (
            self.pages is not None
            and bool(self.legs)
            and all(leg.matched for leg in self.legs.values())
        )

    @property
    def aux(self) -> bytes:
        """The `aux` of the lowest sender index that gave any."""
        given = sorted((d.sender_index, d.aux) for d in self.legs.values() if d.aux)
        return given[0][1] if given else b""

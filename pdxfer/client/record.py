"""What a client knows of a transfer: a word on the status board, and what the agent said about it.

What may have to wait is a coroutine here, written once; `Transfer` and `AsyncTransfer` are its two
faces (`pdxfer.client.waiting`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from pdxfer.client.arguments import check_patience, check_reason
from pdxfer.client.line import from_wire_refused
from pdxfer.client.waiting import Bell
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    PdxferError,
    TransferError,
)
from pdxfer.local.board import ORPHANED, STATE_BITS
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.client.line import Line
    from pdxfer.layout import KVLayout, Rank
    from pdxfer.local.board import BoardReader
    from pdxfer.local.messages import (
        BeginChunk,
        OpenReceive,
        OpenSend,
        Outcome,
        PlacePages,
        Refused,
        SendChunk,
    )
    from pdxfer.wire.messages import GroupPages

_STATES: Final = (State.WAITING, *State)
"""The states by the low byte of a word. 0 marks a free slot, which no transfer meets under its own
sequence number."""
_PROGRESS: Final = (State.WAITING, State.READY, State.MOVING, State.SENT, State.COMMITTED)
_REACHED: Final = {
    until: frozenset(_PROGRESS[position:]) for position, until in enumerate(_PROGRESS)
}
BAD: Final = frozenset({State.FENCING, State.QUARANTINED, State.FAILED})
"""States of a transfer that has failed or is about to."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a transfer: what was moved, how, and when."""

    length_bytes: int
    """Bytes of the cache that were moved; 0 before SENT."""
    runs: int
    """How many contiguous copies these bytes took."""
    aux: bytes
    """What the prefill worker sent beside the cache, at decode only."""
    lane: str
    """Name of the lane that the bytes travelled by."""
    matched_s: float | None = field(default=None, repr=False)
    """When both sides had come, in seconds of this host's `time.monotonic()`, as this side's agent
    learnt of it; None where that is not known, or not yet."""
    first_byte_s: float | None = field(default=None, repr=False)
    """When the first bytes were on their way, in seconds of this host's `time.monotonic()`; None
    where that is not known. Decode does not know it where it hears of the bytes only by their
    commit."""
    last_byte_s: float | None = field(default=None, repr=False)
    """When all bytes were in place, in seconds of this host's `time.monotonic()`; None where that
    is not known, or not yet."""
    committed_s: float | None = field(default=None, repr=False)
    """When every decode worker (at decode: this one) had committed, in seconds of this host's
    `time.monotonic()`; None where that is not known, or not yet."""


class Owner(Protocol):
    """What a transfer needs of its client."""

    @property
    def board(self) -> BoardReader:
        """The status board."""
        ...

    @property
    def channel(self) -> Line:
        """The connection to the agent."""
        ...

    @property
    def layout(self) -> KVLayout:
        """Layout of the attached cache."""
        ...

    @property
    def agent_is_embedded(self) -> bool:
        """Whether the agent is in this process."""
        ...

    @property
    def rank(self) -> Rank:
        """Rank of the worker in its instance."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long the agent may take to answer."""
        ...

    @property
    def word(self) -> Callable[[int], int]:
        """The board's word of a slot."""
        ...

    def is_silent(self, transfer: TransferRecord) -> bool:
        """Whether nothing touches a transfer's pages any more, after the agent has ended."""
        ...

    def settle(self, transfer: TransferRecord) -> None:
        """The transfer may have ended: give its slot back if it has."""
        ...

    def post_abort(self, transfer: TransferRecord, reason: str) -> None:
        """Tell the agent that the transfer is given up."""
        ...


class TransferRecord:
    """One request's cache on its way, as far as it can be known without waiting."""

    _aborted = False
    _prefix_tokens: int | None = None
    returned: ClassVar[frozenset[State]] = FINAL
    """States in which the pages are the worker's."""
    returned_now = False
    """Whether the last `finished` that listed it was the one that gave its pages back. It does not
    change until it is listed again, whatever its state becomes meanwhile."""

    def __init__(self, client: Owner, opening: OpenSend | OpenReceive, tag: object = None) -> None:
        self.room = opening.room
        self.tag = tag
        """What the caller gave; nobody else looks at it."""
        self.slot = opening.transfer
        """The transfer's slot on the status board."""
        self.sequence = opening.sequence
        """Which use of the slot the transfer is, counted from 1."""
        self.request = opening.request
        """Number of the request that opened it; the agent refuses a chunk under this number."""
        self.holds_pages = False
        """Whether the agent was given pages, and has not refused the transfer."""
        self.bell = Bell()
        """Where those wait who wait for its state."""
        self.final: State | None = None
        """Set once by the client, when the agent may use the slot again."""
        self.outcome: Outcome | None = None
        """What the agent has last told of the transfer's end; None: nothing yet."""
        self._heard: set[int] = set()
        self.refusal: Refused | None = None
        """Why the agent did not take a chunk or the pages. The rest cannot make up for it, so the
        client aborts the transfer then."""
        self.settled_word = 0
        """The board's word that the client has dealt with."""
        self.returned_before = False
        """Whether `finished` has listed it with its pages returned, and lists it now because it has
        failed since: its pages were told back then, and are not to be taken back again."""
        self.told_back = False
        """Whether `finished` has listed it with its pages returned."""
        self.to_be_told = False
        """Whether the next `finished` lists it."""
        self.prefill: list[str] = []
        """Addresses of the prefill agents, where this is a receive."""
        self.placed_groups: dict[str, GroupPages] = {}
        """The packed pages of a receive, once they are placed."""
        self.unwanted = False
        """Whether whoever asked for it has given up, or was refused: nobody knows of it."""
        self._client = client
        self._channel = client.channel
        self._word = client.word
        self._seen = (0, State.WAITING)
        """A word and its state, in one object: threads that poll at once must not mix two."""

    @property
    def state(self) -> State:
        """Where the transfer is, as `poll()` says."""
        return self.poll()

    def poll(self) -> State:
        """Where the transfer is: one memory read; never raises.

        When the agent is gone without having ended it: QUARANTINED, and FAILED once it is proven
        that nothing writes its pages any more (at prefill: reads). That costs system calls.
        """
        word = self._word(self.slot)
        seen, state = self._seen
        return state if word == seen else self._look(word)

    @property
    def pages_returned(self) -> bool:
        """Whether the pages are the worker's again (at decode: also filled, if COMMITTED)."""
        return self.poll() in self.returned

    def abort(self, reason: str = "") -> None:
        """Give the transfer up. Idempotent, never blocks; the pages come back at FAILED.

        Nothing happens to one that is final, or whose agent is gone.

        Raises: ConfigError: a reason that is no text.
        """
        check_reason(reason)
        if self._aborted or self.poll() in FINAL:
            return
        self._client.post_abort(self, reason)
        self._aborted = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(room={self.room}, state={self.poll().name})"

    # -- what the client calls -----------------------------------------------------------------
    def hear(self, outcome: Outcome) -> None:
        """Note what the agent says of a state, before the board shows it."""
        self.outcome = outcome
        self._heard.add(outcome.state)
        if outcome.prefix_tokens is not None:
            self._prefix_tokens = outcome.prefix_tokens

    def go_on(self, slot: int, sequence: int) -> tuple[object, ...]:
        """Go on in a slot of the client's new board, as a transfer that is given up.

        Returns where it was, for `go_back`.
        """
        place = self.slot, self.sequence, self._channel, self._word, self._seen, self.settled_word
        self.slot, self.sequence, self.settled_word = slot, sequence, 0
        self._channel, self._word = self._client.channel, self._client.word
        self._seen = (0, State.QUARANTINED)
        self._aborted = True
        return place

    def go_back(self, place: tuple[Any, ...]) -> None:
        """Return to the old board: the new one did not come to be."""
        self.slot, self.sequence, self._channel, self._word, self._seen, self.settled_word = place

    def note_final(self, state: State) -> None:
        """Note that it is final: its slot is another transfer's from here on."""
        self.final = state

    def tell(self) -> None:
        """Note that `finished` lists it now."""
        self.to_be_told = False
        self.returned_before = self.told_back
        self.returned_now = self.pages_returned and not self.told_back
        self.told_back = self.told_back or self.returned_now

    def refuse(self, refusal: Refused) -> bool:
        """Note why the agent did not take the opening, a chunk or the pages; the first counts.

        Returns: whether the agent has the transfer, without what it refused: it must be aborted.
        """
        self.refusal = self.refusal or refusal
        taken = self.shown and self.poll() is not State.FAILED
        if not taken:
            self.holds_pages = False
        return taken

    def explained(self, state: State) -> bool:
        """Whether the agent's words about `state` have been read."""
        return state in self._heard or (state is State.FAILED and self.refusal is not None)

    @property
    def shown(self) -> bool:
        """Whether the board shows this transfer, as it does once the agent has its opening."""
        return self.final is not None or self._word(self.slot) >> 8 == self.sequence

    def answered(self) -> bool:
        """Whether the agent has taken or refused the opening."""
        if self.refusal is not None:
            return True
        return self.shown and (self.poll() is not State.FAILED or self.explained(State.FAILED))

    # -- for those who derive ------------------------------------------------------------------
    def _look(self, word: int) -> State:
        """The state of a word that is not the last one seen."""
        if self.final is not None:
            return self.final
        if word >> 8 == self.sequence:
            state: State = _STATES[word & STATE_BITS]
            if not word & ORPHANED:
                self._seen = (word, state)
                return state
            return self._orphaned(state)
        return self._orphaned(self._seen[1]) if word & ORPHANED else self._seen[1]

    def _orphaned(self, last: State) -> State:
        """The state after the agent's end: what it has ended stays so, all else needs a proof."""
        if last in self.returned:
            return last
        return State.FAILED if self._client.is_silent(self) else State.QUARANTINED

    def _ended(self, until: State) -> bool:
        """Whether a wait for `until` is over."""
        state = self.poll()
        if state in BAD:
            ends = state is State.FAILED or (
                state is State.QUARANTINED and until is not State.FAILED
            )
            return ends and self.explained(state)
        if state in (State.SENT, State.COMMITTED) and state in _REACHED.get(until, FINAL):
            return self.explained(state)
        return state in _REACHED.get(until, FINAL)

    def _error_now(self) -> PdxferError | None:
        """Why it failed or is about to, as far as it has been told; None while nothing is wrong."""
        state = self.poll()
        if state not in BAD and self.refusal is None:
            return None if state in FINAL else self._channel.failure
        if self.refusal is None and not self.explained(state):
            self._channel.collect()
            if not self.explained(state) and self._channel.failure is not None:
                return self._agent_gone(state, self._channel.failure)
        return self._told(state)

    async def _error_told(self) -> PdxferError | None:
        """Why it failed or is about to; the agent's words are waited for, which are on their way.

        They follow at once, so this takes microseconds; at most the client's `timeout_s`.
        """
        state = self.poll()
        if state in BAD or self.refusal is not None:
            return await self._failure(state)
        return None if state in FINAL else self._channel.failure

    async def _failure(self, state: State) -> PdxferError:
        """The agent's error for a bad `state`, waited for if it has not been read yet."""
        if self.refusal is None:
            try:
                await self._channel.until(
                    lambda: self.explained(self.poll()), self._client.timeout_s, self.bell
                )
            except PdxferError as gone:
                return self._agent_gone(self.poll(), gone)
        return self._told(state)

    def _agent_gone(self, state: State, failure: PdxferError) -> PdxferError:
        """The error of a transfer whose agent has ended."""
        back = "are the worker's again" if state is State.FAILED else "may still be in use"
        fence = "dead" if state is State.FAILED else "quarantined"
        return DaemonUnavailableError(
            f"{failure}; room {self.room} is {state.name}: its pages {back}",
            retryable=True,
            fields={**failure.fields, "fence": fence},
        )

    async def _wait(self, timeout_s: float, until: State = State.COMMITTED) -> Commit:
        """Wait until the transfer is at `until`, or further.

        Cancelling the task of an async client leaves the transfer running.

        Args:
            timeout_s: how long.
            until: WAITING, READY, MOVING, SENT or COMMITTED: a later good state satisfies it too.
                FAILED: wait for the end, whichever it is, through QUARANTINED too.

        Returns: what is known then; bytes and aux are complete from SENT and COMMITTED on.

        Raises:
            TransferError, LayoutMismatchError, PeerError and others: the transfer's error, at
                FAILED or QUARANTINED (its `fence` says which); the pages are the worker's only if
                `pages_returned`.
            DaemonUnavailableError: the agent is gone; the pages are not the worker's.
            TimeoutError: the transfer goes on.
        """
        check_until(until)
        check_patience(timeout_s)
        channel = self._channel
        if not self._ended(until):
            channel.collect()
        if not await channel.until(lambda: self._ended(until), timeout_s, self.bell):
            raise self._late(timeout_s)
        state = self.poll()
        error = await self._failure(state) if state in BAD else None
        self._client.settle(self)
        if error is not None:
            raise error
        if state is State.SENT:
            channel.collect()
        return self._commit()

    async def _raise_failure(self) -> None:
        """Raise the transfer's error if it has one."""
        state = self.poll()
        if state in BAD or self.refusal is not None:
            raise await self._failure(state)
        if state not in FINAL:
            self._channel.check()

    async def _taken(self, message: SendChunk | BeginChunk | PlacePages) -> None:
        """Wait until the kernel has the whole `message`, which has been posted."""
        if self._channel.all_sent():
            return
        timeout_s = self._client.timeout_s
        try:
            in_time = await self._channel.sent(timeout_s)
        except PdxferError:
            raise
        except BaseException:  # cancelled, interrupted
            self.abort(f"cancelled while the agent took its {type(message).__name__}")
            raise
        if not in_time:
            raise self._not_taken(timeout_s)

    def _told(self, state: State) -> PdxferError:
        """The error of a bad `state`, from what is known now; a refusal came first."""
        if self.refusal is not None:
            return from_wire_refused(self.refusal)
        outcome = self.outcome
        if outcome is None or outcome.error is None:
            return TransferError(
                f"room {self.room} is {state.name}, and the agent did not say why",
                fence="drained" if state is State.FAILED else "quarantined",
            )
        return from_wire_refused(outcome.error)

    def _commit(self) -> Commit:
        outcome = self.outcome
        if outcome is None:
            return Commit(0, 0, b"", "")
        times = (moment or None for moment in outcome.times)
        return Commit(outcome.length_bytes, outcome.runs, outcome.aux, outcome.lane, *times)

    def _late(self, timeout_s: float) -> TimeoutError:
        return TimeoutError(
            f"room {self.room} is {self.poll().name} after timeout_s={timeout_s:g}; it goes on"
        )

    def _not_taken(self, timeout_s: float) -> DaemonUnavailableError:
        """The agent left the pages in the socket; the transfer is given up."""
        self.abort("the agent did not take its pages")
        return DaemonUnavailableError(
            f"the agent at {self._client.channel.socket_path} did not read the pages of room "
            f"{self.room} within timeout_s={timeout_s:g}; the transfer is aborted"
        )


def check_until(until: State) -> None:
    """Raises: ConfigError unless the state can be waited for."""
    given: object = until
    if not isinstance(given, int) or (given not in _REACHED and given is not State.FAILED):
        raise ConfigError(
            f"until={until!r}: a transfer can be waited for until WAITING, READY, MOVING, "
            "SENT, COMMITTED or FAILED"
        )

"""A transfer as a worker sees it: a word on the status board, and what the agent said about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from pdxfer.client.channel import from_wire_refused
from pdxfer.errors import ConfigError, DaemonUnavailableError, PdxferError, TransferError
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.client.channel import Channel
    from pdxfer.layout import KVLayout
    from pdxfer.local.messages import Outcome, PlacePages, Refused, SendChunk

_STATES: Final = (State.WAITING, *State)
"""By the low byte of a word. 0 is a free slot, never met with the transfer's own sequence."""
_PROGRESS: Final = (State.WAITING, State.READY, State.MOVING, State.SENT, State.COMMITTED)
_REACHED: Final = {
    until: frozenset(_PROGRESS[position:]) for position, until in enumerate(_PROGRESS)
}
_BAD: Final = frozenset({State.FENCING, State.QUARANTINED, State.FAILED})


@dataclass(frozen=True, slots=True)
class Commit:
    """What a transfer came to."""

    length_bytes: int
    """Of the cache, moved; 0 before SENT."""
    runs: int
    """Contiguous copies it took."""
    aux: bytes
    """At decode: what the prefill worker sent beside the cache."""
    lane: str
    """How the bytes travelled."""


class Owner(Protocol):
    """What a transfer needs of its client."""

    @property
    def channel(self) -> Channel:
        """To the agent."""
        ...

    @property
    def layout(self) -> KVLayout:
        """Of the attached cache."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long the agent may take to answer."""
        ...

    @property
    def word(self) -> Callable[[int], int]:
        """The board's word of a slot."""
        ...

    def settle(self, transfer: Transfer) -> None:
        """The transfer may have ended: give its slot back if it has."""
        ...

    def post_abort(self, transfer: Transfer, reason: str) -> None:
        """Tell the agent that the transfer is given up."""
        ...


class Transfer:
    """One request's cache on its way. Made by a client; any thread may use it."""

    returned: ClassVar[frozenset[State]] = FINAL
    """States in which the pages are the worker's."""

    def __init__(self, client: Owner, room: int, slot: int, sequence: int, request: int) -> None:
        self.room = room
        self.slot = slot
        """On the status board."""
        self.sequence = sequence
        """Which use of the slot."""
        self.request = request
        """Number of the request that opened it; the agent refuses a chunk under this number."""
        self.final: State | None = None
        """Set once by the client, when the agent may use the slot again."""
        self.outcome: Outcome | None = None
        """The agent's last word."""
        self._heard: set[int] = set()
        self.refusal: Refused | None = None
        """Why the agent did not take a chunk or the pages. The rest cannot make up for it, so the
        client aborts the transfer then."""
        self.settled_word = 0
        """The board's word that the client has dealt with."""
        self._client = client
        self._word = client.word
        self._seen = (0, State.WAITING)
        """A word and its state, in one object: threads that poll at once must not mix two."""
        self._aborted = False
        self._prefix_tokens: int | None = None

    @property
    def state(self) -> State:
        """Same as `poll()`."""
        return self.poll()

    def poll(self) -> State:
        """Where the transfer is: one memory read; never raises.

        When the agent is gone, the last state it wrote.
        """
        word = self._word(self.slot)
        seen, state = self._seen
        return state if word == seen else self._look(word)

    @property
    def pages_returned(self) -> bool:
        """Whether the pages are the worker's again (at decode: also filled, if COMMITTED)."""
        return self.poll() in self.returned

    @property
    def error(self) -> PdxferError | None:
        """Why it failed or is about to; None while nothing is wrong.

        Waits for the agent's words about a state it has just written, at most the client's
        `timeout_s`; they are on their way already.
        """
        state = self.poll()
        if state in _BAD or self.refusal is not None:
            return self._failure(state)
        return None if state in FINAL else self._client.channel.failure

    def wait(self, timeout_s: float, until: State = State.COMMITTED) -> Commit:
        """Block until the transfer is at `until`, or further.

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
        if until not in _REACHED and until is not State.FAILED:
            raise ConfigError(
                f"until={until!r}: a transfer can be waited for until WAITING, READY, MOVING, "
                "SENT, COMMITTED or FAILED"
            )
        channel = self._client.channel
        if not channel.wait_until(lambda: self._ended(until), time.monotonic() + timeout_s):
            raise TimeoutError(
                f"room {self.room} is {self.poll().name} after timeout_s={timeout_s:g}; it goes on"
            )
        state = self.poll()
        error = self._failure(state) if state in _BAD else None
        self._client.settle(self)
        if error is not None:
            raise error
        if state is State.SENT:
            channel.collect()
        return self._commit()

    def abort(self, reason: str = "") -> None:
        """Give the transfer up. Idempotent, never blocks; the pages come back at FAILED.

        Nothing happens to one that is final, or whose agent is gone.
        """
        if self._aborted or self.poll() in FINAL:
            return
        self._aborted = True
        self._client.post_abort(self, reason)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(room={self.room}, state={self.poll().name})"

    # -- inside --------------------------------------------------------------------------------
    def _look(self, word: int) -> State:
        """The state of a word that is not the last one seen."""
        if self.final is not None:
            return self.final
        if word >> 8 == self.sequence:
            self._seen = (word, _STATES[word & 0xFF])
        return self._seen[1]

    def hear(self, outcome: Outcome) -> None:
        """Called by the client with what the agent says of a state, before the board shows it."""
        self.outcome = outcome
        self._heard.add(outcome.state)
        if outcome.prefix_tokens is not None:
            self._prefix_tokens = outcome.prefix_tokens

    def explained(self, state: State) -> bool:
        """Whether the agent's words about `state` have been read."""
        return state in self._heard

    def _hand_over(self, message: SendChunk | PlacePages) -> None:
        """Give the agent pages; returns once the kernel has the whole message."""
        channel = self._client.channel
        channel.post(message)
        timeout_s = self._client.timeout_s
        if channel.drained() or channel.wait_until(channel.drained, time.monotonic() + timeout_s):
            return
        self.abort("the agent did not take its pages")
        raise DaemonUnavailableError(
            f"the agent at {channel.socket_path} did not read the pages of room {self.room} within "
            f"timeout_s={timeout_s:g}; the transfer is aborted"
        )

    def _ended(self, until: State) -> bool:
        """Whether a wait for `until` is over. Called while the channel's lock is held."""
        state = self.poll()
        if state in _BAD:
            ends = state is State.FAILED or (
                state is State.QUARANTINED and until is not State.FAILED
            )
            return ends and self.explained(state)
        if state is State.COMMITTED:
            return self.explained(state)
        return state in _REACHED.get(until, FINAL)

    def _failure(self, state: State) -> PdxferError:
        """The agent's error for a bad `state`; a refusal of ours came first and is the cause."""
        if self.refusal is not None:
            return from_wire_refused(self.refusal)
        channel = self._client.channel
        try:
            channel.wait_until(
                lambda: self.explained(self.poll()), time.monotonic() + self._client.timeout_s
            )
        except PdxferError as gone:
            return gone
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
        return Commit(outcome.length_bytes, outcome.runs, outcome.aux, outcome.lane)

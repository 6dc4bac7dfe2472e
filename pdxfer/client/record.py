"""What a client knows of a transfer: a word on the status board, and what the agent said about it.

Nothing here waits: `Transfer` and `AsyncTransfer` add that, each in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from pdxfer.client.arguments import check_reason
from pdxfer.client.line import from_wire_refused
from pdxfer.errors import ConfigError, DaemonUnavailableError, LocalProtocolError, TransferError
from pdxfer.protocol.state import FINAL, RETURNED_AT_DECODE, RETURNED_AT_PREFILL, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.client.line import Line
    from pdxfer.errors import PdxferError
    from pdxfer.layout import KVLayout
    from pdxfer.local.messages import Outcome, Refused, SendChunk

_STATES: Final = (State.WAITING, *State)
"""By the low byte of a word. 0 is a free slot, never met with the transfer's own sequence."""
_PROGRESS: Final = (State.WAITING, State.READY, State.MOVING, State.SENT, State.COMMITTED)
_REACHED: Final = {
    until: frozenset(_PROGRESS[position:]) for position, until in enumerate(_PROGRESS)
}
BAD: Final = frozenset({State.FENCING, State.QUARANTINED, State.FAILED})
"""Failed, or about to."""
_NOTHING_FOLLOWS: Final = BAD | {State.SENT, State.COMMITTED}


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
    def channel(self) -> Line:
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

    def settle(self, transfer: TransferRecord) -> None:
        """The transfer may have ended: give its slot back if it has."""
        ...

    def post_abort(self, transfer: TransferRecord, reason: str) -> None:
        """Tell the agent that the transfer is given up."""
        ...


class TransferRecord:
    """One request's cache on its way, as far as it can be known without waiting."""

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
        self.unwanted = False
        """Whether whoever asked for it had given up when it came: nobody knows of it."""
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

    def abort(self, reason: str = "") -> None:
        """Give the transfer up. Idempotent, never blocks; the pages come back at FAILED.

        Nothing happens to one that is final, or whose agent is gone.

        Raises: ConfigError: a reason that is no text.
        """
        check_reason(reason)
        if self._aborted or self.poll() in FINAL:
            return
        self._aborted = True
        self._client.post_abort(self, reason)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(room={self.room}, state={self.poll().name})"

    # -- what the client calls -----------------------------------------------------------------
    def hear(self, outcome: Outcome) -> None:
        """Note what the agent says of a state, before the board shows it."""
        self.outcome = outcome
        self._heard.add(outcome.state)
        if outcome.prefix_tokens is not None:
            self._prefix_tokens = outcome.prefix_tokens

    def explained(self, state: State) -> bool:
        """Whether the agent's words about `state` have been read."""
        return state in self._heard

    # -- for those who derive ------------------------------------------------------------------
    def _look(self, word: int) -> State:
        """The state of a word that is not the last one seen."""
        if self.final is not None:
            return self.final
        if word >> 8 == self.sequence:
            self._seen = (word, _STATES[word & 0xFF])
        return self._seen[1]

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
        return Commit(outcome.length_bytes, outcome.runs, outcome.aux, outcome.lane)

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


class SendingRecord(TransferRecord):
    """Of a transfer out of this worker."""

    returned = RETURNED_AT_PREFILL
    _last_sent = False

    @property
    def prefix_tokens(self) -> int | None:
        """Tokens that decode has already and that are not sent; known from READY on, else None."""
        if self._prefix_tokens is None and self.poll() is not State.WAITING:
            self._client.channel.collect()
        return self._prefix_tokens

    def note_chunk(self, chunk: SendChunk | None) -> None:
        """A chunk, or none, has been given to the agent."""
        self._last_sent = chunk is not None and chunk.last

    def _check_last_not_sent(self) -> None:
        if self._last_sent:
            raise LocalProtocolError(f"room {self.room}: its last chunk has been sent")

    def _check_goes_on(self) -> None:
        state = self.poll()
        if state in _NOTHING_FOLLOWS:
            raise LocalProtocolError(f"room {self.room} is {state.name}: nothing can follow")


class ReceivingRecord(TransferRecord):
    """Of a transfer into this worker."""

    returned = RETURNED_AT_DECODE
    placed = False

    def _check_not_placed(self) -> None:
        if self.placed:
            raise LocalProtocolError(f"room {self.room}: its pages have been placed")


def check_until(until: State) -> None:
    """Raises: ConfigError unless the state can be waited for."""
    given: object = until
    if not isinstance(given, int) or (given not in _REACHED and given is not State.FAILED):
        raise ConfigError(
            f"until={until!r}: a transfer can be waited for until WAITING, READY, MOVING, "
            "SENT, COMMITTED or FAILED"
        )

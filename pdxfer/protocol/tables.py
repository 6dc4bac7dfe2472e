"""The two state tables: the only place where the state of a transfer changes.

`advance` looks an event up in a table; an event that the table does not list for the current state
is a `LocalProtocolError` that names role, state and event. The tables do not know time, peers or
lanes: the machines beside them decide which event happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from pdxfer.errors import LocalProtocolError
from pdxfer.protocol.state import State


class SendingEvent(Enum):
    """What can happen to the send of one room at one prefill worker."""

    READY = "every receiver has come and has placed pages"
    MOVING = "a chunk was handed to the lane"
    FLUSHED = "all bytes and commits have left; source pages are free"
    COMMITTED = "every decode worker has committed"
    FAILED_IDLE = "failed with no write in flight"
    FAILED_BUSY = "failed while writes may be in flight"
    DRAINED = "every path says: nothing unposted, nothing in flight"


class ReceivingEvent(Enum):
    """What can happen to the receive of one room at one decode worker."""

    READY = "every source worker has matched, and pages are placed"
    MOVING = "a source worker announced a chunk, or is the first of several to commit"
    COMMITTED = "every source worker that owes bytes has committed"
    FAILED_UNTOLD = "failed before any source worker knew a page"
    FAILED_TOLD = "failed while source workers know pages"
    UNPROVEN = "`FENCE_DEADLINE_S` passed without a proof from every sender"
    PROVEN = "a proof from every sender: nothing can land any more"


_W, _R, _M, _S = State.WAITING, State.READY, State.MOVING, State.SENT
_C, _FG, _Q, _F = State.COMMITTED, State.FENCING, State.QUARANTINED, State.FAILED

SENDING: Mapping[tuple[State, SendingEvent], State] = {
    (_W, SendingEvent.READY): _R,
    (_W, SendingEvent.FAILED_IDLE): _F,
    (_R, SendingEvent.MOVING): _M,
    (_R, SendingEvent.FAILED_IDLE): _F,
    (_M, SendingEvent.MOVING): _M,
    (_M, SendingEvent.FLUSHED): _S,
    (_M, SendingEvent.FAILED_IDLE): _F,
    (_M, SendingEvent.FAILED_BUSY): _FG,
    (_S, SendingEvent.COMMITTED): _C,
    (_S, SendingEvent.FAILED_IDLE): _F,
    (_FG, SendingEvent.DRAINED): _F,
}

RECEIVING: Mapping[tuple[State, ReceivingEvent], State] = {
    (_W, ReceivingEvent.READY): _R,
    (_W, ReceivingEvent.MOVING): _M,
    (_W, ReceivingEvent.COMMITTED): _C,
    (_W, ReceivingEvent.FAILED_UNTOLD): _F,
    (_W, ReceivingEvent.FAILED_TOLD): _FG,
    (_R, ReceivingEvent.MOVING): _M,
    (_R, ReceivingEvent.COMMITTED): _C,
    (_R, ReceivingEvent.FAILED_TOLD): _FG,
    (_M, ReceivingEvent.MOVING): _M,
    (_M, ReceivingEvent.COMMITTED): _C,
    (_M, ReceivingEvent.FAILED_TOLD): _FG,
    (_FG, ReceivingEvent.UNPROVEN): _Q,
    (_FG, ReceivingEvent.PROVEN): _F,
    (_Q, ReceivingEvent.PROVEN): _F,
}


def advance_sending(state: State, event: SendingEvent) -> State:
    """The next state of a send.

    Raises:
        LocalProtocolError: the table does not list `event` in `state`; nothing has changed.
    """
    try:
        return SENDING[state, event]
    except KeyError:
        raise _unlisted("send", state, event) from None


def advance_receiving(state: State, event: ReceivingEvent) -> State:
    """The next state of a receive.

    Raises:
        LocalProtocolError: the table does not list `event` in `state`; nothing has changed.
    """
    try:
        return RECEIVING[state, event]
    except KeyError:
        raise _unlisted("receive", state, event) from None


def _unlisted(role: str, state: State, event: Enum) -> LocalProtocolError:
    return LocalProtocolError(
        f"a {role} in state {state.name} cannot take the event {event.name} ({event.value})",
        fields={"state": state.name, "event": event.name},
    )

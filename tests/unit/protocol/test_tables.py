"""The state tables: what is listed works, what is not is a typed error."""

import itertools

import pytest

from pdxfer.errors import LocalProtocolError
from pdxfer.protocol.state import FINAL, RETURNED_AT_DECODE, RETURNED_AT_PREFILL, State
from pdxfer.protocol.tables import (
    RECEIVING,
    SENDING,
    ReceivingEvent,
    SendingEvent,
    advance_receiving,
    advance_sending,
)


@pytest.mark.parametrize(
    ("table", "events", "advance"),
    [(SENDING, SendingEvent, advance_sending), (RECEIVING, ReceivingEvent, advance_receiving)],
)
def test_every_pair_is_listed_or_a_typed_error(table, events, advance):
    for state, event in itertools.product(State, events):
        if (state, event) in table:
            assert advance(state, event) is table[state, event]
            continue
        with pytest.raises(LocalProtocolError) as caught:
            advance(state, event)
        assert state.name in str(caught.value)
        assert event.name in str(caught.value)


@pytest.mark.parametrize("table", [SENDING, RECEIVING])
def test_nothing_leaves_a_final_state(table):
    assert not {state for state, _ in table} & FINAL


def test_decode_pages_come_back_only_by_commit_or_proof():
    into_failed = {event for (state, event), to in RECEIVING.items() if to is State.FAILED}
    assert into_failed == {ReceivingEvent.FAILED_UNTOLD, ReceivingEvent.PROVEN}
    assert frozenset({State.COMMITTED, State.FAILED}) == RETURNED_AT_DECODE
    assert State.SENT in RETURNED_AT_PREFILL
    for state in (State.FENCING, State.QUARANTINED):
        assert state not in RETURNED_AT_DECODE | RETURNED_AT_PREFILL


@pytest.mark.parametrize("table", [SENDING, RECEIVING])
def test_every_state_reaches_a_final_one(table):
    for start in {state for state, _ in table}:
        seen, todo = set(), [start]
        while todo:
            state = todo.pop()
            if state not in seen:
                seen.add(state)
                todo += [to for (of, _), to in table.items() if of is state]
        assert seen & FINAL, start

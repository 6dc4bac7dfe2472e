"""Openings that nobody awaits any more, seen by a client of threads."""

import time

import pytest

from pdxfer.client import State
from pdxfer.client.decode import DecodeClient
from pdxfer.client.prefill import PrefillClient
from pdxfer.errors import ConfigError, DaemonUnavailableError, ResourceError, TransferError
from pdxfer.local.messages import AbortTransfer, OpenReceive, OpenSend, Refused, ReleaseSlot

PREFILL = "tcp://127.0.0.1:4711"


@pytest.fixture
def late(decode_agent, cache):
    """A client whose opening with pages was not answered in time, and that opening."""
    held = []
    decode_agent.on[OpenReceive] = lambda conn, message: held.append((conn, message))
    with DecodeClient(decode_agent.socket_path, cache, timeout_s=0.2) as client:
        with pytest.raises(DaemonUnavailableError, match="OpenReceive within"):
            client.receive(6, PREFILL, [1])
        decode_agent.next(OpenReceive)
        assert client.given_up == {6}
        yield client, held[0]


def test_its_pages_come_back_when_it_has_ended(decode_agent, late):
    client, opening = late
    decode_agent.run(decode_agent.answer_open, *opening)
    client.check_agent()
    abort = decode_agent.next(AbortTransfer)
    decode_agent.show(6, State.QUARANTINED, error=TransferError("x", fence="quarantined"))
    assert client.given_up == {6}
    decode_agent.show(6, State.FAILED, error=TransferError("x"))
    assert client.given_up == frozenset()
    assert client.finished() == []
    assert decode_agent.next(ReleaseSlot).transfer == abort.transfer


def test_a_refusal_gives_them_back(decode_agent, late):
    client, (conn, message) = late
    decode_agent.run(decode_agent.refuse, conn, message, ResourceError("full"))
    client.check_agent()
    assert client.given_up == frozenset()
    assert client.finished() == []


def test_a_transfer_refused_behind_its_opening_still_holds_them(decode_agent, late):
    client, (conn, message) = late

    def act():
        decode_agent.answer_open(conn, message)
        conn.send(Refused(request=message.request, **ConfigError("pages").to_wire()))

    decode_agent.run(act)
    client.check_agent()
    assert client.given_up == {6}
    decode_agent.show(6, State.FAILED, error=TransferError("x"))
    assert client.given_up == frozenset()


def test_the_agents_death_leaves_them_there(decode_agent, late):
    client, _ = late
    decode_agent.die()
    assert client.given_up == {6}
    with pytest.raises(DaemonUnavailableError):
        client.check_agent()
    assert client.given_up == {6}


def test_openings_without_pages_hold_none(prefill_agent, cache):
    prefill_agent.on[OpenSend] = lambda conn, message: None
    with PrefillClient(prefill_agent.socket_path, cache, timeout_s=0.2) as client:
        with pytest.raises(DaemonUnavailableError):
            client.open(1)
        assert client.given_up == frozenset()
        with pytest.raises(DaemonUnavailableError):
            client.send(2, [1])
        assert client.given_up == {2}


def test_polling_alone_brings_its_pages_back(decode_agent, late):
    client, opening = late
    decode_agent.run(decode_agent.answer_open, *opening)
    for _ in range(200):
        assert client.finished() == []
        assert client.given_up == {6}
        if decode_agent.count(AbortTransfer):
            break
        time.sleep(0.01)
    decode_agent.next(AbortTransfer)
    decode_agent.show(6, State.FAILED, error=TransferError("x"))
    assert client.given_up == frozenset()

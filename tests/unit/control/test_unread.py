"""A peer that sends and does not read costs a bounded amount of memory."""

from __future__ import annotations

import asyncio

import pytest

from pdxfer.control.peer import Callbacks, Peer
from pdxfer.control.session import Session
from pdxfer.limits import (
    CONTROL_RESEND_AFTER_S,
    CONTROL_RESEND_BURST_BYTES,
    CONTROL_UNACKED_S,
)
from pdxfer.wire.codec import decode
from pdxfer.wire.messages import Failed, Heartbeat, Hello, Matched
from tests.support.control import Link, Server, until

PREFILL, DECODE = b"p" * 16, b"d" * 16
HELLO = Hello(version=0, role="prefill")


def large(characters):
    return Failed(generation=1, source_worker=0, code="peer", text="x" * characters)


def session(now=0.0):
    return Session(PREFILL, DECODE, now, session=7)


@pytest.mark.parametrize("message", [HELLO, Heartbeat(), None])
def test_hello_repeated_by_a_peer_that_does_not_read_queues_nothing(message):
    async def scenario():
        callbacks = Callbacks(*(lambda *_: None for _ in range(3)), lambda _: Heartbeat())
        taken = []

        def transmit(frame):
            taken.append(frame)
            return is_read

        peer = Peer(
            asyncio.get_running_loop(),
            session(),
            callbacks,
            transmit=transmit,
            reachable=lambda: True,
            read=lambda: None,
            ended=lambda *_: None,
        )
        is_read = False
        for _ in range(100):
            peer.send(message)
        assert not peer.is_blocked
        peer.send(Matched(generation=1, source_worker=0))
        assert peer.is_blocked  # numbered: kept, in order, and bounded by the session
        taken.clear()
        peer.send(message)  # nothing overtakes what is queued
        assert taken == []
        is_read = True
        peer.flush()
        assert [decode(frame).number for frame in taken] == [1]
        peer.end("over")

    asyncio.run(scenario())


def test_what_is_sent_again_at_a_time_is_bounded_in_bytes():
    side = session()
    message = large(1 << 20)
    count = 2 * CONTROL_RESEND_BURST_BYTES // (1 << 20)
    for _ in range(count):
        side.wrap(message, 0.0)
    again = side.due(CONTROL_RESEND_AFTER_S)
    assert again
    assert sum(map(len, again)) <= CONTROL_RESEND_BURST_BYTES


def test_a_message_larger_than_a_burst_is_sent_again_by_itself(monkeypatch):
    monkeypatch.setattr("pdxfer.control.session.CONTROL_RESEND_BURST_BYTES", 10)
    side = session()
    frames = [side.wrap(Matched(generation=n, source_worker=0), 0.0) for n in (1, 2)]
    assert side.due(CONTROL_RESEND_AFTER_S) == frames[:1]


def test_a_peer_that_is_heard_and_acknowledges_nothing_is_given_up():
    side = session()
    assert side.stuck(1000.0) == ""
    side.wrap(Matched(generation=1, source_worker=0), 1000.0)
    assert side.stuck(1000.0 + CONTROL_UNACKED_S - 1) == ""
    assert "it does not read" in side.stuck(1000.0 + CONTROL_UNACKED_S)


def test_a_session_of_a_peer_that_does_not_read_ends(monkeypatch):
    monkeypatch.setattr("pdxfer.control.session.CONTROL_UNACKED_S", 0.5)
    monkeypatch.setattr("pdxfer.control.peer.HEARTBEAT_INTERVAL_S", 0.1)

    async def scenario():
        async with Server() as server, Link(server.address) as link:
            await link.control.ready(5)
            monkeypatch.setattr(Session, "_take_ack", lambda *_: None)
            server.control.send(link.incarnation, Matched(generation=1, source_worker=0))
            await until(lambda: "lost" in server.names)
            [reason] = [event[2] for event in server.events if event[0] == "lost"]
            assert "it does not read" in str(reason)

    asyncio.run(scenario())


def test_bytes_not_acknowledged_are_bounded_over_all_sessions_of_an_agent(monkeypatch):
    monkeypatch.setattr("pdxfer.control.server.CONTROL_UNACKED_BYTES_AGENT_MAX", 100_000)

    async def scenario():
        async with (
            Server() as server,
            Link(server.address) as one,
            Link(server.address) as two,
        ):
            await one.control.ready(5)
            await two.control.ready(5)
            for _ in range(3):  # no turn of the loop between them: nothing is acknowledged
                server.control.send(one.incarnation, large(30_000))
            server.control.send(two.incarnation, Matched(generation=1, source_worker=0))
            assert len(server.control.peers) == 2
            server.control.send(two.incarnation, large(20_000))
            await until(lambda: "lost" in server.names)
            [(peer, reason)] = [event[1:] for event in server.events if event[0] == "lost"]
            assert peer == one.incarnation
            assert "CONTROL_UNACKED_BYTES_AGENT_MAX" in str(reason)
            await until(lambda: server.control._backlog.length_bytes == 0)

    asyncio.run(scenario())

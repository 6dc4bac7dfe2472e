"""The control channel over real sockets, under asyncio and under uvloop."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
import uvloop
import zmq

from pdxfer.errors import (
    ConfigError,
    LayoutMismatchError,
    PeerError,
    RemoteProtocolError,
    ResourceError,
)
from pdxfer.limits import CONTROL_MESSAGE_BYTES_MAX, CONTROL_UNACKED_MESSAGES_MAX
from pdxfer.wire.messages import Failed, Heartbeat, Hello, Reject, StaleSession
from tests.support.control import Link, Proxy, RawPeer, Server, matched, until

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine to its end under one of the loops."""

    def call(coroutine):
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(coroutine, 60))

    return call


@pytest.fixture
def short_liveness(monkeypatch):
    """Silence ends a session after 0.6 s instead of 10."""
    for module in ("pdxfer.control.session", "pdxfer.control.peer"):
        monkeypatch.setattr(f"{module}.LIVENESS_TIMEOUT_S", 0.6)
    monkeypatch.setattr("pdxfer.control.peer.HEARTBEAT_INTERVAL_S", 0.1)


# -- messages --------------------------------------------------------------------------------
def test_both_ends_learn_of_each_other_and_exchange_messages_in_order(run):
    async def scenario():
        async with Server() as server, Link(server.address) as link:
            hello = await link.control.ready(5)
            assert hello == server.hello
            assert link.control.peer == server.incarnation
            assert server.control.peers == (link.incarnation,)
            for number in range(1, 301):
                link.control.send(matched(number))
                server.control.send(link.incarnation, matched(1000 + number))
            await until(lambda: len(server.messages) == len(link.messages) == 300)
            assert server.numbers == list(range(1, 301))
            assert link.numbers == list(range(1001, 1301))
            assert server.messages[0][0] == link.incarnation
            assert link.messages[0][0] == server.incarnation
            await until(lambda: not link.control.unacked)
            await until(lambda: not server.control.unacked(link.incarnation))
            await link.control.close()
            await until(lambda: server.names == ["session", "lost"])
            assert link.events == [("session", server.incarnation, server.hello)]

    run(scenario())


def test_heartbeats_carry_what_the_owner_says(run, short_liveness):
    async def scenario():
        beat = Heartbeat(oldest_live_generation=42)
        async with Server() as server, Link(server.address, heartbeat=lambda _: beat) as link:
            await until(lambda: beat in server.heartbeats)
            await until(lambda: Heartbeat() in link.heartbeats)
            await asyncio.sleep(1)  # beyond the liveness time: they keep the session alive
            assert server.names == link.names == ["session"]

    run(scenario())


class StallingReader:
    """An end in a thread of its own, whose loop stands still at its first message.

    Args:  make: the end. count: messages after which it closes.
    """

    def __init__(self, make, count):
        self.make, self.count = make, count
        self.end = None
        self.failure = None
        self.stalled, self.release = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._main, name="stalling-reader")
        self.thread.start()

    def _main(self):
        try:
            asyncio.run(self._work())
        except BaseException as error:  # noqa: BLE001 handed to the test
            self.failure = error

    async def _work(self):
        async with self.make() as end:
            end.hook = self._stall
            self.end = end
            await until(lambda: len(end.messages) == self.count, 40)

    def _stall(self, message):
        if not self.stalled.is_set():
            self.stalled.set()
            assert self.release.wait(20)

    async def finish(self):
        """Let it read; its end after all messages have come."""
        self.release.set()
        await until(lambda: not self.thread.is_alive(), 40)
        assert self.failure is None
        return self.end


STALL_S = 2.5
"""Several resend times."""


def test_a_link_that_stalls_loses_nothing(run):
    total = 4000

    async def scenario():
        async with Server() as server:
            reader = StallingReader(lambda: Link(server.address), total)
            await until(lambda: server.control.peers)
            (peer,) = server.control.peers
            for number in range(1, total + 1):
                server.control.send(peer, matched(number))
            await until(reader.stalled.is_set)
            await asyncio.sleep(STALL_S)
            assert server.control.unacked(peer) == total
            link = await reader.finish()
            assert link.numbers == list(range(1, total + 1))
            await until(lambda: server.names == ["session", "lost"])  # it has closed in order

    run(scenario())


def test_a_server_that_stalls_loses_nothing(run):
    total = 4000

    async def scenario():
        reader = StallingReader(Server, total)
        await until(lambda: reader.end is not None)
        async with Link(reader.end.address) as link:
            await link.control.ready(5)
            for number in range(1, total + 1):
                link.control.send(matched(number))
            await until(reader.stalled.is_set)
            await asyncio.sleep(STALL_S)
            server = await reader.finish()
            assert server.numbers == list(range(1, total + 1))

    run(scenario())


def test_what_a_full_queue_refuses_follows_in_order(run, monkeypatch):
    for direction in ("SEND", "RECEIVE"):
        name = f"pdxfer.control.socket.CONTROL_{direction}_QUEUE_MESSAGES"
        monkeypatch.setattr(name, 4)

    async def scenario():
        async with Server() as server, Link(server.address) as link:
            await link.control.ready(5)
            text = "x" * 200_000
            large = [
                Failed(generation=number, source_worker=0, code="peer", text=text)
                for number in range(1, 301)
            ]
            for message in large:
                server.control.send(link.incarnation, message)
                link.control.send(message)
            assert server.control._peers[link.incarnation].is_blocked
            assert link.control._peer.is_blocked
            await until(lambda: len(server.messages) == len(link.messages) == 300, 20)
            assert server.numbers == link.numbers == list(range(1, 301))

    run(scenario())


def test_too_much_unacknowledged_ends_the_session_and_says_so(run):
    async def scenario():
        async with Server() as server, Proxy(server.address) as proxy, Link(proxy.address) as link:
            await link.control.ready(5)
            proxy.stop()
            for number in range(CONTROL_UNACKED_MESSAGES_MAX + 1):
                server.control.send(link.incarnation, matched(number + 1))
            server.control.send(link.incarnation, matched(1))  # on_lost is on its way: no error
            await until(lambda: server.names == ["session", "lost"])
            assert "CONTROL_UNACKED_MESSAGES_MAX" in server.events[1][2]
            with pytest.raises(PeerError, match="no session"):
                server.control.send(link.incarnation, matched(1))
            proxy.go()
            await until(lambda: server.names == ["session", "lost", "session"])
            await until(lambda: link.names == ["session", "lost", "session"])

    run(scenario())


def test_a_message_too_large_is_refused_and_the_session_goes_on(run):
    async def scenario():
        async with Server() as server, Link(server.address) as link:
            await link.control.ready(5)
            huge = Reject(code="peer", text="x" * CONTROL_MESSAGE_BYTES_MAX)
            with pytest.raises(ResourceError, match="CONTROL_MESSAGE_BYTES_MAX"):
                link.control.send(huge)
            with pytest.raises(ResourceError):
                server.control.send(link.incarnation, huge)
            link.control.send(matched(1))
            await until(lambda: server.numbers == [1])

    run(scenario())


# -- connections and lives -------------------------------------------------------------------
def test_a_session_outlives_broken_connections(run):
    async def scenario():
        async with Server() as server, Proxy(server.address) as proxy, Link(proxy.address) as link:
            await link.control.ready(5)
            for number in range(1, 601):
                link.control.send(matched(number))
                server.control.send(link.incarnation, matched(number))
                if number % 200 == 100:
                    proxy.cut()
                await asyncio.sleep(0.002)
            await until(lambda: len(server.messages) == len(link.messages) == 600)
            assert server.numbers == link.numbers == list(range(1, 601))
            assert server.names == link.names == ["session"]
            assert proxy.connections >= 4

    run(scenario())


def test_silence_ends_the_session_on_both_sides_and_another_begins(run, short_liveness):
    async def scenario():
        async with Server() as server, Proxy(server.address) as proxy, Link(proxy.address) as link:
            await link.control.ready(5)
            proxy.stop()
            await until(lambda: server.names == link.names == ["session", "lost"])
            assert "no sign of the peer" in server.events[1][2]
            assert "no sign of the peer" in link.events[1][2]
            with pytest.raises(PeerError, match="no session"):
                link.control.send(matched(1))
            proxy.go()
            await until(lambda: server.names == link.names == ["session", "lost", "session"])
            link.control.send(matched(2))
            await until(lambda: server.numbers == [2])

    run(scenario())


def test_another_prefill_life_behind_the_address_is_noticed(run):
    async def scenario():
        async with Server() as old, Link(old.address) as link:
            await link.control.ready(5)
            link.control.send(matched(1))
            await until(lambda: old.numbers == [1])
            # no Bye: as if it had died
            old.control._peers.clear()
            await old.control.close()
            async with Server(old.address) as new:
                await until(lambda: link.names == ["session", "lost", "session"])
                assert [peer for _, peer, _ in link.events] == [
                    old.incarnation,
                    old.incarnation,
                    new.incarnation,
                ]
                assert "restarted" in link.events[1][2]
                link.control.send(matched(2))
                await until(lambda: new.numbers == [2])

    run(scenario())


def test_goodbye_is_told_with_its_reason(run):
    async def scenario():
        async with Server() as server:
            async with Link(server.address) as link:
                await link.control.ready(5)
                await link.control.close("worker stopped")
                await until(lambda: server.names == ["session", "lost"])
                assert server.events[1][2] == "the peer closed the session: worker stopped"
            async with Link(server.address) as link:
                await link.control.ready(5)
                await server.control.close("SIGTERM")
                await until(lambda: link.names == ["session", "lost"])
                assert link.events[1][2] == "the peer closed the session: SIGTERM"
                with pytest.raises(PeerError, match="nothing accepts connections"):
                    await link.control.ready(0.3)

    run(scenario())


def test_links_of_one_process_are_sessions_of_their_own(run):
    async def scenario():
        async with Server() as one, Server() as two:
            life = os.urandom(16)
            async with (
                Link(one.address, incarnation=life) as first,
                Link(two.address, incarnation=life) as second,
                Link(one.address) as third,
            ):
                for link in (first, second, third):
                    await link.control.ready(5)
                first.control.send(matched(1))
                second.control.send(matched(2))
                third.control.send(matched(3))
                await until(lambda: sorted(one.numbers) == [1, 3] and two.numbers == [2])
                assert set(one.control.peers) == {life, third.incarnation}

    run(scenario())


# -- refusals --------------------------------------------------------------------------------
def test_another_version_is_refused_by_name(run):
    async def scenario():
        async with Server() as server, Link(server.address, version=9) as link:
            with pytest.raises(PeerError, match="speaks 0, the decode agent speaks 9"):
                await link.control.ready(5)
            assert server.names == link.names == []
            async with Link(server.address) as good:
                await good.control.ready(5)
        async with Server(version=9) as server, Link(server.address) as link:
            with pytest.raises(PeerError, match="speaks 0, the prefill agent speaks 9"):
                await link.control.ready(5)
            await until(lambda: server.names == ["session", "lost"])
            assert link.names == []

    run(scenario())


def test_two_agents_of_one_role_are_refused(run):
    async def scenario():
        async with Server() as server, Link(server.address, role="prefill") as link:
            with pytest.raises(ConfigError, match="expected a decode agent"):
                await link.control.ready(5)

    run(scenario())


def test_more_sessions_than_the_limit_are_refused_for_now(run, monkeypatch):
    monkeypatch.setattr("pdxfer.control.server.CONTROL_SESSIONS_MAX", 1)

    async def scenario():
        async with Server() as server, Link(server.address) as first:
            await first.control.ready(5)
            async with Link(server.address) as second:
                with pytest.raises(ResourceError, match="CONTROL_SESSIONS_MAX") as raised:
                    await second.control.ready(5)
                assert raised.value.retryable
                await first.control.close()
                await until(lambda: not server.control.peers)
                await second.control.ready(5)

    run(scenario())


def test_an_owner_can_refuse_a_session_with_its_own_error(run):
    async def scenario():
        error = LayoutMismatchError("no lane in common", fields={"lanes": "prefill=a, decode=b"})
        async with Server() as server:
            server.refusal = error
            async with Link(server.address) as link:
                with pytest.raises(LayoutMismatchError, match="no lane in common") as raised:
                    await link.control.ready(5)
                assert raised.value.fields == error.fields
                assert server.control.peers == ()
                server.refusal = None
                await link.control.ready(5)  # asks anew at once
                assert link.names == ["session"]

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RemoteProtocolError("decode may not send Matched"), "decode may not send Matched"),
        (ZeroDivisionError("a bug"), "internal error of the peer"),
    ],
)
def test_what_the_owner_raises_ends_that_session_only(run, failure, expected, caplog):
    async def scenario():
        async with Server() as server, Link(server.address) as link, Link(server.address) as other:
            await link.control.ready(5)
            await other.control.ready(5)

            def fail(message):
                if message == matched(13):
                    raise failure

            server.hook = fail
            link.control.send(matched(13))
            await until(lambda: "lost" in server.names and "lost" in link.names)
            assert expected in link.events[1][2]
            assert link.messages == []
            other.control.send(matched(2))
            await until(lambda: server.numbers[-1] == 2)
            assert other.names == ["session"]

    run(scenario())
    assert ("a bug" in caplog.text) == isinstance(failure, ZeroDivisionError)


@pytest.mark.parametrize("side", ["server", "link"])
def test_a_bug_in_on_session_ends_that_session_only(run, side, caplog):
    async def scenario():
        async with Server() as server, Link(server.address) as link:
            failing = server if side == "server" else link
            failing.refusal = ZeroDivisionError("a bug")
            with pytest.raises(PeerError, match="internal error of the peer"):
                await link.control.ready(5)
            failing.refusal = None
            await link.control.ready(5)

    run(scenario())
    assert "a bug" in caplog.text


def test_junk_does_no_harm(run):
    async def scenario():
        async with Server() as server, Link(server.address) as link:
            await link.control.ready(5)
            for routing_id in (b"", b"X" * 17, b"P" + b"short"):
                with RawPeer(server.address, routing_id=routing_id) as junk:
                    junk.socket.send(b"\xff" * 100)
                    junk.send(server.incarnation, matched(1), number=1)
                    await asyncio.sleep(0.05)
            with RawPeer(server.address) as known:
                for data in (b"", b"\xc1", b"\x80", os.urandom(5000), b"\xdd\xff\xff\xff\xff"):
                    known.socket.send(data)
                known.socket.send_multipart([b"two", b"frames"])
                known.send(b"", Hello(version=0, role="decode"), source=os.urandom(16))
                link.control.send(matched(1))
                await until(lambda: server.numbers == [1])
                assert server.names == ["session"]
                known.hello()
                await known.receive(Hello)
                known.socket.send(b"\xc1")
                assert "not valid msgpack" in (await known.receive(Reject)).message.text
                await until(lambda: server.names == ["session", "session", "lost"])

    run(scenario())


def test_a_message_for_another_life_is_answered_and_not_acted_on(run):
    async def scenario():
        async with Server() as server:
            with RawPeer(server.address) as raw:
                raw.send(server.incarnation, matched(1), number=1)  # no Hello yet
                assert (await raw.receive(StaleSession)).message.incarnation == server.incarnation
                raw.hello(session=5)
                await raw.receive(Hello)
                raw.send(os.urandom(16), matched(2), session=5, number=1)
                stale = await raw.receive(StaleSession)
                assert (stale.session, stale.destination) == (5, raw.incarnation)
                raw.send(server.incarnation, matched(3), session=4, number=1)
                assert (await raw.receive(StaleSession)).session == 4
                raw.hello(session=4)
                assert (await raw.receive(StaleSession)).session == 4
                raw.send(server.incarnation, matched(4), session=5, number=1)
                await until(lambda: server.numbers == [4])
                assert server.names == ["session"]
                raw.hello(session=6)
                await until(lambda: server.names == ["session", "lost", "session"])

    run(scenario())


def test_a_repeated_hello_is_answered_again_and_is_no_new_session(run):
    async def scenario():
        async with Server() as server:
            with RawPeer(server.address) as raw:
                for _ in range(3):
                    raw.hello()
                    assert (await raw.receive(Hello)).destination == raw.incarnation
                assert server.names == ["session"]

    run(scenario())


def test_nobody_there_is_said_within_the_time_asked_for(run):
    async def scenario():
        async with Link("tcp://127.0.0.1:9") as link:
            begun = time.monotonic()
            with pytest.raises(
                PeerError, match=r"127\.0\.0\.1:9 did not answer within 0\.4 s"
            ) as raised:
                await link.control.ready(0.4)
            assert raised.value.retryable
            assert time.monotonic() - begun < 2

    run(scenario())


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://host", "ipc://x", "tcp://host:99999"])
def test_malformed_addresses_are_refused(run, address):
    async def scenario():
        with pytest.raises(ConfigError, match="tcp://host:port"):
            await Link(address).control.start()
        with pytest.raises(ConfigError, match="tcp://host:port"):
            await Server(address).control.start()

    run(scenario())


def test_a_host_without_address_is_refused(run):
    async def scenario():
        with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
            await Link("tcp://no-such-host.invalid:1").control.start()

    run(scenario())


def test_a_port_in_use_is_refused_and_can_be_bound_later(run):
    async def scenario():
        async with Server() as server:
            second = Server(server.address)
            with pytest.raises(ResourceError, match="in use"):
                await second.control.start()
        async with Server(server.address):
            pass

    run(scenario())


def test_an_ipv6_address_serves(run):
    async def scenario():
        async with Server("tcp://[::1]:0") as server, Link(server.address) as link:
            assert server.address.startswith("tcp://[::1]:")
            await link.control.ready(5)

    run(scenario())


def test_limits_are_set_on_both_sockets(run):
    async def scenario():
        async with Server() as server, Link(server.address) as link:
            dealer = link.control._connection._socket
            for socket in (server.control._socket, dealer):
                assert socket.getsockopt(zmq.SNDHWM) == 16_384
                assert socket.getsockopt(zmq.RCVHWM) == 16_384
                assert socket.getsockopt(zmq.MAXMSGSIZE) == CONTROL_MESSAGE_BYTES_MAX
                assert socket.getsockopt(zmq.LINGER) == 1_000
                assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 1_000
                assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 5_000
            assert dealer.getsockopt(zmq.ROUTING_ID) == b"P" + link.incarnation

    run(scenario())

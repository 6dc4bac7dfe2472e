"""Who may speak on the control channel: CURVE keys, the allow-list, open addresses."""

from __future__ import annotations

import asyncio
import os

import pytest
import uvloop

from pdxfer.control.keys import generate, load_client_keys, load_server_keys
from pdxfer.errors import ConfigError, PeerError
from pdxfer.wire.messages import Hello
from tests.support.control import Link, RawPeer, Server, matched, until

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine to its end under one of the loops."""

    def call(coroutine):
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(coroutine, 60))

    return call


class Keys:
    """A server pair, two clients that may connect, one that may not."""

    def __init__(self, directory):
        self.directory = directory
        self.allowed = directory / "allowed"
        self.allowed.mkdir()
        self.server_secret, self.server_public = generate(directory, "prefill")
        self.server = load_server_keys(self.server_secret, self.allowed)
        self.one = self.client("one", allow=True)
        self.two = self.client("two", allow=True)
        self.stranger = self.client("stranger", allow=False)

    def client(self, name, *, allow):
        secret, public = generate(self.directory, name)
        if allow:
            self.allow(public)
        return load_client_keys(secret, self.server_public)

    def allow(self, public):
        (self.allowed / public.name).write_bytes(public.read_bytes())


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


def test_allowed_clients_talk(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as server:
            async with (
                Link(server.address, keys=keys.one) as one,
                Link(server.address, keys=keys.two) as two,
            ):
                await one.control.ready(5)
                await two.control.ready(5)
                one.control.send(matched(1))
                two.control.send(matched(2))
                await until(lambda: sorted(server.numbers) == [1, 2])

    run(scenario())


def test_a_key_that_is_not_allowed_is_refused_by_name_and_harms_nobody(run, keys, caplog):
    async def scenario():
        async with Server(keys=keys.server) as server:
            async with Link(server.address, keys=keys.stranger) as link:
                with pytest.raises(ConfigError) as raised:
                    await link.control.ready(5)
                text = str(raised.value)
                assert f"CURVE handshake refused by {server.address}" in text
                assert keys.stranger.pair.public.decode() in text
                assert "allow-list" in text
            assert server.names == []
            async with Link(server.address, keys=keys.one) as good:
                await good.control.ready(5)

    run(scenario())
    assert "client_refused" in caplog.text


def test_a_client_added_to_the_list_connects_without_a_restart(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as server:
            async with Link(server.address, keys=keys.stranger) as link:
                with pytest.raises(ConfigError):
                    await link.control.ready(5)
                keys.allow(keys.directory / "stranger.pub")
                async with asyncio.timeout(10):
                    while True:
                        try:
                            await link.control.ready(5)
                        except ConfigError:
                            await asyncio.sleep(0.1)
                        else:
                            break

    run(scenario())


def test_a_client_without_keys_is_refused_and_told(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as server:
            async with Link(server.address) as link:
                with pytest.raises(PeerError, match=r"handshake refused by .*may require keys"):
                    await link.control.ready(1)
            async with Link(server.address, keys=keys.one) as good:
                await good.control.ready(5)

    run(scenario())


def test_a_client_with_keys_at_a_server_without_is_told(run, keys):
    async def scenario():
        async with Server() as server:
            async with Link(server.address, keys=keys.one) as link:
                with pytest.raises(
                    PeerError, match=r"CURVE handshake refused by .*use keys at all"
                ):
                    await link.control.ready(1)

    run(scenario())


def test_another_server_key_than_expected_is_told(run, keys):
    async def scenario():
        other = load_client_keys(keys.directory / "one.key", keys.directory / "two.pub")
        async with Server(keys=keys.server) as server:
            async with Link(server.address, keys=other) as link:
                with pytest.raises(
                    PeerError, match=r"CURVE handshake refused by .*server public key"
                ):
                    await link.control.ready(1)
            async with Link(server.address, keys=keys.one) as good:
                await good.control.ready(5)

    run(scenario())


def test_a_routing_id_belongs_to_the_key_it_first_came_with(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as server:
            async with Link(server.address, keys=keys.one) as link:
                await link.control.ready(5)
                link.control.send(matched(1))
                await until(lambda: server.numbers == [1])
                with RawPeer(server.address, incarnation=link.incarnation, keys=keys.two) as thief:
                    thief.hello(session=10**9)
                    thief.send(server.incarnation, matched(66), session=10**9, number=1)
                    await asyncio.sleep(0.5)
                link.control.send(matched(2))
                await until(lambda: server.numbers == [1, 2])
                server.control.send(link.incarnation, matched(3))
                await until(lambda: link.numbers == [3])
                assert server.names == link.names == ["session"]

    run(scenario())


def test_the_oldest_idle_binding_of_a_key_is_forgotten_first(run, keys, monkeypatch):
    monkeypatch.setattr("pdxfer.control.admission.CONTROL_BOUND_KEYS_MAX", 2)

    async def scenario():
        async with Server(keys=keys.server) as server:
            async with Link(server.address, keys=keys.one) as kept:
                await kept.control.ready(5)
                for _ in range(3):
                    async with Link(server.address, keys=keys.two) as link:
                        await link.control.ready(5)
                assert len(server.control._admission) == 2
                assert kept.incarnation in server.control._admission

    run(scenario())


def test_a_stranger_with_keys_of_its_own_gets_no_answer(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as server:
            with RawPeer(server.address, keys=keys.stranger) as raw:
                raw.hello()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await raw.receive(Hello)
            assert server.names == []

    run(scenario())


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_an_address_open_to_others_needs_keys(run, keys, bind):
    async def scenario():
        with pytest.raises(ConfigError) as raised:
            await Server(bind).control.start()
        assert "--insecure" in str(raised.value)
        assert "pdxfer keygen" in str(raised.value)
        assert bind in str(raised.value)
        async with Server(bind, keys=keys.server) as server:
            assert "*" not in server.address
            assert "0.0.0.0" not in server.address
            async with Link(server.address, keys=keys.one) as link:
                await link.control.ready(5)

    run(scenario())


def test_insecure_is_said_aloud_and_serves(run):
    async def scenario():
        async with Server("tcp://0.0.0.0:0", insecure=True) as server:
            async with Link(server.address) as link:
                await link.control.ready(5)

    run(scenario())


def test_the_address_told_can_be_chosen(run):
    async def scenario():
        async with Server(
            "tcp://0.0.0.0:0", insecure=True, advertise_host="prefill.example"
        ) as server:
            host, _, port = server.address.rpartition(":")
            assert host == "tcp://prefill.example"
            assert int(port) > 0

    run(scenario())


def test_two_secured_servers_live_in_one_process(run, keys):
    async def scenario():
        async with Server(keys=keys.server) as one, Server(keys=keys.server) as two:
            async with (
                Link(one.address, keys=keys.one, incarnation=os.urandom(16)) as first,
                Link(two.address, keys=keys.two) as second,
            ):
                await first.control.ready(5)
                await second.control.ready(5)

    run(scenario())


def test_a_key_taken_away_ends_its_live_session_and_begins_no_other(run, keys, monkeypatch):
    monkeypatch.setattr("pdxfer.control.server.CONTROL_KEYS_CHECK_S", 0.05)
    monkeypatch.setattr("pdxfer.control.link.CONTROL_REFUSED_RETRY_S", 0.1)

    async def scenario():
        async with Server(keys=keys.server) as server:
            async with (
                Link(server.address, keys=keys.one) as gone,
                Link(server.address, keys=keys.two) as kept,
            ):
                await gone.control.ready(5)
                await kept.control.ready(5)
                (keys.allowed / "one.pub").unlink()
                await until(lambda: gone.names == ["session", "lost"])
                await until(lambda: "lost" in server.names)
                # its connection lives on; a new session over it is refused, with the reason
                with pytest.raises(ConfigError, match="may not talk to this prefill agent") as told:
                    await gone.control.ready(5)
                assert told.value.fields == {"key": keys.one.pair.public.decode()}
                kept.control.send(matched(1))
                await until(lambda: server.numbers == [1])
                assert kept.names == ["session"]
                keys.allow(keys.directory / "one.pub")
                await until(lambda: gone.names == ["session", "lost", "session"])

    run(scenario())


def test_an_allow_list_that_cannot_be_read_ends_sessions_only_after_a_while(run, keys, monkeypatch):
    monkeypatch.setattr("pdxfer.control.server.CONTROL_KEYS_CHECK_S", 0.05)
    monkeypatch.setattr("pdxfer.control.admission.CONTROL_KEYS_UNREADABLE_S", 3600)

    async def scenario():
        async with (
            Server(keys=keys.server) as server,
            Link(server.address, keys=keys.one) as link,
        ):
            await link.control.ready(5)
            (keys.allowed / "broken.pub").write_text("half a li")
            await until(lambda: server.control._admission._unreadable_since is not None)
            link.control.send(matched(1))
            await until(lambda: server.numbers == [1])
            assert link.names == ["session"]
            monkeypatch.setattr("pdxfer.control.admission.CONTROL_KEYS_UNREADABLE_S", 0)
            await until(lambda: link.names == ["session", "lost"])

    run(scenario())

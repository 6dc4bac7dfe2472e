"""Real agents and clients over the in-memory lane, which breaks where the test says so."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pdxfer.client import AsyncDecodeClient, State
from pdxfer.errors import PdxferError, PeerError, ResourceError
from pdxfer.protocol.effects import Announce
from pdxfer.wire.messages import LaneFailed
from tests.support.agents import WAIT_S, Both, begin, cross, until
from tests.support.caches import SeededCache, small_token_major


class Broken:
    """A lane that cannot be had."""

    def __call__(self, lane):
        raise ResourceError(f"lane {lane} is broken here")


@pytest.mark.parametrize("late_runs", [0, 1, 100])
async def test_a_broken_lane_revokes_and_is_attached_anew(tmp_path, late_runs):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        sending, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        for _ in range(3):
            both.hub.step(both.rng)
        both.path.fail("cut", late_runs=late_runs)
        with pytest.raises(PdxferError) as raised:
            await receiving.wait(WAIT_S)
        assert raised.value.retryable
        assert receiving.poll() is State.FAILED, "closing the receive side proves it, time does not"
        assert receiving.pages_returned
        left = destination.snapshot()
        with pytest.raises(PdxferError):
            await sending.wait(WAIT_S)
        async with both.moving():
            await asyncio.sleep(0.1)
        for region, part in zip(destination.regions, left, strict=True):
            assert np.array_equal(region, part), "nothing lands after the pages came back"
        await cross(both, sender, reader, source, destination, 3)


async def test_without_a_proof_pages_stay_quarantined_and_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.limits.FENCE_DEADLINE_S", 0.5)
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        sending, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        both.path.fail("cut", late_runs=3)
        with pytest.raises(PdxferError) as raised:
            await receiving.wait(WAIT_S)
        assert raised.value.retryable
        await until(lambda: receiving.poll() is State.QUARANTINED)
        assert not receiving.pages_returned
        with pytest.raises(PdxferError):
            await sending.wait(WAIT_S)
        other = np.array([50, 51])
        async with both.moving():
            again = await reader.receive(3, sender.addresses, other, tokens=32)
            await sender.send(3, [1, 2], tokens=32)
            await again.wait(WAIT_S)
        assert receiving.poll() is State.QUARANTINED


async def test_a_lane_into_processes_is_not_opened_to_a_peer_that_has_not_proven_the_host(tmp_path):
    """Whatever decode says of itself and of its lane address, prefill looks for its own proof."""
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, source, destination):
        decode = both.agents["decode"]
        honest, decode.neighbours.meet = decode.neighbours.meet, lambda peer, hello, done: done("")
        with pytest.raises(PeerError, match=r"no lane left .* has not proven to be one"):
            await reader.connect(sender.addresses, timeout_s=WAIT_S)
        assert both.fabrics["prefill"].paths == {}
        decode.neighbours.meet = honest
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)


async def test_an_agent_that_closes_in_order_leaves_no_page_quarantined(tmp_path):
    """Its process lives on, as that of a worker with an embedded agent: its word is the proof."""
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        _, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        both.hub.step(both.rng)
        await both.agents["prefill"].stop("the test says so")
        with pytest.raises(PdxferError):
            await receiving.wait(WAIT_S)
        await until(lambda: receiving.poll() is State.FAILED)
        assert receiving.error.fields["fence"] == "drained"


async def test_a_lane_that_prefill_cannot_have_gives_way_to_the_next(tmp_path):
    both = Both(tmp_path, ("broken", "inproc"), at_prefill=Broken())
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)


async def test_without_a_lane_left_the_reason_is_told_and_the_agents_go_on(tmp_path):
    both = Both(tmp_path, ("inproc",))
    prefill = both.agents["prefill"]
    async with both.workers() as (sender, reader, _, _):

        def refuse(*_):
            raise ResourceError("no such wire")

        both.fabrics["prefill"].connect = refuse
        with pytest.raises(PeerError, match=r"no lane left .* no such wire"):
            await reader.connect(sender.addresses, timeout_s=WAIT_S)
        with pytest.raises(PdxferError, match="no lane left"):
            await (await reader.receive(7, sender.addresses, [5], tokens=16)).wait(WAIT_S)
        prefill.lane_work.do(Announce(both.agents["decode"].incarnation))
        both.agents["decode"].machine._announce()
        both.agents["decode"].pump()
        with pytest.raises(PdxferError, match="no lane left"):
            await reader.connect(sender.addresses, timeout_s=WAIT_S)


async def test_an_effect_that_cannot_be_carried_out_does_not_take_others_along(tmp_path, caplog):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        agent = both.agents["prefill"]
        do = agent.lane_work.do
        failing = iter([True])

        def once(effect):
            if next(failing, False):
                raise RuntimeError("a fault of this program")
            do(effect)

        agent.lane_work.do = once
        agent.machine.detach(99, "nobody")
        agent._log_lines.append({"worker": 0, "state": "seeded"})
        for _ in range(2):
            agent.machine._sends.effects += [object()]
        agent.pump()
        assert sum(record.message == "effect_failed" for record in caplog.records) == 2
        agent.lane_work.do = do
        await cross(both, sender, reader, source, destination, 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_event_that_cannot_be_dealt_with_does_not_take_others_along(
    tmp_path, caplog, role
):
    """A lane tells its events once: those behind a fault are ends and proofs of other transfers."""
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        fabric, take = both.fabrics[role], both.fabrics[role].take_events
        fabric.take_events = lambda: [event for each in take() for event in (None, each)]
        agent = both.agents[role]
        on_fabric = agent.on_fabric

        def fail_at_none(lane, event):
            if event is None:
                raise RuntimeError("a fault of this program")
            on_fabric(lane, event)

        agent.on_fabric = fail_at_none
        await cross(both, sender, reader, source, destination, 2)
        assert any(record.message == "event_failed" for record in caplog.records)


async def test_a_lost_session_closes_its_receive_side_and_the_next_one_serves(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        sending, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        prefill, decode = both.agents["prefill"], both.agents["decode"]
        decode._end_session(prefill.incarnation, ResourceError("it is too large to be told"))
        with pytest.raises(PeerError, match="too large to be told"):
            await receiving.wait(WAIT_S)
        assert receiving.pages_returned, "on this lane the end of the receive side is a proof"
        with pytest.raises(PdxferError):
            await sending.wait(WAIT_S)
        await until(lambda: decode.machine.peers)
        await cross(both, sender, reader, source, destination, 3)


async def test_a_message_that_cannot_be_told_ends_the_session_at_prefill_too(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        prefill, decode = both.agents["prefill"], both.agents["decode"]
        lost = []
        leave = decode._leave
        decode._leave = lambda peer, reason: (lost.append(reason), leave(peer, reason))
        prefill._end_session(decode.incarnation, ResourceError("it is too large to be told"))
        await until(lambda: lost)
        assert lost == ["the peer refused the session: it is too large to be told"]
        await until(lambda: decode.machine.peers)
        await cross(both, sender, reader, source, destination, 2)


async def test_an_address_that_nobody_answers_is_called_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.limits.LINK_IDLE_S", 0.3)
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        decode = both.agents["decode"]
        nobody = "tcp://127.0.0.1:9"
        waiting = await reader.receive(2, nobody, [5], tokens=16, deadline_s=0.8)
        assert len(decode._links) == 2
        await asyncio.sleep(0.5)
        assert len(decode._links) == 2, "a room waits for it"
        with pytest.raises(PeerError):
            await waiting.wait(WAIT_S)
        await until(lambda: len(decode._links) == 1)
        assert nobody not in decode.machine.sources.links
        await cross(both, sender, reader, source, destination, 3)


async def test_no_commit_leaves_where_the_writes_could_not_be_posted(tmp_path):
    both = Both(tmp_path)
    both.hub.automatic = True
    async with both.workers() as (sender, reader, source, destination):
        await reader.connect(sender.addresses, timeout_s=WAIT_S)

        def refuse(*_):
            raise ResourceError("no memory to register")

        fabric = both.fabrics["prefill"]
        register, fabric.register = fabric.register, refuse
        for room in range(1, 11):
            sending, receiving = await begin(sender, reader, room)
            with pytest.raises(PdxferError, match="no memory to register"):
                await receiving.wait(WAIT_S)
            await until(lambda a=sending, b=receiving: a.pages_returned and b.pages_returned)
        fabric.register = register
        await cross(both, sender, reader, source, destination, 11)


async def test_a_lane_that_fails_twice_is_tried_again(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        fabric = both.fabrics["prefill"]
        connect = fabric.connect

        def once(*_):
            fabric.connect = connect
            raise ResourceError("down for a moment")

        fabric.connect = once
        both.path.fail("cut")
        decode = both.agents["decode"].incarnation
        await until(lambda: fabric.connect == connect and decode in fabric.paths)
        await cross(both, sender, reader, source, destination, 2)


async def test_what_an_earlier_receive_side_suffered_does_not_end_the_next(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        prefill, decode = both.agents["prefill"], both.agents["decode"]
        life = prefill.incarnation
        first = decode._receiver._sides[life].since
        both.path.fail("cut")
        await until(lambda: decode._receiver._sides[life].since > first)
        lane = decode._receiver._sides[life]
        control = decode.machine.peers[life].address
        stale = LaneFailed(revision=first, lane="inproc", text="nobody at the old address")
        decode._on_peer_message(control, life, stale)
        assert decode._receiver._sides[life] is lane
        assert lane.lane == "inproc"
        await cross(both, sender, reader, source, destination, 2)


async def test_a_worker_whose_memory_the_lane_cannot_have_is_refused_alone(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        fabric, socket = both.fabrics["decode"], both.agents["decode"].config.socket_path
        register, left = fabric.register, len(fabric._regions)

        def refuse(address, length_bytes, owner):
            if len(fabric._regions) > left:
                raise ResourceError("no memory to register")
            return register(address, length_bytes, owner)

        fabric.register = refuse
        other = SeededCache(small_token_major(), 3)
        async with AsyncDecodeClient(socket, other, instance="other") as barred:
            with pytest.raises(ResourceError, match="no memory to register"):
                await barred.connect(sender.addresses, timeout_s=WAIT_S)
            with pytest.raises(ResourceError, match="no memory to register"):
                await (await barred.receive(7, sender.addresses, [5], tokens=16)).wait(WAIT_S)
            assert len(fabric._regions) == left, "what was registered of it is given back"
            await cross(both, sender, reader, source, destination, 2)
        await cross(both, sender, reader, source, destination, 3)


async def test_a_lane_that_decode_cannot_have_gives_way_to_the_next(tmp_path):
    both = Both(tmp_path, ("broken", "inproc"))
    decode = both.agents["decode"]
    make = decode.lanes._make

    def refuse(lane):
        if lane == "broken":
            raise ResourceError("lane broken is broken here")
        return make(lane)

    decode.lanes._make = refuse
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)


async def test_addresses_that_nobody_answers_do_not_block_a_good_one(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.limits.LINKS_PER_AGENT_MAX", 3)
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        for port in range(20_000, 20_006):
            with pytest.raises(PeerError):
                await reader.connect(f"tcp://127.0.0.1:{port}", timeout_s=0.05)
        assert len(both.agents["decode"]._links) == 3
        waiting = [
            await reader.receive(room, f"tcp://127.0.0.1:{room}", [room], tokens=16, deadline_s=1.0)
            for room in (20, 21, 22)
        ]
        with pytest.raises(ResourceError, match="3 prefill addresses are in use, at most 3"):
            await reader.connect(sender.addresses, timeout_s=WAIT_S)
        for each in waiting:
            with pytest.raises(PeerError):
                await each.wait(WAIT_S)
        await cross(both, sender, reader, source, destination, 1)


async def test_a_link_without_a_socket_says_so_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.control.socket.CONTROL_SOCKETS_MAX", 4)
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        nobody = "tcp://127.0.0.1:20000"
        with pytest.raises(ResourceError, match=f"no socket for the link to {nobody}"):
            await reader.connect(nobody, timeout_s=WAIT_S)
        assert both.agents["decode"]._links.get(nobody) is None
        assert nobody not in both.agents["decode"].machine.sources.links
        await cross(both, sender, reader, source, destination, 2)


async def test_the_first_link_without_a_socket_leaves_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.control.socket.CONTROL_SOCKETS_MAX", 2)
    both = Both(tmp_path)
    async with both.workers() as (_, reader, _, _):
        with pytest.raises(ResourceError, match="no socket for the link to"):
            await reader.connect("tcp://127.0.0.1:2000", timeout_s=WAIT_S)

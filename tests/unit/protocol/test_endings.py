"""How transfers with several parties end: everyone hears of it, nobody is called drained too early,
and no ended transfer holds up those that come after."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import LayoutMismatchError, PeerError, RemoteProtocolError
from pdxfer.layout import Rank
from pdxfer.protocol.effects import Post, Tell
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Abort, Drained, Failed, Heartbeat, Receive
from tests.support.cluster import Cluster, full
from tests.support.transfers import (
    PAGE,
    layout,
    one_to_two_agents,
    open_room,
    pair,
    part,
    receive,
    send,
    two_to_one,
)

SEEDS = range(8)


@pytest.mark.parametrize("how", ["abort", "goodbye", "new session"])
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_when_one_receiver_leaves_the_others_of_the_send_hear_of_it(seed, sent, how):
    cluster, prefill, decodes = one_to_two_agents(seed)
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    if sent:
        send(prefill, last=False)
        for _ in range(seed):
            cluster.step()
    leaver, other = decodes
    if how == "abort":
        leaver.machine.abort(0, 0, "enough", cluster.now)
        leaver.pump()
    elif how == "goodbye":
        prefill.machine.peer_lost(leaver.machine.incarnation, "goodbye")
        prefill.pump()
    else:
        prefill.machine.peer_joined(leaver.machine.incarnation)
        prefill.pump()
    cluster.run()
    assert prefill.shown[0, 0].state is State.FAILED
    assert other.shown[1, 0].state is State.FAILED, "it would wait for the rest for ever"
    assert other.shown[1, 0].last.fence == "drained"
    assert not other.machine.live


def test_a_receiver_is_told_the_reason_once_and_not_its_own():
    cluster, prefill, decodes = one_to_two_agents(0)
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    leaver, other = (decode.machine.incarnation for decode in decodes)
    prefill.machine.on_message(leaver, Abort(generation=1, reason="enough"), cluster.now)
    told = [(e.peer, type(e.message)) for e in prefill.machine.take_effects() if type(e) is Tell]
    assert set(told) == {(leaver, Drained), (other, Failed)}
    assert len(told) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_drained_waits_for_every_source_worker_of_the_agent(seed):
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode()
    for tp in range(2):
        prefill.attach(tp, *part(tp))
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    for tp in range(2):
        open_room(cluster, prefill, tp)
    cluster.run()
    for tp in range(2):
        send(prefill, tp)
    assert cluster.hub.ready()
    life, generation = decode.machine.incarnation, 1
    again = Receive(
        room=9,
        generation=generation,
        source_worker=5,
        destination_worker=0,
        receiver_index=0,
        receiver_count=1,
    )
    for _ in range(2):  # of a worker that is not there, then of a generation with a tombstone
        prefill.machine.on_message(life, again, cluster.now)
    effects = prefill.machine.take_effects()
    told = [e.message for e in effects if isinstance(e, Tell)]
    assert not [message for message in told if isinstance(message, Drained)]
    for effect in effects:
        prefill.do(effect)
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert [prefill.shown[tp, 0].state for tp in range(2)] == [State.FAILED] * 2
    last = decode.memory[0][0].copy()
    cluster.pass_time(5)
    assert np.array_equal(last, decode.memory[0][0])


def test_a_generation_below_the_mark_is_drained_only_without_legs_and_broken_paths():
    cluster, prefill, (decode, _) = one_to_two_agents(0)
    receive(cluster, decode, 0)
    open_room(cluster, prefill)
    cluster.run()
    life = decode.machine.incarnation
    again = Receive(
        room=7,
        generation=1,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=2,
    )

    def told():
        prefill.machine.on_message(life, again, cluster.now)
        effects = prefill.machine.take_effects()
        return [type(e.message) for e in effects if isinstance(e, Tell)]

    prefill.machine.on_message(life, Heartbeat(oldest_live_generation=2), cluster.now)
    assert told() == []
    peer = prefill.machine.peers[life]
    legs, peer.legs = peer.legs, {}
    peer.unproven.add(1)
    assert told() == []
    peer.unproven.clear()
    assert told() == [Drained]
    peer.legs = legs


@pytest.mark.parametrize("seed", SEEDS)
def test_a_half_matched_receive_ends_at_its_deadline_though_bytes_move(seed):
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode()
    for tp in range(2):
        prefill.attach(tp, *part(tp))
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode, wait_s=5)
    open_room(cluster, prefill, 0)
    send(prefill, 0)
    cluster.run()
    assert decode.shown[0, 0].state is State.MOVING
    cluster.pass_time(6)
    error = decode.shown[0, 0].last.error
    assert decode.shown[0, 0].state is State.FAILED
    assert isinstance(error, PeerError)
    assert "1 of 2 prefill workers sent it" in str(error)
    assert prefill.shown[0, 0].state is State.FAILED


def test_a_send_that_owes_nothing_needs_no_path():
    cluster = Cluster(0)
    prefills, decode = [cluster.prefill(), cluster.prefill()], cluster.decode()
    whole = layout(kv_heads=1, total_kv_heads=1)
    addresses = ("tcp://first:1", "tcp://second:1")
    for tp, (prefill, address) in enumerate(zip(prefills, addresses, strict=True)):
        prefill.attach(tp, whole, Rank(tp=tp, tp_size=2))
        decode.machine.link_named(address, 0.0)
    decode.attach(0, whole)
    for prefill, address in zip(prefills, addresses, strict=True):
        cluster.join(decode, prefill, address)
    decode.machine._note_instance(addresses)
    decode.pump()
    cluster.run()
    prefills[1].fabric.paths[decode.machine.incarnation].fail("cut")
    cluster.run()
    receive(cluster, decode, prefill=addresses)
    for tp, prefill in enumerate(prefills):
        open_room(cluster, prefill, tp)
        send(prefill, tp)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert prefills[1].shown[1, 0].state is State.COMMITTED, "it owes the receiver nothing"


def test_a_quarantined_receive_does_not_hold_up_those_after_it(monkeypatch):
    monkeypatch.setattr(limits, "TOMBSTONES_PER_SESSION_MAX", 8)
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode(silent=False)
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    open_room(cluster, prefill)
    send(prefill)
    while not cluster.hub.ready():
        cluster.step()
    prefill.fabric.paths[decode.machine.incarnation].fail("cut", late_runs=2)
    cluster.run()
    cluster.pass_time(limits.FENCE_DEADLINE_S + 1)
    assert decode.shown[0, 0].state is State.QUARANTINED
    decode.machine._announce()  # what the agent does when it hears LaneFailed
    decode.pump()
    cluster.run()
    for turn in range(3 * limits.TOMBSTONES_PER_SESSION_MAX):
        slot, room = turn + 1, turn + 100
        receive(cluster, decode, room=room, ids=(9,), slot=slot)
        open_room(cluster, prefill, room=room, slot=slot)
        if turn % 2:
            cluster.run()
            prefill.machine.abort(0, slot, "seeded")
            prefill.pump()
        else:
            send(prefill, ids=(1,), slot=slot)
        cluster.run()
        cluster.pass_time(0.5)
        wanted = State.FAILED if turn % 2 else State.COMMITTED
        assert decode.shown[0, slot].state is wanted
    assert decode.shown[0, 0].state is State.QUARANTINED


def test_a_decode_that_never_raises_its_mark_is_refused_and_no_end_fails(monkeypatch):
    monkeypatch.setattr(limits, "TOMBSTONES_PER_SESSION_MAX", 4)
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    for slot in range(4):
        receive(cluster, decode, room=slot + 1, ids=(5,), slot=slot)
        open_room(cluster, prefill, room=slot + 1, slot=slot)
        cluster.run()
        prefill.machine.abort(0, slot, "seeded")
        prefill.pump()
        assert prefill.shown[0, slot].state is State.FAILED
        cluster.run()
    receive(cluster, decode, room=9, ids=(5,), slot=9)
    with pytest.raises(RemoteProtocolError, match="at most 4 may; its heartbeats must raise"):
        cluster.run()


@pytest.mark.parametrize("proof", ["", "revoked"])
def test_a_closed_receive_side_proves_what_had_failed_and_leaves_the_rest(proof):
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    receive(cluster, decode, room=8, ids=(9,), slot=1)
    cluster.run()
    cluster.network.cut.add((prefill.machine.incarnation, decode.machine.incarnation))
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FENCING
    decode.machine.receiver_closed(prefill.machine.incarnation, proof)
    decode.pump()
    assert decode.shown[0, 1].state is State.WAITING
    if proof:
        assert decode.shown[0, 0].state is State.FAILED
        assert decode.shown[0, 0].last.fence == "revoked"
    else:
        assert decode.shown[0, 0].state is State.FENCING, "not every lane proves it"


def test_a_chunk_is_announced_while_it_moves_and_not_behind_its_commit():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=(2,), last=False)
    assert not any(cluster.network.frames.values()), "nothing competes with the bytes"
    cluster.pass_time(0.5)
    assert decode.shown[0, 0].state is State.MOVING
    send(prefill, ids=(3,), tokens=2 * PAGE)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert prefill.shown[0, 0].state is State.COMMITTED
    told = len(prefill.shown), cluster.network.carried_bytes
    cluster.pass_time(0.5, heartbeats=False)
    assert told == (len(prefill.shown), cluster.network.carried_bytes)


def test_refused_rooms_are_remembered_for_their_sends_and_not_for_ever():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout(dtype="float16"))
    cluster.join(decode, prefill)
    cluster.run()
    for slot in range(5):
        receive(cluster, decode, room=slot + 1, slot=slot)
        cluster.run()
        assert isinstance(decode.shown[0, slot].last.error, LayoutMismatchError)
    open_room(cluster, prefill, room=2)
    assert isinstance(prefill.shown[0, 0].last.error, LayoutMismatchError)
    peer = prefill.machine.peers[decode.machine.incarnation]
    assert (len(peer.waiting), len(peer.ended)) == (0, 4)
    cluster.pass_time(limits.UNMATCHED_DEADLINE_S + 1)
    assert not peer.ended


@pytest.mark.parametrize("end", ["decode aborts", "its worker goes"])
def test_a_rank_does_not_join_a_transfer_that_is_ending(end):
    cluster, prefill, decode = two_to_one()
    receive(cluster, decode)
    open_room(cluster, prefill, 0)
    cluster.run()
    send(prefill, 0, last=False)
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    open_room(cluster, prefill, 1)
    send(prefill, 1, last=False)
    assert prefill.shown[1, 0].state is State.FAILED
    prefill.fabric.paths[decode.machine.incarnation].step()
    prefill.take_lane_events()  # Cancelled
    if end == "its worker goes":
        prefill.machine.detach(1, "exits")
        prefill.pump()
        assert not (1 in prefill.freed and cluster.hub.ready()), "the lane reads what was freed"
    while decode.shown[0, 0].state is not State.FAILED:
        assert cluster.deliver_one()
    before = [part.copy() for part in decode.memory[0]]
    cluster.run()
    for was, now in zip(before, decode.memory[0], strict=True):
        assert np.array_equal(was, now), "nothing lands after the pages came back"


@pytest.mark.parametrize("opened", [False, True])
def test_a_receive_that_comes_behind_the_failure_of_another_rank_ends_its_send(opened):
    cluster, prefill, decode = two_to_one()
    if opened:
        open_room(cluster, prefill, 1)
    life = decode.machine.incarnation
    cluster.network.cut.add((life, prefill.machine.incarnation))
    receive(cluster, decode)
    cluster.run()
    open_room(cluster, prefill, 0)
    cluster.network.deliver((life, prefill.machine.incarnation))
    assert prefill.machine.sendings[0, 7].legs
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    cluster.network.cut.clear()
    cluster.run()
    if not opened:
        open_room(cluster, prefill, 1)
    assert prefill.shown[1, 0].state is State.FAILED
    assert decode.shown[0, 0].state is State.FAILED


def test_a_room_received_again_before_the_link_is_up_meets_its_send():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout())
    receive(cluster, decode)
    decode.machine.abort(0, 0, "retry", cluster.now)
    decode.pump()
    receive(cluster, decode, slot=1)
    cluster.join(decode, prefill)
    cluster.run()
    open_room(cluster, prefill)
    send(prefill)
    cluster.run()
    assert decode.shown[0, 1].state is State.COMMITTED


def test_no_commit_leaves_behind_writes_that_could_not_be_posted():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    life = decode.machine.incarnation
    prefill.machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8))
    posted = [e for e in prefill.machine.take_effects() if not isinstance(e, Post)]
    prefill.machine.on_batch(life, 1, 0, 0, length_bytes=0, runs=0, error="no memory", ended=True)
    for effect in posted:
        prefill.do(effect)
    prefill.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert "no memory" in str(decode.shown[0, 0].last.error)
    assert prefill.shown[0, 0].state is State.FAILED


@pytest.mark.parametrize("again", [True, False])
def test_what_is_sent_while_the_path_is_down_waits_for_the_next_one(again):
    cluster, prefill, decode = pair()
    prefill.fabric.paths[decode.machine.incarnation].fail("cut")
    cluster.run()
    receive(cluster, decode, wait_s=20)
    open_room(cluster, prefill, wait_s=20)
    send(prefill)
    cluster.run()
    assert prefill.shown[0, 0].state is State.READY
    if again:
        decode.machine._announce()  # what the agent does when it hears LaneFailed
        decode.pump()
        cluster.run()
        assert decode.shown[0, 0].state is State.COMMITTED
        assert prefill.shown[0, 0].state is State.COMMITTED
        return
    cluster.pass_time(limits.NO_PROGRESS_DEADLINE_S + 1)
    assert "no path to decode is open" in str(prefill.shown[0, 0].last.error)
    assert decode.shown[0, 0].state is State.FAILED


def test_a_receiver_that_comes_behind_a_failed_send_hears_why_and_may_try_again():
    cluster, prefill, decode = pair()
    open_room(cluster, prefill)
    send(prefill, tokens=99)
    assert prefill.shown[0, 0].state is State.FAILED
    receive(cluster, decode)
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert "tokens=99" in str(decode.shown[0, 0].last.error)
    receive(cluster, decode, slot=1)
    cluster.run()
    assert decode.shown[0, 1].state is State.WAITING
    open_room(cluster, prefill, slot=1)
    send(prefill, slot=1)
    cluster.run()
    assert decode.shown[0, 1].state is State.COMMITTED


def test_a_failed_send_is_kept_for_the_receivers_that_have_not_come():
    cluster, prefill, decodes = one_to_two_agents()
    receive(cluster, decodes[0], 0)
    open_room(cluster, prefill)
    cluster.run()
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    cluster.run()
    assert decodes[0].shown[0, 0].state is State.FAILED
    receive(cluster, decodes[0], 0, slot=1)
    receive(cluster, decodes[1], 1)
    cluster.run()
    assert decodes[0].shown[0, 1].state is State.WAITING, "it knows, and tries again"
    assert "enough" in str(decodes[1].shown[1, 0].last.error)
    cluster.pass_time(limits.UNMATCHED_DEADLINE_S + 1)
    assert not prefill.machine._sends.failed


def test_a_send_that_decode_ended_before_it_came_does_not_end_the_next_receive():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    cluster.run()
    open_room(cluster, prefill)
    assert prefill.shown[0, 0].state is State.FAILED
    receive(cluster, decode, slot=1)
    cluster.run()
    assert decode.shown[0, 1].state is State.WAITING

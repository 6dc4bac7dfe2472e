"""What a transfer waits for, and for how long: deadlines before it is bound, no progress after."""

import pytest

from pdxfer import limits
from pdxfer.errors import PeerError, RemoteProtocolError
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Abort, Drained, Heartbeat, Progress
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
    told,
)

STILL_S = limits.NO_PROGRESS_DEADLINE_S


def hold(cluster, decode, worker=0, room=7, slot=0, wait_s=60.0):
    """Receive a room without pages."""
    decode.machine.receive(
        worker, room, slot, ("tcp://prefill:1",), deadline=cluster.now + wait_s, now=cluster.now
    )
    decode.pump()


def place(cluster, decode, worker=0, ids=(5, 6), slot=0):
    decode.machine.place(worker, slot, GivenPlaces(full(ids), PAGE * len(ids), 0), now=cluster.now)
    decode.pump()


# -- the deadline of a send ends when decode has bound its room --------------------------------
def test_the_deadline_of_a_send_does_not_run_on_once_every_receiver_has_come():
    cluster, prefill, decode = pair()
    hold(cluster, decode)
    open_room(cluster, prefill, wait_s=5)
    send(prefill)
    cluster.pass_time(20)
    assert prefill.shown[0, 0].state is State.WAITING
    place(cluster, decode)
    cluster.run()
    assert prefill.shown[0, 0].state is State.COMMITTED
    assert decode.shown[0, 0].state is State.COMMITTED


def test_a_bound_send_without_pages_ends_with_its_lease():
    cluster, prefill, decode = pair()
    hold(cluster, decode, wait_s=500)
    open_room(cluster, prefill, wait_s=5)
    cluster.run()
    cluster.pass_time(20, heartbeats=False)
    assert prefill.shown[0, 0].state is State.WAITING
    cluster.pass_time(11, heartbeats=False)
    assert prefill.shown[0, 0].state is State.FAILED
    assert "lease of 30.0 s" in str(prefill.shown[0, 0].last.error)


@pytest.mark.parametrize(
    ("placed", "text"),
    [
        (False, "receiver 1 of 2 had come before its deadline, none had placed pages"),
        (True, "receiver 1 of 2 had come before its deadline, receiver 1 had placed pages"),
    ],
)
def test_a_send_says_which_receivers_came_and_which_placed(placed, text):
    cluster, prefill, decodes = one_to_two_agents()
    hold(cluster, decodes[1], worker=1)
    if placed:
        place(cluster, decodes[1], worker=1)
    open_room(cluster, prefill, wait_s=5)
    cluster.run()
    cluster.pass_time(6)
    error = prefill.shown[0, 0].last.error
    assert str(error) == f"room 7: {text}"
    assert error.retryable


# -- no progress -------------------------------------------------------------------------------
def test_a_matched_transfer_whose_last_chunk_never_comes_ends_at_prefill():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    send(prefill, ids=(2,), last=False)
    cluster.run()
    cluster.pass_time(STILL_S - 2)
    assert prefill.shown[0, 0].state is State.MOVING
    cluster.pass_time(4)
    error = prefill.shown[0, 0].last.error
    assert prefill.shown[0, 0].state is State.FAILED
    assert isinstance(error, PeerError)
    assert error.retryable
    assert "1 chunk(s) came from the prefill worker, and no last one" in str(error)
    assert decode.shown[0, 0].state is State.FAILED


def test_a_matched_transfer_that_no_bytes_reach_ends_at_decode(monkeypatch):
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.READY
    monkeypatch.setattr(prefill.machine._deadlines, "check", lambda *_: None)
    cluster.pass_time(STILL_S + 2)
    error = decode.shown[0, 0].last.error
    assert decode.shown[0, 0].state is State.FAILED
    assert error.retryable
    assert "1 of 1 source ranks (rank 0) have not sent all they owe" in str(error)
    assert prefill.shown[0, 0].state is State.FAILED


def test_a_chunk_before_each_deadline_keeps_a_transfer_alive_at_both_ends():
    cluster, prefill, decode = pair()
    receive(cluster, decode, ids=(5, 6, 7))
    open_room(cluster, prefill)
    for page in (1, 2):
        send(prefill, ids=(page,), last=False)
        cluster.pass_time(STILL_S - 20)
    send(prefill, ids=(3,), tokens=3 * PAGE)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert prefill.shown[0, 0].state is State.COMMITTED


def test_bytes_that_move_keep_a_long_chunk_alive_at_both_ends():
    cluster, prefill, decode = pair()
    receive(cluster, decode, ids=range(1, 13))
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=range(1, 13))
    path = prefill.fabric.paths[decode.machine.incarnation]
    cluster.hub.frozen.add(prefill.fabric.address)
    for _ in range(3):  # a batch a layer
        for _ in range(3):  # k, v, their end
            path.step()
        cluster.pass_time(STILL_S - 20)
    assert len(path.work) == 1, "the commit"
    cluster.hub.frozen.clear()
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED


def test_progress_that_cannot_be_is_no_sign_of_any():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    owed = sum(leg.expected_bytes for leg in decode.machine.live[1].legs.values())
    receiving = decode.machine.live[1]

    def moves(bytes_done):
        receiving.moved = False
        progress = [Progress(generation=1, bytes_done=bytes_done)]
        beat = Heartbeat(progress=progress)
        decode.machine.on_message(prefill.machine.incarnation, beat, cluster.now)
        return receiving.moved

    assert [moves(n) for n in (0, 8, 8, 4, owed + 1, owed)] == [0, 1, 0, 0, 0, 1]


def test_a_send_of_a_generation_that_decode_knows_nothing_of_any_more_ends():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    cluster.network.cut.add((decode.machine.incarnation, prefill.machine.incarnation))
    send(prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert prefill.shown[0, 0].state is State.SENT
    beat = Heartbeat(oldest_live_generation=2)
    prefill.machine.on_message(decode.machine.incarnation, beat, cluster.now)
    prefill.machine.tick(cluster.now)
    prefill.pump()
    assert prefill.shown[0, 0].state is State.FAILED
    assert "decode knows nothing of generation 1 any more" in str(prefill.shown[0, 0].last.error)


@pytest.mark.parametrize("opened", [True, False])
def test_a_room_that_only_decode_refuses_ends_its_send_too(opened):
    cluster, prefill, decode = pair()
    if opened:
        open_room(cluster, prefill)
    peer = decode.machine.peers[prefill.machine.incarnation]
    peer.digests = dict.fromkeys(peer.digests, b"0" * 16)
    decode.machine.sources.changed()
    receive(cluster, decode)
    cluster.run()
    assert "computed different plans" in str(decode.shown[0, 0].last.error)
    if not opened:
        open_room(cluster, prefill)
    assert prefill.shown[0, 0].state is State.FAILED
    assert "computed different plans" in str(prefill.shown[0, 0].last.error)


# -- a life that asks about another ------------------------------------------------------------
def test_a_decode_life_cannot_have_itself_called_drained():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    ours = decode.machine.incarnation
    with pytest.raises(RemoteProtocolError, match="field decode_incarnation: the life that asks"):
        prefill.machine.on_message(ours, Abort(decode_incarnation=ours), cluster.now)
    assert not [m for _, m in told(prefill.machine) if isinstance(m, Drained)]


def test_everyone_who_asks_about_an_old_life_is_answered():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    old, asker = decode.machine.incarnation, (b"1" * 16, b"2" * 16)
    for life in asker:
        prefill.machine.on_message(life, Abort(decode_incarnation=old), cluster.now)
    effects = prefill.machine.take_effects()
    assert not [e for e in effects if isinstance(getattr(e, "message", None), Drained)]
    prefill.machine.on_path_closed(old, "", drained=True)
    drained = [(peer, m) for peer, m in told(prefill.machine) if isinstance(m, Drained)]
    answers = [(peer, m) for peer, m in drained if m.decode_incarnation]
    assert answers == [(life, Drained(decode_incarnation=old)) for life in asker]


# -- a room given up while the agent stood still -----------------------------------------------
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("goodbye", [True, False])
def test_a_rank_that_sends_after_it_was_frozen_hears_that_its_room_was_given_up(goodbye, silent):
    cluster = Cluster(0)
    prefills, decode = [cluster.prefill(), cluster.prefill()], cluster.decode(silent=silent)
    addresses = ("tcp://first:1", "tcp://second:1")
    for tp, (prefill, address) in enumerate(zip(prefills, addresses, strict=True)):
        prefill.attach(tp, *part(tp))
        decode.machine.link_named(address, cluster.now)
    decode.attach(0, layout())
    for prefill, address in zip(prefills, addresses, strict=True):
        cluster.join(decode, prefill, address)
    decode.machine._note_instance(addresses)
    decode.pump()
    cluster.run()
    receive(cluster, decode, prefill=addresses)
    open_room(cluster, prefills[0], 0)
    cluster.run()
    cluster.network.leave(decode, prefills[1].machine.incarnation, goodbye=goodbye)
    cluster.join(decode, prefills[1], addresses[1])
    cluster.run()
    open_room(cluster, prefills[1], 1)
    send(prefills[1], 1)
    error = prefills[1].shown[1, 0].last.error
    assert prefills[1].shown[1, 0].state is State.FAILED
    assert isinstance(error, PeerError)
    assert error.retryable
    cluster.run()
    receive(cluster, decode, prefill=addresses, ids=(9, 10), slot=1)
    for tp, prefill in enumerate(prefills):
        open_room(cluster, prefill, tp, slot=1)
        send(prefill, tp, slot=1)
    cluster.run()
    assert decode.shown[0, 1].state is State.COMMITTED, "the room can be tried again"


def test_receives_that_wait_hear_that_the_first_chunk_of_their_send_was_refused():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    chunk = GivenChunk(full([2, 99]), tokens=8)
    prefill.machine.open(0, 7, 0, deadline=cluster.now + 60, lease_s=30.0, chunk=chunk)
    prefill.pump()
    cluster.run()
    assert prefill.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].state is State.FAILED
    assert "99" in str(decode.shown[0, 0].last.error)

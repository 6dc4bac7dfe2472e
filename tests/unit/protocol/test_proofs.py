"""A proof counts for the receive side and the life that it is about, and for nothing else."""

import pytest

from pdxfer.protocol.state import State
from tests.support.transfers import open_room, pair, receive, send


@pytest.mark.parametrize("abort", [True, False])
def test_a_generation_told_over_one_lane_is_not_revoked_by_a_later_one(abort):
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    cluster.network.cut.add((ours, theirs))
    if abort:
        decode.machine.abort(0, 0, "enough", cluster.now)
        decode.pump()
    decode.machine.receiver_closed(theirs, "")
    decode.machine.peer_lost(theirs, "silent", cluster.now)
    decode.machine.link_up("tcp://prefill:1", theirs, cluster.now)
    decode.machine.receiver_closed(theirs, "revoked")  # the next lane of the same life
    decode.machine.take_effects()
    assert decode.machine.live[1].state is State.FENCING
    decode.machine.sender_dead(theirs)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "dead"


def test_what_is_told_after_a_lane_failed_is_proven_by_its_own_side_only():
    cluster, prefill, decode = pair(silent=False)
    theirs = prefill.machine.incarnation
    decode.machine.receiver_closed(theirs, "")
    decode.machine.announce_to(theirs)
    receive(cluster, decode)
    decode.machine.take_effects()
    decode.machine.receiver_closed(theirs, "revoked")
    decode.machine.abort(0, 0, "enough", cluster.now)
    assert decode.machine.live[1].state is State.FENCING, "the first lane may still carry it"


def test_a_receive_that_goes_on_over_another_side_needs_the_proof_of_that_one_too():
    cluster, prefill, decode = pair()
    theirs = prefill.machine.incarnation
    receive(cluster, decode)
    decode.machine.receiver_closed(theirs, "revoked")
    decode.machine.announce_to(theirs)
    decode.machine.abort(0, 0, "enough", cluster.now)
    assert decode.machine.live[1].state is State.FENCING
    decode.machine.receiver_closed(theirs, "revoked")
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED


def test_a_proof_of_a_whole_life_says_nothing_of_a_receive_that_goes_on():
    cluster, prefill, decode = pair()
    theirs = prefill.machine.incarnation
    receive(cluster, decode)
    receiving = decode.machine.live[1]
    decode.machine.sender_silent(theirs)
    assert receiving.told[theirs], "it may still be written over the side that it was told over"
    decode.machine.abort(0, 0, "enough", cluster.now)
    assert receiving.state is State.FENCING
    decode.machine.receiver_closed(theirs, "revoked")
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED


def test_what_has_failed_is_not_written_over_a_side_made_later():
    cluster, prefill, decode = pair()
    theirs = prefill.machine.incarnation
    receive(cluster, decode)
    decode.machine.abort(0, 0, "enough", cluster.now)
    first = decode.machine.peers[theirs].side
    decode.machine.receiver_closed(theirs, "")
    decode.machine.announce_to(theirs)
    assert decode.machine.live[1].told == {theirs: {first}}


def test_a_closed_generation_is_proven_alone():
    cluster, prefill, decode = pair()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    receive(cluster, decode)
    receive(cluster, decode, room=8, ids=(9,), slot=1)
    cluster.run()
    cluster.network.cut.add((theirs, ours))
    for slot in range(2):
        decode.machine.abort(0, slot, "enough", cluster.now)
    decode.machine.on_generation_closed(theirs, 1)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "revoked"
    assert decode.shown[0, 1].state is State.FENCING


def test_a_side_that_cannot_be_watched_is_still_there_to_be_closed():
    cluster, prefill, decode = pair()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    receive(cluster, decode)
    cluster.run()
    cluster.network.cut.add((theirs, ours))
    decode.machine.sender_unwatched(theirs, "no such sender", cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FENCING
    assert "no such sender" in str(decode.shown[0, 0].last.error)
    decode.half.left(theirs)
    decode.pump()
    assert decode.shown[0, 0].last.fence == "revoked"


def test_quarantined_pages_are_counted_until_their_proof_comes():
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode, ids=(1, 2, 3, 4, 5))
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=(1, 2, 3, 4, 5))
    theirs = prefill.machine.incarnation
    cluster.kill(prefill)
    cluster.network.leave(decode, theirs)
    cluster.pass_time(11)
    assert decode.shown[0, 0].state is State.QUARANTINED
    with pytest.raises(Exception, match="5 pages of group full"):
        receive(cluster, decode, room=8, ids=(9,), slot=1)
    decode.machine.sender_dead(theirs)
    decode.pump()
    receive(cluster, decode, room=8, ids=(9,), slot=1)
    assert decode.shown[0, 1].state is State.WAITING

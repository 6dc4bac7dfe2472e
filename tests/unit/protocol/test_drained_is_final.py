"""No write after `Drained`: not of another worker there, not because a heartbeat came early."""

import numpy as np
import pytest

from pdxfer.protocol.prefill.peer import DecodePeer
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Heartbeat
from tests.support.transfers import open_room, receive, send, two_to_one


def drained_with_its_abort_lost():
    """Rank 0 has failed and is drained, decode's pages are back, rank 1 has not come.

    The connection has broken with decode's `Abort` on it, and nobody has seen that yet.
    """
    cluster, prefill, decode = two_to_one()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    receive(cluster, decode)
    open_room(cluster, prefill, 0)
    cluster.run()
    send(prefill, 0, last=False)
    cluster.network.cut.add((ours, theirs))
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    cluster.network.cut.clear()
    cluster.network.frames[ours, theirs].clear()
    return cluster, prefill, decode


def rank_1_comes(cluster, prefill):
    """Its send is refused; nothing of it reaches decode."""
    open_room(cluster, prefill, 1)
    if prefill.shown[1, 0].state is not State.FAILED:
        send(prefill, 1)


def test_a_heartbeat_that_overtakes_an_abort_raises_no_mark():
    cluster, prefill, decode = drained_with_its_abort_lost()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    heard = prefill.machine.peers[ours].last_heard
    cluster.now += 1.0
    decode.heartbeats()
    cluster.network.deliver((ours, theirs))
    peer = prefill.machine.peers[ours]
    assert peer.last_heard > heard, "it is a sign of life at once"
    assert peer.mark == 0
    cluster.network.unnoticed.add((ours, theirs))
    cluster.run()
    assert peer.mark == 1, "it counts once the abort has come"


@pytest.mark.parametrize("early", ["ahead of its abort", "with a mark that is believed"])
def test_no_write_after_drained_when_a_heartbeat_overtakes_the_abort(early):
    cluster, prefill, decode = drained_with_its_abort_lost()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    before = [part.copy() for part in decode.memory[0]]
    if early == "ahead of its abort":
        decode.heartbeats()
        cluster.network.deliver((ours, theirs))
    else:  # what a peer says that numbers its heartbeats wrongly
        beat = Heartbeat(oldest_live_generation=decode.machine.mark(theirs))
        prefill.machine.on_message(ours, beat, cluster.now)
    rank_1_comes(cluster, prefill)
    cluster.run()
    for was, now in zip(before, decode.memory[0], strict=True):
        assert np.array_equal(was, now), "a write landed in a page that came back"
    assert prefill.shown[1, 0].state is State.FAILED
    assert "has failed at another prefill worker" in str(prefill.shown[1, 0].last.error)


def test_what_waits_of_a_generation_with_a_tombstone_is_dropped():
    _, prefill, decode = drained_with_its_abort_lost()
    peer = prefill.machine.peers[decode.machine.incarnation]
    assert peer.tombstones == {1}
    assert len(peer.waiting) == 0


def test_a_bind_refuses_what_is_below_the_mark(monkeypatch):
    monkeypatch.setattr(DecodePeer, "_drop_dead", lambda *_: None)
    cluster, prefill, decode = drained_with_its_abort_lost()
    before = [part.copy() for part in decode.memory[0]]
    prefill.machine.peers[decode.machine.incarnation].advance_mark(2)
    rank_1_comes(cluster, prefill)
    cluster.run()
    for was, now in zip(before, decode.memory[0], strict=True):
        assert np.array_equal(was, now)
    assert prefill.shown[1, 0].state is State.FAILED

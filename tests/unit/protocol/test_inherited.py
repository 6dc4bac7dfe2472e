"""Pages that an older life of a decode agent left: held until one who was told them proves it."""

import pytest

from pdxfer.errors import ConfigError
from pdxfer.protocol.decode.inherited import Inheritance
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Abort, Drained
from tests.support.cluster import ADDRESS, full
from tests.support.transfers import layout, open_room, pair, receive, send, told


def restarted():
    """A decode agent died with a room on its way; another one, with the same pages, has come."""
    cluster, prefill, old = pair()
    receive(cluster, old)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    assert cluster.hub.ready(), "writes are in flight"
    decode = cluster.decode()
    decode.attach(0, layout())
    return cluster, prefill, old.machine.incarnation, decode


def inherit(cluster, decode, life, *writers, ids=(5, 6), slot=0):
    left = Inheritance(0, 7, slot, life, (ADDRESS,), full(ids), writers)
    receiving = decode.machine.inherit(left, cluster.now)
    decode.pump()
    return receiving


@pytest.mark.parametrize("first", ["session", "pages"])
def test_an_older_lifes_pages_come_back_when_their_writer_says_drained(first):
    cluster, prefill, life, decode = restarted()
    theirs = prefill.machine.incarnation
    if first == "session":
        cluster.join(decode, prefill)
        cluster.network.cut.add((theirs, decode.machine.incarnation))
        while (decode.machine.incarnation, theirs) not in cluster.network.sessions:
            cluster.step()
        cluster.network.cut.clear()
        cluster.run()
    inherit(cluster, decode, life, theirs)
    assert decode.shown[0, 0].state is State.FENCING
    again = Inheritance(0, 8, 1, life, (ADDRESS,), full((5,)), (theirs,))
    with pytest.raises(ConfigError, match="page 5 of group full is held by room 7"):
        decode.machine.inherit(again, cluster.now)
    if first == "pages":
        cluster.join(decode, prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "drained"
    receive(cluster, decode, room=8, ids=(5, 6), slot=1)
    assert decode.shown[0, 1].state is State.WAITING


def test_another_prefill_life_proves_nothing_of_an_older_one():
    cluster, prefill, life, decode = restarted()
    cluster.join(decode, prefill)
    cluster.run()
    inherit(cluster, decode, life, b"w" * 16)
    answer = Drained(decode_incarnation=life)
    decode.machine.on_message(prefill.machine.incarnation, answer, cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FENCING
    cluster.pass_time(11)
    assert decode.shown[0, 0].state is State.QUARANTINED
    decode.machine.sender_dead(b"w" * 16)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "dead"


def test_an_answer_about_another_life_proves_nothing():
    cluster, prefill, life, decode = restarted()
    cluster.join(decode, prefill)
    cluster.run()
    theirs = prefill.machine.incarnation
    cluster.network.cut.add((theirs, decode.machine.incarnation))
    receiving = inherit(cluster, decode, life, theirs)
    for answer in (
        Drained(decode_incarnation=b"x" * 16),
        Drained(decode_incarnation=decode.machine.incarnation),
    ):
        decode.machine.on_message(theirs, answer, cluster.now)
    assert receiving.state is State.FENCING


def test_a_writer_is_asked_about_the_older_life_once_and_not_by_generation():
    cluster, prefill, life, decode = restarted()
    theirs = prefill.machine.incarnation
    inherit(cluster, decode, life, theirs)
    other = Inheritance(0, 8, 1, life, (ADDRESS,), full((9,)), (theirs,))
    decode.machine.inherit(other, cluster.now)
    decode.machine.take_effects()
    decode.machine.link_up(ADDRESS, theirs, cluster.now)
    asked = [message for _, message in told(decode.machine) if isinstance(message, Abort)]
    assert [(m.generation, m.decode_incarnation) for m in asked] == [(0, life)]

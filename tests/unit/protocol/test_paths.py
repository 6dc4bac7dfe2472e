"""The sending path of a decode life: it goes by one lane to one receive side, the last attached."""

import pytest

from pdxfer.layout import Pages
from pdxfer.protocol.effects import ClosePath, OpenPath, Post
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Attach
from tests.support.transfers import open_room, pair, receive


def attach(prefill, decode, lane, address, now):
    """Decode attaches what it has, to be reached by another lane or at another address."""
    life = decode.machine.incarnation
    workers = [worker.info() for worker in decode.machine.workers.values()]
    revision = prefill.machine.peers[life].revision + 1
    said = Attach(revision=revision, workers=workers, siblings=[], lane=lane, lane_address=address)
    prefill.machine.on_message(life, said, now)
    return [e for e in prefill.machine.take_effects() if isinstance(e, ClosePath | OpenPath | Post)]


@pytest.mark.parametrize(("lane", "same"), [("other", True), ("inproc", False), ("other", False)])
def test_another_lane_or_another_address_opens_a_new_path_behind_the_old(lane, same):
    cluster, prefill, decode = pair()
    life = decode.machine.incarnation
    peer = prefill.machine.peers[life]
    address = peer.path_address if same else b"another"
    assert attach(prefill, decode, lane, address, cluster.now) == [ClosePath(life)]
    assert peer.path_lane == "inproc", "what is under way on the old path is of its lane"
    prefill.machine.on_path_closed(life, "", drained=True)
    opened = [e for e in prefill.machine.take_effects() if isinstance(e, OpenPath)]
    assert opened == [OpenPath(life, lane, address)]
    assert peer.path_lane == lane


def test_the_same_lane_and_address_keep_the_path():
    cluster, prefill, decode = pair()
    peer = prefill.machine.peers[decode.machine.incarnation]
    assert attach(prefill, decode, peer.path_lane, peer.path_address, cluster.now) == []


def test_nothing_is_posted_while_a_path_changes_its_lane():
    cluster, prefill, decode = pair()
    life = decode.machine.incarnation
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    sending = prefill.machine.sendings[0, 7]
    assert sending.state is State.READY
    address = prefill.machine.peers[life].path_address
    assert attach(prefill, decode, "other", address, cluster.now) == [ClosePath(life)]
    prefill.machine.send(0, 0, GivenChunk({"full": Pages([1, 2])}, tokens=8))
    assert [e for e in prefill.machine.take_effects() if isinstance(e, Post)] == []

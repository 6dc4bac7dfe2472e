"""Rooms that say how long they wait for an address, and whether their send must be there."""

import pytest

from pdxfer.errors import PeerError
from pdxfer.layout import page_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from tests.support.cluster import ADDRESS, Cluster, full


def layout():
    return page_major(
        layers=range(2), kv_heads=2, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
    )


class Joined:
    """A decode node with one worker, and a prefill node with one that it may be joined to."""

    def __init__(self):
        self.cluster = Cluster(0)
        self.prefill, self.decode = self.cluster.prefill(), self.cluster.decode()
        self.prefill.attach(0, layout())
        self.decode.attach(0, layout())

    def join(self):
        self.cluster.join(self.decode, self.prefill)
        self.cluster.run()

    def receive(self, room=7, slot=0, **terms):
        now = self.cluster.now
        receiving = self.decode.machine.receive(
            0, room, slot, (ADDRESS,), deadline=now + 120, now=now, **terms
        )
        self.decode.pump()
        return receiving

    def tick(self, seconds):
        self.cluster.now += seconds
        self.decode.machine.tick(self.cluster.now)
        self.decode.pump()


def test_a_room_with_unreachable_s_fails_when_its_address_has_not_answered_for_so_long():
    pair = Joined()
    pair.decode.machine.link_named(ADDRESS, pair.cluster.now)
    pair.decode.machine.link_troubled(ADDRESS, "nothing accepts connections there")
    patient = pair.receive(room=8, slot=1)
    hasty = pair.receive(unreachable_s=2.0)
    pair.tick(1.9)
    assert hasty.state is State.WAITING
    pair.tick(0.2)
    assert hasty.state is State.FAILED
    assert isinstance(hasty.error, PeerError)
    assert hasty.error.retryable
    assert str(hasty.error) == (
        f"room 7: no answer from the prefill agent at {ADDRESS} for 2.1 s, and unreachable_s=2: "
        "nothing accepts connections there"
    )
    assert hasty.error.fields == {"address": ADDRESS, "room": "7"}
    assert patient.state is State.WAITING


def test_a_room_is_refused_at_once_when_its_address_has_been_silent_for_longer_already():
    pair = Joined()
    pair.decode.machine.link_named(ADDRESS, pair.cluster.now)
    pair.tick(60)
    assert pair.receive(unreachable_s=2.0).state is State.FAILED


def test_an_address_is_unreachable_from_the_loss_of_its_session_on():
    pair = Joined()
    pair.decode.machine.link_named(ADDRESS, pair.cluster.now)
    pair.join()
    pair.tick(60)
    held = pair.receive(unreachable_s=2.0)
    pair.tick(5)
    assert held.state is State.WAITING  # bound: its prefill agent answers
    pair.decode.machine.peer_lost(pair.prefill.machine.incarnation, "silent", pair.cluster.now)
    pair.decode.pump()
    later = pair.receive(room=8, slot=1, unreachable_s=2.0)
    pair.tick(1.9)
    assert later.state is State.WAITING
    pair.tick(0.2)
    assert later.state is State.FAILED


@pytest.mark.parametrize("must_exist", [False, True])
def test_a_room_that_must_exist_fails_at_a_prefill_that_has_no_send_of_it(must_exist):
    pair = Joined()
    pair.join()
    receiving = pair.receive(must_exist=must_exist)
    pair.cluster.run()
    if not must_exist:
        assert receiving.state is State.WAITING
        return
    assert receiving.state is State.FAILED
    assert receiving.error.retryable
    assert "rank 0 of prefill instance '' has no live send of it" in str(receiving.error)
    assert receiving.error.fields == {
        "address": ADDRESS,
        "prefill_instance": "",
        "prefill_rank": "0",
        "room": "7",
        "source_worker": "0",
    }


def test_a_room_that_must_exist_and_does_is_received():
    pair = Joined()
    pair.join()
    pair.prefill.machine.open(0, 7, 0, deadline=pair.cluster.now + 60, lease_s=30.0)
    pair.prefill.machine.send(0, 0, GivenChunk(full([3]), tokens=4))
    pair.prefill.pump()
    receiving = pair.receive(must_exist=True)
    pair.decode.machine.place(0, 0, GivenPlaces(full([5]), 4, 0), now=pair.cluster.now)
    pair.decode.pump()
    pair.cluster.run()
    assert receiving.state is State.COMMITTED

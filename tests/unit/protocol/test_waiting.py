"""Receives that wait for their sends: each keeps its own pages, and ends alone."""

import msgspec
import pytest

from pdxfer.protocol.given import GivenPlaces
from pdxfer.protocol.prefill.waiting import Waiting
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Place, Receive
from tests.support.cluster import Cluster, full
from tests.support.transfers import PAGE, layout, open_room, part, receive, send

PLAIN = Receive(
    room=7,
    generation=1,
    source_worker=0,
    destination_worker=0,
    receiver_index=0,
    receiver_count=2,
)


def waiting_of(*changes):
    """Receives that differ from the plain one."""
    waiting = Waiting()
    for each in changes:
        waiting.add(msgspec.structs.replace(PLAIN, **each))
    return waiting


def two_receivers(order=(0, 1)):
    """Both ranks of a decode instance beside one agent have received room 7; no send has come."""
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    for tp in range(2):
        decode.attach(tp, *part(tp))
    cluster.join(decode, prefill)
    cluster.run()
    for tp in order:
        receive(cluster, decode, tp, ids=(5 + 2 * tp, 6 + 2 * tp))
    cluster.run()
    return cluster, prefill, decode


def test_what_is_taken_waits_no_more_and_counts_no_more():
    first, second = {"generation": 1}, {"generation": 2, "receiver_index": 1}
    waiting = waiting_of(first, second, {"generation": 3, "room": 8})
    assert len(waiting) == 3
    assert [r.generation for r in waiting.take(0, 7)] == [1, 2]
    assert len(waiting) == 1
    assert 1 not in waiting
    assert 2 not in waiting
    assert 3 in waiting
    assert waiting.take(0, 7) == []


def test_a_receive_that_is_replaced_counts_once_and_is_forgotten():
    waiting = waiting_of({"generation": 1}, {"generation": 2})
    assert len(waiting) == 1
    assert 1 not in waiting
    assert [r.generation for r in waiting.take(0, 7)] == [2]
    assert len(waiting) == 0


def test_one_generation_is_dropped_at_every_source_worker_and_no_other():
    waiting = waiting_of(
        {"source_worker": 0},
        {"source_worker": 1},
        {"source_worker": 0, "generation": 2, "receiver_index": 1},
    )
    waiting.drop(1)
    assert len(waiting) == 1
    assert not waiting.knows(1, 0)
    assert not waiting.knows(1, 1)
    assert waiting.knows(2, 0)
    assert [r.generation for r in waiting.take(0, 7)] == [2]


def test_pages_are_put_to_their_generation_and_source_worker_only():
    waiting = waiting_of(
        {"source_worker": 0},
        {"source_worker": 1},
        {"source_worker": 0, "generation": 2, "receiver_index": 1},
    )
    place = Place(generation=1, source_worker=0, tokens=4)
    waiting.place(place)
    assert [r.place for r in waiting.take(0, 7)] == [place, None]
    assert [r.place for r in waiting.take(1, 7)] == [None]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_two_waiting_receivers_gets_its_own_pages(order):
    cluster, prefill, decode = two_receivers()
    before = [[region.copy() for region in decode.memory[tp]] for tp in range(2)]
    open_room(cluster, prefill)
    send(prefill)
    cluster.run()
    for tp in order:
        assert decode.shown[tp, 0].state is State.COMMITTED
        target = decode.machine.workers[tp].layout
        changed = set()
        for index, (was, now) in enumerate(zip(before[tp], decode.memory[tp], strict=True)):
            stride = target.regions[index].length_bytes // target.groups[0].pages
            changed |= {int(at) // stride for at in (was != now).nonzero()[0]}
        assert changed == {5 + 2 * tp, 6 + 2 * tp}


def test_pages_placed_later_reach_the_receiver_that_placed_them():
    cluster, prefill, decode = two_receivers(order=())
    for tp in range(2):
        decode.machine.receive(
            tp, 7, 0, ("tcp://prefill:1",), deadline=cluster.now + 60, now=cluster.now
        )
    decode.pump()
    cluster.run()
    for tp in (1, 0):
        ids = full([5 + 2 * tp, 6 + 2 * tp])
        decode.machine.place(tp, 0, GivenPlaces(ids, 2 * PAGE, 0), now=cluster.now)
    decode.pump()
    cluster.run()
    open_room(cluster, prefill)
    ids = {
        leg.receive.destination_worker: leg.pages["full"].ids.tolist()
        for leg in prefill.machine.sendings[0, 7].legs.values()
    }
    assert ids == {0: [5, 6], 1: [7, 8]}


def test_one_receiver_gives_up_and_the_send_that_comes_ends_for_the_other_too():
    cluster, prefill, decode = two_receivers()
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[1, 0].state is State.WAITING
    open_room(cluster, prefill)
    cluster.run()
    assert prefill.shown[0, 0].state is State.FAILED
    assert decode.shown[1, 0].state is State.FAILED, "it would wait for a send that has ended"

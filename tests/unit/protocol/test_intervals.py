"""Chunks that leave interval by interval: each ends, and what ends in between stops the rest."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.fabric.base import BatchEnded
from pdxfer.layout import Pages, combine
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from tests.unit.protocol.test_machines import Pair, layout

PAGES = 8


@pytest.fixture(autouse=True)
def _every_page_is_an_interval(monkeypatch):
    monkeypatch.setattr(limits, "INTERVAL_RUNS", 1)


def hybrid():
    return combine(layout(layers=(0, 2)), layout(layers=(1, 3), group="window"))


def in_both_groups():
    ids = np.arange(1, PAGES + 1, dtype=np.int64)
    return {"full": Pages(ids, 0), "window": Pages(ids, 0)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", [(0, 2), (1, 3), (1, 2)])
def test_pages_of_a_group_without_a_chosen_layer_do_not_hold_up_a_large_chunk(seed, first):
    """A lane ends what it was given: an interval without bytes would be waited for in vain."""
    source = hybrid()
    pair = Pair(seed, source, hybrid())
    pair.decode.machine.receive(
        0,
        7,
        0,
        ("tcp://prefill:1",),
        deadline=pair.cluster.now + 60,
        now=pair.cluster.now,
        place=GivenPlaces(in_both_groups(), PAGES * 4),
    )
    pair.decode.pump()
    pair.open()
    rest = sorted({0, 1, 2, 3} - set(first))
    for layers, last in ((list(first), False), (rest, True)):
        pair.prefill.machine.send(0, 0, GivenChunk(in_both_groups(), layers=layers, last=last))
        pair.prefill.pump()
        pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    assert pair.at_prefill().state is State.COMMITTED
    for group, layers in (("full", (0, 2)), ("window", (1, 3))):
        for layer in layers:
            for slot in range(4, 4 * (PAGES + 1)):
                region, at = source.locate("k", layer, slot, 0, group=group)
                sent = pair.prefill.memory[0][region][at : at + 16]
                assert np.array_equal(sent, pair.decode.memory[0][region][at : at + 16])


def path_of(pair):
    return pair.prefill.fabric.paths[pair.decode.machine.incarnation]


def in_flight(pair):
    """Intervals that the lane has and has not carried out."""
    return sum(hasattr(item, "runs") for item in path_of(pair).work)


def begin(pair, ids):
    """Bind a room and send it; then hand over what can be while the lane stands still."""
    pair.open()
    pair.receive(ids=ids, tokens=4 * len(ids))
    pair.cluster.run()
    pair.send(ids)
    while pair.cluster.deliver_one() or pair.prefill.take_turn():
        pass


@pytest.mark.parametrize("seed", range(4))
def test_a_lane_has_so_many_intervals_of_a_room_at_once_and_no_more(seed):
    pair, ids = Pair(seed), list(range(1, PAGES + 1))
    begin(pair, ids)
    assert in_flight(pair) == limits.INTERVALS_IN_FLIGHT
    while pair.at_decode().state is not State.COMMITTED:
        assert in_flight(pair) <= limits.INTERVALS_IN_FLIGHT
        assert pair.cluster.step()
    pair.assert_moved(ids, ids, 4 * PAGES)


@pytest.mark.parametrize("side", ["prefill", "decode", "lane"])
def test_nothing_of_a_room_leaves_behind_an_interval_after_which_it_ended(side):
    pair, ids = Pair(0), list(range(1, PAGES + 1))
    begin(pair, ids)
    path, posts = path_of(pair), []
    path.post = lambda write: posts.append(write)
    path.commit = lambda *commit: posts.append(commit)
    if side == "prefill":
        pair.prefill.machine.abort(0, 0, "enough")
        pair.prefill.pump()
    elif side == "decode":
        pair.decode.machine.abort(0, 0, "enough", pair.cluster.now)
        pair.decode.pump()
        while pair.cluster.deliver_one():
            pass
    else:
        path.step()
        end = path.work.popleft()
        pair.prefill.fabric.tell(
            BatchEnded(path.peer, end.generation, end.ticket, 0, end.runs, "a write failed")
        )
    pair.cluster.run()
    assert not posts
    assert pair.at_prefill().state is State.FAILED
    assert pair.at_decode().state is State.FAILED


def test_pages_are_not_back_while_intervals_of_their_chunk_wait_for_their_turn():
    pair, ids = Pair(0), list(range(1, PAGES + 1))
    pair.open()
    pair.receive(ids=[*ids, PAGES + 1], tokens=4 * (PAGES + 1))
    pair.cluster.run()
    pair.send(ids, last=False)
    while path_of(pair).work:
        path_of(pair).step()
    pair.prefill.take_lane_events()
    assert pair.prefill.half.has_turns
    assert not pair.prefill.returned
    pair.cluster.run()
    assert pair.prefill.returned[0, 0] == (4 * PAGES, 1)

"""Source pages come back chunk by chunk, once every receiver has them in all layers and groups."""

import pytest

from pdxfer.layout import Pages, combine
from pdxfer.protocol.prefill.live_send import LiveChunk, SendLeg
from pdxfer.protocol.prefill.returning import Returning
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Receive
from tests.unit.protocol.test_machines import Pair, layout

SEEDS = range(6)


def back(pair):
    """(tokens, chunks) that the worker was told."""
    return pair.prefill.returned.get((0, 0), (0, 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_back_before_the_receiver_has_come(seed):
    pair = Pair(seed)
    pair.open()
    pair.send([1], last=False)
    pair.cluster.run()
    assert back(pair) == (0, 0)
    pair.receive(ids=[4, 5], tokens=8)
    pair.cluster.run()
    assert back(pair) == (4, 1)
    pair.send([2], tokens=8)
    pair.cluster.run()
    assert back(pair) == (8, 2)
    assert pair.at_prefill().state is State.COMMITTED


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_back_when_all_their_layers_are(seed):
    pair = Pair(seed)
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    told = []
    for layer in (2, 0, 1):
        pair.send([1, 2], layers=[layer], last=False)
        pair.cluster.run()
        told.append(back(pair))
    assert told == [(0, 1), (0, 2), (8, 3)]


def test_what_is_told_never_runs_ahead_of_the_lane():
    """Chunks end in any order: only those below the first that is in flight are back."""
    made = layout()
    chunks = [LiveChunk({}, {"full": (4 * n, 4 * n + 4)}, None, n == 3) for n in range(4)]
    receive = Receive(
        room=1,
        generation=1,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=2,
    )
    one, two = SendLeg(b"1", receive, None), SendLeg(b"2", receive, None)
    one.chunks_posted = two.chunks_posted = 4
    one.posts_in_flight, two.posts_in_flight = {1, 2}, {0}
    returning = Returning()
    assert not returning.advance(made, chunks, [one, two])
    two.posts_in_flight = set()
    assert returning.advance(made, chunks, [one, two])
    assert (returning.tokens, returning.chunks) == (4, 1)
    one.posts_in_flight = {2}
    assert returning.advance(made, chunks, [one, two])
    assert (returning.tokens, returning.chunks) == (8, 2)
    two.chunks_posted = 2  # it has not posted the rest
    one.posts_in_flight = set()
    assert not returning.advance(made, chunks, [one, two])


def test_all_groups_count():
    made = combine(layout(), layout(group="swa", layers=range(3, 5), pages=8))
    leg = SendLeg(
        b"1",
        Receive(
            room=1,
            generation=1,
            source_worker=0,
            destination_worker=0,
            receiver_index=0,
            receiver_count=1,
        ),
        None,
    )
    chunks = [
        LiveChunk({"full": Pages([1])}, {"full": (0, 4)}, None, False),
        LiveChunk({"full": Pages([2])}, {"full": (4, 8), "swa": (4, 8)}, None, True),
    ]
    returning = Returning()
    leg.chunks_posted = 1
    assert returning.advance(made, chunks, [leg])
    assert (returning.tokens, returning.chunks) == (0, 1)
    leg.chunks_posted = 2
    assert returning.advance(made, chunks, [leg])
    assert (returning.tokens, returning.chunks) == (8, 2)

"""A chunk that is begun goes layer by layer; no worker is trusted to tell each layer once."""

import pytest

from pdxfer.errors import LocalProtocolError
from pdxfer.layout import Pages, combine
from pdxfer.layout.builders.state import StateTensor, state
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from tests.unit.protocol.test_machines import Pair, layout


def begin(pair, **changes):
    pair.receive(ids=[9, 5, 6], tokens=11)
    pair.open()
    chunk = GivenChunk({"full": Pages([3, 1, 2])}, **{"tokens": 11, "aux": b"x", **changes})
    pair.prefill.machine.begin(0, 0, chunk)
    pair.prefill.pump()
    pair.cluster.run()


def done(pair, layer):
    pair.prefill.machine.layer_done(0, 0, layer)
    pair.prefill.pump()
    pair.cluster.run()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_each_layer_goes_when_it_is_done_and_the_last_one_commits(order):
    pair = Pair(1)
    begin(pair)
    assert pair.at_prefill().state is State.READY
    for count, layer in enumerate(order, 1):
        done(pair, layer)
        placed = sum(leg.bytes_placed for leg in pair_legs(pair))
        if count < 3:
            assert placed == count * 3 * 4 * 2 * 2 * 16
    assert pair.at_decode().state is State.COMMITTED
    assert pair.at_decode().last.aux == b"x"
    pair.assert_moved([3, 1, 2], [9, 5, 6], tokens=11)


def pair_legs(pair):
    return [
        leg for sending in pair.prefill.machine.sendings.values() for leg in sending.legs.values()
    ]


def test_states_of_a_layer_go_with_that_layer():
    rows = state(layers=[7], tensors=[StateTensor("temporal", (2, 4), "float32")], slots=4)
    both = combine(layout(), rows)
    pair = Pair(1, both, both)
    pair.receive()
    places = {"full": Pages([9]), "state": Pages([2])}
    pair.decode.machine.place(0, 0, GivenPlaces(places, 4, 0), now=pair.cluster.now)
    pair.decode.pump()
    pair.open()
    given = {"full": Pages([3]), "state": Pages([1])}
    pair.prefill.machine.begin(0, 0, GivenChunk(given, tokens=4))
    for layer in (7, 1, 0, 2):
        assert pair.at_decode().state is not State.COMMITTED
        done(pair, layer)
    assert pair.at_decode().state is State.COMMITTED


@pytest.mark.parametrize("layers", [[1, 1], [7], [0, 1, 2, 0]])
def test_a_layer_that_is_not_left_fails_the_send(layers):
    pair = Pair(1)
    begin(pair, last=False)
    for layer in layers:
        done(pair, layer)
    assert pair.at_prefill().state is State.FAILED
    assert isinstance(pair.at_prefill().last.error, LocalProtocolError)


@pytest.mark.parametrize("how", ["send", "begin"])
def test_no_chunk_follows_before_all_layers_are_done(how):
    pair = Pair(1)
    begin(pair, last=False)
    done(pair, 1)
    more = GivenChunk({"full": Pages([4])})
    getattr(pair.prefill.machine, how)(0, 0, more)
    pair.prefill.pump()
    pair.cluster.run()
    assert pair.at_prefill().state is State.FAILED
    assert "layers [0, 2] of the chunk that was begun" in str(pair.at_prefill().last.error)

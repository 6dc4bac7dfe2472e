"""A request with its pages is one entry and one message to each prefill agent; bytes come first."""

import numpy as np
import pytest

from pdxfer.errors import ConfigError
from pdxfer.layout import page_major
from pdxfer.protocol.effects import Post, PostCommit, Show, Tell
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Matched, Place, Receive
from tests.support.cluster import ADDRESS, Cluster, full


def pair():
    layout = page_major(
        layers=range(2), kv_heads=1, head_dim=4, page_size=4, pages=16, dtype="uint8"
    )
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout)
    decode.attach(0, layout)
    cluster.join(decode, prefill)
    cluster.run()
    return cluster, prefill, decode


def receive(cluster, decode, place):
    return decode.machine.receive(
        0, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now, place=place
    )


def open_room(cluster, prefill, chunk):
    return prefill.machine.open(0, 7, 0, deadline=cluster.now + 60, lease_s=30.0, chunk=chunk)


def test_a_receive_with_its_places_is_one_message():
    cluster, _, decode = pair()
    receive(cluster, decode, GivenPlaces(full([5, 6]), 8))
    told = [e.message for e in decode.machine.take_effects() if isinstance(e, Tell)]
    assert [type(message) for message in told] == [Receive]
    assert told[0].place is not None
    assert not any(isinstance(message, Place) for message in told)


@pytest.mark.parametrize("receive_first", [True, False])
def test_bytes_are_posted_before_anybody_is_told(receive_first):
    cluster, prefill, decode = pair()
    if receive_first:
        receive(cluster, decode, GivenPlaces(full([5, 6]), 8))
        decode.pump()
        cluster.run()
        open_room(cluster, prefill, GivenChunk(full([2, 3])))
    else:
        open_room(cluster, prefill, GivenChunk(full([2, 3])))
        prefill.pump()
        receive(cluster, decode, GivenPlaces(full([5, 6]), 8))
        [tell] = [e for e in decode.machine.take_effects() if isinstance(e, Tell)]
        prefill.machine.on_message(decode.machine.incarnation, tell.message, cluster.now)
    effects = prefill.machine.take_effects()
    kinds = [type(effect) for effect in effects]
    assert kinds[:2] == [Post, PostCommit]
    assert any(isinstance(e, Tell) and isinstance(e.message, Matched) for e in effects[2:])
    assert any(isinstance(e, Show) and e.state is State.MOVING for e in effects[2:])


def test_bytes_of_a_request_that_is_one_entry_on_both_sides_are_right():
    cluster, prefill, decode = pair()
    receiving = receive(cluster, decode, GivenPlaces(full([5, 6]), 8))
    decode.pump()
    sending = open_room(cluster, prefill, GivenChunk(full([2, 3]), aux=b"first"))
    prefill.pump()
    cluster.run()
    assert (receiving.state, sending.state) == (State.COMMITTED, State.COMMITTED)
    assert receiving.aux == b"first"
    source, target = prefill.memory[0][0], decode.memory[0][0]
    page = len(source) // 16
    assert np.array_equal(source[2 * page : 4 * page], target[5 * page : 7 * page])


def test_pages_that_are_refused_fail_the_request_before_anybody_hears_of_it():
    cluster, prefill, decode = pair()
    receiving = receive(cluster, decode, GivenPlaces(full([5, 99]), 8))
    assert isinstance(receiving.error, ConfigError)
    assert receiving.state is State.FAILED
    sending = open_room(cluster, prefill, GivenChunk(full([2, 99])))
    assert isinstance(sending.error, ConfigError)
    assert sending.state is State.FAILED
    for node in (prefill, decode):
        assert not any(isinstance(e, Tell) for e in node.machine.take_effects())
    assert not decode.machine.live
    assert not prefill.machine.sendings

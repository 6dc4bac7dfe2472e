"""Peers that say what they may not: an error for them, and nothing lost for the others."""

import msgspec
import pytest

from pdxfer.errors import RemoteProtocolError
from pdxfer.protocol.state import State
from pdxfer.wire.messages import (
    Chunk,
    CommitPayload,
    Committed,
    Drained,
    Failed,
    Matched,
    Receive,
    TokenRange,
)
from tests.support.transfers import open_room, pair, receive, send, two_to_one


@pytest.mark.parametrize(
    "message",
    [Failed(generation=1, source_worker=0, code="peer", text="x"), Drained(generation=1)],
)
def test_a_prefill_life_that_a_receive_is_not_bound_to_cannot_end_it(message):
    cluster, prefill, decode = pair()
    stranger = cluster.prefill()
    cluster.join(decode, stranger, "tcp://stranger:1")
    cluster.run()
    receive(cluster, decode)
    decode.machine.on_message(stranger.machine.incarnation, message, cluster.now)
    assert decode.machine.live[1].error is None
    open_room(cluster, prefill)
    send(prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED


def test_committed_before_a_commit_was_asked_for_is_refused():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, last=False)
    with pytest.raises(RemoteProtocolError, match="generation 1 has committed before"):
        prefill.machine.on_message(decode.machine.incarnation, Committed(generation=1), cluster.now)


def test_committed_before_the_bytes_have_left_frees_nothing_that_the_lane_reads():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    assert cluster.hub.ready()
    prefill.machine.on_message(decode.machine.incarnation, Committed(generation=1), cluster.now)
    prefill.machine.detach(0, "exits")
    prefill.pump()
    assert prefill.freed == []
    assert prefill.shown[0, 0].state is State.FENCING
    cluster.run()
    assert prefill.freed == [0]


@pytest.mark.parametrize("room", [7, 8])
@pytest.mark.parametrize("matched", [False, True])
def test_a_generation_is_received_once_from_a_source_worker(matched, room):
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    if matched:
        open_room(cluster, prefill)
    cluster.run()
    again = Receive(
        room=room,
        generation=1,
        source_worker=0,
        destination_worker=0,
        receiver_index=1,
        receiver_count=1,
    )
    with pytest.raises(RemoteProtocolError, match="generation 1 was received from prefill worker"):
        prefill.machine.on_message(decode.machine.incarnation, again, cluster.now)


def test_more_runs_than_bytes_are_no_commit():
    cluster, prefill, decode = two_to_one()
    receive(cluster, decode)
    for (life, worker), leg in list(decode.machine.live[1].legs.items()):
        payload = CommitPayload(
            decode_incarnation=decode.machine.incarnation,
            generation=1,
            source_worker=worker,
            sender_index=leg.sender_index,
            length_bytes=leg.expected_bytes,
            runs=2**64 - 1,
            digest=leg.plan.digest,
        )
        decode.machine.on_commit(life, payload, cluster.now)
    decode.pump()
    assert "runs of" in str(decode.shown[0, 0].last.error)
    assert prefill.machine.peers


def chunk_of(**changes):
    """The chunk that a send of tokens 0 to 4 announces."""
    plain = Chunk(
        generation=1,
        source_worker=0,
        number=0,
        ranges={"full": [TokenRange(first=0, end=4)]},
        length_bytes=3 * 2 * 2 * 8 * 2 * 4,
        last=False,
    )
    return msgspec.structs.replace(plain, **changes)


def test_a_chunk_that_is_planned_alike_here_moves_its_receive():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    decode.machine.on_message(prefill.machine.incarnation, chunk_of(), cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.MOVING


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length_bytes": 1}, "announces 1 bytes, its plan here has 768"),
        ({"ranges": {"swa": [TokenRange(first=0, end=4)]}}, "chunk 0 of room 7"),
        ({"layers": [99]}, "chunk 0 of room 7"),
    ],
)
def test_a_chunk_that_is_planned_otherwise_here_fails_its_receive(change, text):
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    decode.machine.on_message(prefill.machine.incarnation, chunk_of(**change), cluster.now)
    decode.pump()
    assert isinstance(decode.shown[0, 0].last.error, RemoteProtocolError)
    assert text in str(decode.shown[0, 0].last.error)


@pytest.mark.parametrize("change", [{"generation": 9}, {"source_worker": 9}])
def test_what_is_said_of_a_transfer_that_is_not_there_changes_nothing(change):
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    life = prefill.machine.incarnation
    who = {"generation": 1, "source_worker": 0, **change}
    commit = CommitPayload(
        decode_incarnation=decode.machine.incarnation,
        sender_index=0,
        length_bytes=1,
        runs=1,
        digest=bytes(16),
        **who,
    )
    decode.machine.on_message(life, chunk_of(**change), cluster.now)
    decode.machine.on_message(life, Matched(**who), cluster.now)
    decode.machine.on_message(life, Drained(generation=9), cluster.now)
    decode.machine.on_commit(life, commit, cluster.now)
    decode.pump()
    assert decode.shown[0, 0].states == [State.WAITING]
    open_room(cluster, prefill)
    send(prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED


def test_drained_of_a_receive_that_lives_ends_it_and_asks_for_another():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    decode.machine.on_message(prefill.machine.incarnation, Drained(generation=1), cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.error.retryable
    assert "receive it again" in str(decode.shown[0, 0].last.error)
    open_room(cluster, prefill)
    send(prefill)
    cluster.run()
    assert prefill.shown[0, 0].state is State.FAILED, "it was told, and writes nothing"

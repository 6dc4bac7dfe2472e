"""Peers that say what they may not: an error for them, and nothing lost for the others."""

import pytest

from pdxfer.errors import RemoteProtocolError
from pdxfer.protocol.state import State
from pdxfer.wire.messages import CommitPayload, Committed, Drained, Failed, Receive
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
    for (life, worker), debt in list(decode.machine.live[1].debts.items()):
        payload = CommitPayload(
            decode_incarnation=decode.machine.incarnation,
            generation=1,
            source_worker=worker,
            sender_index=debt.sender_index,
            length_bytes=debt.expected_bytes,
            runs=2**64 - 1,
            digest=debt.plan.digest,
        )
        decode.machine.on_commit(life, payload, cluster.now)
    decode.pump()
    assert "runs of" in str(decode.shown[0, 0].last.error)
    assert prefill.machine.peers

"""One test for each guard of a receive: each of them fails where its guard is left out."""

import msgspec
import pytest

from pdxfer import limits
from pdxfer.errors import LocalProtocolError, RemoteProtocolError
from pdxfer.protocol.effects import PostCommit
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from pdxfer.wire.messages import CommitPayload
from tests.support.cluster import ADDRESS, Cluster, full
from tests.support.transfers import layout, open_room, pair, part, receive, send


def commit_of(cluster, prefill, decode):
    """The commit that prefill asks the lane for, which is not carried out."""
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    prefill.machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8, aux=b"aux"))
    [commit] = [e for e in prefill.machine.take_effects() if isinstance(e, PostCommit)]
    return commit.payload


def take_commit(cluster, prefill, decode, payload):
    decode.machine.on_commit(prefill.machine.incarnation, payload, cluster.now)
    decode.pump()


def test_a_commit_that_says_what_was_planned_commits():
    cluster, prefill, decode = pair()
    take_commit(cluster, prefill, decode, commit_of(cluster, prefill, decode))
    assert decode.shown[0, 0].state is State.COMMITTED


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"length_bytes": c.length_bytes - 1}, " are expected"),
        (lambda c: {"length_bytes": c.length_bytes + 1}, " are expected"),
        (lambda c: {"length_bytes": 0, "runs": 0}, "0 bytes, "),
        (lambda c: {"digest": bytes(16)}, "names another plan"),
        (lambda c: {"runs": c.length_bytes + 1}, "runs of"),
        (lambda c: {"aux": bytes(limits.AUX_BYTES_MAX + 1)}, "aux has"),
    ],
)
def test_a_commit_that_says_anything_else_fails_its_receive(change, text):
    cluster, prefill, decode = pair()
    payload = commit_of(cluster, prefill, decode)
    wrong = msgspec.structs.replace(payload, **change(payload))
    take_commit(cluster, prefill, decode, wrong)
    assert decode.shown[0, 0].state is State.FENCING
    assert isinstance(decode.shown[0, 0].last.error, RemoteProtocolError)
    assert text in str(decode.shown[0, 0].last.error)
    take_commit(cluster, prefill, decode, payload)
    assert decode.shown[0, 0].state is State.FENCING, "what has failed is not committed later"


def test_a_commit_of_another_decode_life_is_not_acted_on():
    cluster, prefill, decode = pair()
    payload = commit_of(cluster, prefill, decode)
    other = msgspec.structs.replace(payload, decode_incarnation=b"o" * 16)
    take_commit(cluster, prefill, decode, other)
    assert decode.shown[0, 0].state is State.READY


def test_a_commit_before_the_pages_are_placed_fails_its_receive():
    cluster, _, decode = pair()
    decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now)
    decode.pump()
    cluster.run()
    [((life, worker), leg)] = decode.machine.live[1].legs.items()
    early = CommitPayload(
        decode_incarnation=decode.machine.incarnation,
        generation=1,
        source_worker=worker,
        sender_index=0,
        length_bytes=0,
        runs=0,
        digest=leg.plan.digest,
    )
    decode.machine.on_commit(life, early, cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert "which was told no page" in str(decode.shown[0, 0].last.error)


def test_a_receive_side_that_ended_proves_nothing_of_what_fails_later():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    cluster.network.cut.add((prefill.machine.incarnation, decode.machine.incarnation))
    decode.machine.receiver_closed(prefill.machine.incarnation, "revoked")
    decode.pump()
    assert decode.shown[0, 0].state is State.WAITING
    decode.machine.announce_to(prefill.machine.incarnation)  # a new receive side: writes may land
    decode.pump()
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FENCING
    cluster.network.cut.clear()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "drained"


def test_what_fails_while_there_is_no_receive_side_is_proven_at_once():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    cluster.run()
    cluster.network.cut.add((prefill.machine.incarnation, decode.machine.incarnation))
    decode.machine.receiver_closed(prefill.machine.incarnation, "revoked")
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "revoked"


def test_an_abort_is_told_again_in_a_new_session():
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
    cluster.network.lost.add((ours, theirs))
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    decode.machine.peer_lost(theirs, "silent", cluster.now)
    decode.pump()
    prefill.machine.peer_joined(ours)
    prefill.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.FENCING
    cluster.network.lost.clear()
    cluster.join(decode, prefill)
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "drained"


def test_the_mark_waits_for_receives_that_are_not_bound_yet():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, *part(0))
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    cluster.pass_time(1)
    assert decode.machine.mark(prefill.machine.incarnation) == 1
    prefill.attach(1, *part(1))
    cluster.run()
    for tp in range(2):
        open_room(cluster, prefill, tp)
        send(prefill, tp)
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED


def test_the_mark_waits_for_what_was_given_up_before_it_was_bound():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, *part(0))
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    cluster.pass_time(1)
    prefill.attach(1, *part(1))
    open_room(cluster, prefill, 0)
    cluster.run()
    assert prefill.shown[0, 0].state is State.FAILED
    assert "enough" in str(prefill.shown[0, 0].last.error)


def test_pages_are_placed_once():
    cluster, _, decode = pair()
    receive(cluster, decode)
    decode.machine.place(0, 0, GivenPlaces(full([9, 10]), 8, 0), now=cluster.now)
    decode.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert isinstance(decode.shown[0, 0].last.error, LocalProtocolError)
    assert "its pages are placed already" in str(decode.shown[0, 0].last.error)
    receive(cluster, decode, room=8, ids=(5, 6, 9, 10), slot=1)
    assert decode.shown[0, 1].state is State.WAITING, "all of them are the worker's again"


def test_a_worker_that_departs_keeps_its_memory_until_every_sender_is_proven():
    cluster = Cluster(0)
    prefills, decode = [cluster.prefill(), cluster.prefill()], cluster.decode(silent=False)
    addresses = ("tcp://first:1", "tcp://second:1")
    for tp, (prefill, address) in enumerate(zip(prefills, addresses, strict=True)):
        prefill.attach(tp, *part(tp))
        decode.machine.link_named(address, 0.0)
    decode.attach(0, layout())
    for prefill, address in zip(prefills, addresses, strict=True):
        cluster.join(decode, prefill, address)
    decode.machine._note_instance(addresses)
    decode.pump()
    cluster.run()
    receive(cluster, decode, prefill=addresses)
    cluster.run()
    ours = decode.machine.incarnation
    for prefill in prefills:
        cluster.network.cut.add((prefill.machine.incarnation, ours))
    decode.machine.detach(0, "exits", cluster.now)
    decode.pump()
    for prefill in prefills:
        assert decode.freed == []
        cluster.network.cut.discard((prefill.machine.incarnation, ours))
        cluster.run()
    assert decode.freed == [0]

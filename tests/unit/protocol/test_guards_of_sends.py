"""One test for each guard of a send: each of them fails where its guard is left out."""

import msgspec
import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import LocalProtocolError, PeerError, RemoteProtocolError
from pdxfer.layout import Rank
from pdxfer.protocol.effects import Cancel, ClosePath, OpenPath, Post, PostCommit
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import (
    Abort,
    Attach,
    Committed,
    Drained,
    Failed,
    GroupPages,
    Matched,
    Place,
    Receive,
)
from tests.support.cluster import Cluster, full
from tests.support.transfers import (
    layout,
    one_to_two_agents,
    open_room,
    pair,
    receive,
    send,
    told,
    two_to_one,
)

OLD, NEW = b"o" * 16, b"n" * 16


def receive_of(generation, room=7, **changes):
    """A receive as decode tells of it, without pages."""
    plain = Receive(
        room=room,
        generation=generation,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=1,
    )
    return msgspec.structs.replace(plain, **changes)


def attach_of(address, revision=1):
    """An `Attach` with one worker and this receive side."""
    worker = Worker(0, "", Rank(), layout(), "never", ())
    return Attach(revision=revision, workers=[worker.info()], lane="inproc", lane_address=address)


def groups_of(ids):
    """Pages of the only group, as they are told."""
    packed = np.asarray(ids, dtype="<i4").tobytes()
    return {"full": GroupPages(first_token=0, encoding="i4", ids=packed)}


def bare():
    """A prefill machine with a worker, and a decode life that has attached over an open path."""
    machine = PrefillMachine(b"p" * 16)
    machine.attach(Worker(0, "", Rank(), layout(), "never", ()))
    machine.on_message(OLD, attach_of(b"one"), 0.0)
    machine.on_path_opened(OLD, "")
    machine.take_effects()
    return machine


def deliver_all(cluster):
    """Every control message arrives; the lane stands still."""
    while cluster.deliver_one():
        pass


def bytes_at(node):
    return [part.copy() for part in node.memory[0]]


def test_drained_is_not_said_of_a_broken_path_whose_bytes_are_on_their_way():
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode, ids=range(1, 15))
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=range(1, 15))
    for _ in range(3):
        cluster.hub.step(cluster.rng)
    prefill.fabric.paths[decode.machine.incarnation].fail("cut", late_runs=3)
    decode.machine.abort(0, 0, "enough", cluster.now)  # before prefill hears of the path's end
    decode.pump()
    deliver_all(cluster)
    assert prefill.shown[0, 0].state is State.FENCING
    assert decode.shown[0, 0].state is State.FENCING
    before = bytes_at(decode)
    cluster.run()
    late = any(not np.array_equal(a, b) for a, b in zip(before, bytes_at(decode), strict=True))
    assert late, "they have landed behind the end of the path"
    assert prefill.shown[0, 0].state is State.FAILED, "nothing reads its pages any more"
    assert decode.shown[0, 0].state is State.FENCING, "and no Drained has said that none could"


def test_an_abort_with_writes_in_flight_is_answered_once_the_lane_has_none():
    cluster, prefill, decode = pair()
    receive(cluster, decode, ids=range(1, 15))
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=range(1, 15))
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    deliver_all(cluster)
    assert cluster.hub.ready(), "the lane has not said that it has dropped them"
    assert prefill.shown[0, 0].state is State.FENCING
    assert decode.shown[0, 0].state is State.FENCING
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "drained"


def one_batch():
    """A pair whose next send is one batch, matched, on a lane whose end proves nothing."""
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode(silent=False)
    prefill.attach(0, layout(layers=range(1)))
    decode.attach(0, layout(layers=range(1)))
    cluster.join(decode, prefill)
    cluster.run()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    return cluster, prefill, decode


def test_a_write_that_failed_proves_nothing_of_where_its_bytes_are():
    cluster, prefill, decode = one_batch()
    send(prefill, ids=(2,), last=False)
    prefill.fabric.paths[decode.machine.incarnation].fail("cut", late_runs=1)
    prefill.take_lane_events()
    deliver_all(cluster)
    assert decode.shown[0, 0].state is State.FENCING
    before = bytes_at(decode)
    cluster.run()
    assert any(not np.array_equal(a, b) for a, b in zip(before, bytes_at(decode), strict=True))
    assert prefill.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].state is State.FENCING


def test_the_only_write_in_flight_fails_and_the_lane_is_asked_for_its_end():
    cluster, prefill, decode = one_batch()
    life = decode.machine.incarnation
    prefill.machine.send(0, 0, GivenChunk(full([2]), last=False))
    [post] = [e for e in prefill.machine.take_effects() if isinstance(e, Post)]
    assert len(post.chunk.batches().splits) == 2
    prefill.machine.on_batch(life, 1, 0, 0, length_bytes=0, runs=0, error="no answer", ended=True)
    prefill.machine.on_message(life, Abort(generation=1), cluster.now)
    effects = prefill.machine.take_effects()
    assert [e for e in effects if isinstance(e, Cancel)] == [Cancel(life, 1)]
    assert not any(isinstance(getattr(e, "message", None), Drained) for e in effects)
    assert prefill.machine.sendings[0, 7].state is State.FENCING
    prefill.machine.on_cancelled(life, 1)
    assert (life, Drained(generation=1)) in told(prefill.machine)


@pytest.mark.parametrize("missing", [0, 1])
def test_bytes_that_were_not_placed_are_an_error_though_the_lane_tells_none(missing):
    cluster, prefill, decode = one_batch()
    life = decode.machine.incarnation
    prefill.machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8))
    effects = prefill.machine.take_effects()
    [post] = [e for e in effects if isinstance(e, Post)]
    [commit] = [e for e in effects if isinstance(e, PostCommit)]
    placed = commit.payload.length_bytes - missing
    assert len(post.chunk.batches().splits) == 2
    prefill.machine.on_batch(life, 1, 0, 0, length_bytes=placed, runs=1, error="", ended=True)
    prefill.machine.on_commit_sent(life, 1, 0, error="")
    prefill.pump()
    if not missing:
        assert prefill.shown[0, 0].state is State.SENT
        return
    assert prefill.shown[0, 0].state is State.FENCING
    assert isinstance(prefill.shown[0, 0].last.error, LocalProtocolError)
    assert f"placed {placed} of {placed + 1} bytes" in str(prefill.shown[0, 0].last.error)
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED


def test_an_abort_that_overtakes_its_receive_ends_it():
    machine = bare()
    machine.on_message(OLD, Abort(generation=5, reason="enough"), 0.0)
    assert told(machine) == [(OLD, Drained(generation=5))]
    machine.on_message(OLD, receive_of(5), 0.0)
    assert told(machine) == [(OLD, Drained(generation=5))]
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    assert not any(isinstance(message, Matched) for _, message in told(machine))
    assert sending.state is State.FAILED


def test_the_send_of_an_aborted_receive_hears_why_when_it_comes():
    machine = bare()
    machine.on_message(OLD, receive_of(5), 0.0)
    machine.on_message(OLD, Abort(generation=5, reason="enough"), 0.0)
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    assert "aborted by decode: enough" in str(sending.error)


@pytest.mark.parametrize("path", ["none", "closed"])
def test_a_life_that_has_no_path_is_called_drained_at_once(path):
    machine = bare()
    if path == "closed":
        machine.peer_lost(OLD, "goodbye")
        machine.on_path_closed(OLD, "", drained=True)
        machine.take_effects()
    life = OLD if path == "closed" else b"u" * 16
    machine.on_message(NEW, Abort(decode_incarnation=life, reason="restarted"), 0.0)
    assert told(machine) == [(NEW, Drained(decode_incarnation=life))]


def test_a_new_session_that_attaches_while_the_old_path_closes_gets_its_own():
    machine = bare()
    machine.peer_joined(OLD)
    machine.on_message(OLD, attach_of(b"two"), 0.0)
    machine.take_effects()
    machine.on_path_closed(OLD, "", drained=True)
    opened = [e for e in machine.take_effects() if isinstance(e, OpenPath)]
    assert opened == [OpenPath(OLD, "inproc", b"two")]
    machine.on_path_opened(OLD, "")
    machine.on_message(OLD, receive_of(1), 0.0)
    machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    machine.take_effects()
    machine.abort(0, 0, "enough")
    assert [type(message) for _, message in told(machine)] == [Failed], "it is there to be told"


def test_a_life_is_called_drained_once_its_path_is_closed():
    machine = bare()
    machine.on_message(NEW, Abort(decode_incarnation=OLD, reason="restarted"), 0.0)
    effects = machine.take_effects()
    assert [e for e in effects if isinstance(e, ClosePath)] == [ClosePath(OLD)]
    assert not any(isinstance(getattr(e, "message", None), Drained) for e in effects)
    machine.on_path_closed(OLD, "", drained=True)
    assert told(machine) == [(NEW, Drained(decode_incarnation=OLD))]


def test_a_life_whose_path_broke_with_writes_on_it_is_never_called_drained():
    machine = bare()
    machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    place = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([5, 6]))
    machine.on_message(OLD, receive_of(1, place=place), 0.0)
    machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8))
    machine.on_message(NEW, Abort(decode_incarnation=OLD, reason="restarted"), 0.0)
    machine.on_path_closed(OLD, "cut", drained=False)
    assert not any(isinstance(message, Drained) for _, message in told(machine))
    machine.on_message(NEW, Abort(decode_incarnation=OLD, reason="restarted"), 0.0)
    assert not any(isinstance(message, Drained) for _, message in told(machine))


@pytest.mark.parametrize("how", ["lost", "new session"])
def test_a_receive_that_waits_ends_with_its_session(how):
    machine = bare()
    place = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([5, 6]))
    machine.on_message(OLD, receive_of(1, place=place), 0.0)
    if how == "lost":
        machine.peer_lost(OLD, "silent")
    else:
        machine.peer_joined(OLD)
        machine.on_path_closed(OLD, "", drained=True)
        machine.on_message(OLD, attach_of(b"two"), 0.0)
        machine.on_path_opened(OLD, "")
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8))
    effects = machine.take_effects()
    assert not any(isinstance(e, Post) for e in effects)
    assert not any(isinstance(getattr(e, "message", None), Matched) for e in effects)
    assert sending.state is State.FAILED, "decode has given this room up meanwhile"
    assert isinstance(sending.error, PeerError)
    assert sending.error.retryable


@pytest.mark.parametrize("opened", [True, False])
def test_a_second_place_fails_the_send_and_writes_nothing(opened):
    machine = bare()
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    first = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([5, 6]))
    second = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([9, 10]))
    machine.on_message(OLD, receive_of(1), 0.0)
    if opened:
        machine.send(0, 0, GivenChunk(full([2]), tokens=8, last=False))
    machine.on_message(OLD, first, 0.0)
    machine.take_effects()
    machine.on_message(OLD, second, 0.0)
    effects = machine.take_effects()
    assert not any(isinstance(e, Post) for e in effects)
    assert isinstance(sending.error, RemoteProtocolError)
    assert "placed twice" in str(sending.error)


@pytest.mark.parametrize("with_receive", [True, False])
def test_a_second_place_of_a_receive_that_waits_is_refused_and_replaces_nothing(with_receive):
    machine = bare()
    first = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([5, 6]))
    second = Place(generation=1, source_worker=0, tokens=8, groups=groups_of([9, 10]))
    machine.on_message(OLD, receive_of(1, place=first if with_receive else None), 0.0)
    if not with_receive:
        machine.on_message(OLD, first, 0.0)
    assert not told(machine)
    machine.on_message(OLD, second, 0.0)
    [(peer, message)] = told(machine)
    assert (peer, type(message), message.generation) == (OLD, Failed, 1)
    assert "placed twice" in message.text
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    assert sending.state is State.FAILED
    assert "placed twice" in str(sending.error)
    machine.on_message(OLD, Abort(generation=1), 0.0)
    assert (OLD, Drained(generation=1)) in told(machine)


def test_drained_is_said_unasked_once_a_failed_send_has_nothing_on_the_lane():
    cluster, prefill, decode = one_batch()
    life = decode.machine.incarnation
    prefill.machine.send(0, 0, GivenChunk(full([2]), last=False))
    prefill.machine.take_effects()
    prefill.machine.on_batch(life, 1, 0, 0, length_bytes=0, runs=0, error="no answer", ended=True)
    assert not any(isinstance(message, Drained) for _, message in told(prefill.machine))
    prefill.machine.on_cancelled(life, 1)
    assert told(prefill.machine).count((life, Drained(generation=1))) == 1
    prefill.machine.on_message(life, Abort(generation=1), cluster.now)
    assert (life, Drained(generation=1)) in told(prefill.machine), "and again where decode asks"


def test_a_committed_receive_that_waits_is_forgotten_when_no_send_comes_in_time():
    machine = bare()
    machine.on_message(OLD, receive_of(1), 0.0)
    machine.on_message(OLD, Committed(generation=1), 10.0)
    peer = machine.peers[OLD]
    machine.tick(10.0 + limits.UNMATCHED_DEADLINE_S - 0.1)
    assert 1 in peer.waiting, "a send that owes it nothing may still come"
    assert 1 in peer.committed
    machine.tick(10.0 + limits.UNMATCHED_DEADLINE_S)
    assert 1 not in peer.waiting
    assert 1 not in peer.committed


def test_a_peer_that_names_more_workers_than_an_agent_has_ends_its_session(monkeypatch):
    monkeypatch.setattr(limits, "WORKERS_PER_AGENT_MAX", 2)
    machine = PrefillMachine(b"p" * 16)
    workers = [Worker(n, str(n), Rank(), layout(), "never", ()).info() for n in range(3)]
    attach = msgspec.structs.replace(attach_of(b"one"), workers=workers[:2])
    machine.on_message(OLD, attach, 0.0)
    assert set(machine.peers[OLD].workers) == {0, 1}
    with pytest.raises(RemoteProtocolError, match="names 3 workers, at most 2"):
        machine.on_message(OLD, msgspec.structs.replace(attach, workers=workers), 0.0)
    assert set(machine.peers[OLD].workers) == {0, 1}, "nothing has changed"


def test_a_second_receiver_with_the_index_of_the_first_is_refused_alone():
    cluster, prefill, decodes = one_to_two_agents()
    open_room(cluster, prefill)
    receive(cluster, decodes[0], 0)
    cluster.run()
    life = decodes[1].machine.incarnation
    twin = receive_of(50, destination_worker=1, receiver_index=0, receiver_count=2)
    prefill.machine.on_message(life, twin, cluster.now)
    [(peer, message)] = told(prefill.machine)
    assert (peer, type(message), message.generation) == (life, Failed, 50)
    assert "receiver 0 of 2 is bound already" in message.text
    receive(cluster, decodes[1], 1)
    send(prefill)
    cluster.run()
    for worker, decode in enumerate(decodes):
        assert decode.shown[worker, 0].state is State.COMMITTED


def test_a_send_is_committed_when_every_receiver_is_and_not_at_the_first():
    cluster, prefill, decodes = one_to_two_agents()
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    way = (decodes[1].machine.incarnation, prefill.machine.incarnation)
    cluster.network.cut.add(way)
    send(prefill)
    cluster.run()
    assert decodes[0].shown[0, 0].state is State.COMMITTED
    assert prefill.shown[0, 0].state is State.SENT
    cluster.network.cut.clear()
    cluster.run()
    assert prefill.shown[0, 0].state is State.COMMITTED


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_waiting_receives_of_one_receiver_the_newer_is_matched(order):
    machine = bare()
    for generation in order:
        machine.on_message(OLD, receive_of(generation), 0.0)
    machine.take_effects()
    machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    matched = [m.generation for _, m in told(machine) if isinstance(m, Matched)]
    assert matched == [2]


@pytest.mark.parametrize("state", [State.READY, State.MOVING, State.SENT])
def test_a_lost_lease_ends_a_send_in_every_state_that_waits_for_decode(state):
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    cluster.network.cut.add((decode.machine.incarnation, prefill.machine.incarnation))
    if state is not State.READY:
        send(prefill, last=state is State.SENT)
    if state is State.SENT:
        cluster.run()
    assert prefill.shown[0, 0].state is state
    cluster.pass_time(29, heartbeats=False)
    assert prefill.shown[0, 0].state is state
    cluster.pass_time(2, heartbeats=False)
    assert prefill.shown[0, 0].state is State.FAILED
    assert isinstance(prefill.shown[0, 0].last.error, PeerError)
    assert "lease" in str(prefill.shown[0, 0].last.error)


def test_when_one_source_worker_fails_the_others_of_its_agent_stop_at_once():
    cluster, prefill, decode = two_to_one()
    receive(cluster, decode)
    for tp in range(2):
        open_room(cluster, prefill, tp)
    cluster.run()
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    assert [prefill.shown[tp, 0].state for tp in range(2)] == [State.FAILED] * 2
    assert "enough" in str(prefill.shown[1, 0].last.error)
    send(prefill, 1)
    assert not cluster.hub.ready(), "nothing is written for a transfer that has failed"


def test_a_new_receive_side_closes_the_path_to_the_old_one_first():
    machine = bare()
    machine.on_message(OLD, attach_of(b"two", 2), 0.0)
    effects = machine.take_effects()
    assert [e for e in effects if isinstance(e, ClosePath | OpenPath)] == [ClosePath(OLD)]
    machine.on_path_closed(OLD, "", drained=True)
    opened = [e for e in machine.take_effects() if isinstance(e, OpenPath)]
    assert opened == [OpenPath(OLD, "inproc", b"two")]

"""What lost lives, refused links and changed verdicts mean for rooms that wait."""

import msgspec

from pdxfer import limits
from pdxfer.errors import LayoutMismatchError, PeerError, ResourceError
from pdxfer.layout import Rank
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Abort, Attach, Failed, Matched, Receive
from tests.support.cluster import ADDRESS
from tests.support.transfers import layout, open_room, pair, receive, send, told

LIFE = b"o" * 16
RECEIVE = Receive(
    room=7,
    generation=1,
    source_worker=0,
    destination_worker=0,
    receiver_index=0,
    receiver_count=1,
)


def worker_of(**changes):
    return Worker(0, "", Rank(), layout(**changes), "never", ())


def attach_of(worker, revision):
    return Attach(revision=revision, workers=[worker.info()], lane="inproc", lane_address=b"one")


def bare():
    """A prefill machine with a worker, and a decode life that has attached over an open path."""
    machine = PrefillMachine(b"p" * 16)
    machine.attach(worker_of())
    machine.on_message(LIFE, attach_of(worker_of(), 1), 0.0)
    machine.on_path_opened(LIFE, "")
    machine.take_effects()
    return machine


def test_a_verdict_that_changed_while_a_receive_waited_refuses_it():
    machine = bare()
    machine.on_message(LIFE, RECEIVE, 0.0)
    machine.on_message(LIFE, attach_of(worker_of(dtype="float16"), 2), 0.0)
    machine.take_effects()
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    messages = [message for _, message in told(machine)]
    assert [type(message) for message in messages] == [Failed]
    assert messages[0].code == LayoutMismatchError.code
    assert sending.state is State.FAILED
    assert isinstance(sending.error, LayoutMismatchError)


def test_no_more_receives_wait_than_a_session_may_have(monkeypatch):
    monkeypatch.setattr(limits, "UNMATCHED_PER_SESSION_MAX", 2)
    machine = bare()
    for generation in (1, 2, 3):
        message = msgspec.structs.replace(RECEIVE, generation=generation, room=6 + generation)
        machine.on_message(LIFE, message, 0.0)
    [(_, refused)] = told(machine)
    assert (refused.generation, refused.code, refused.retryable) == (3, ResourceError.code, True)
    machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    assert [m.generation for _, m in told(machine) if isinstance(m, Matched)] == [1]


def test_a_lost_life_is_told_nothing_and_forgotten_behind_its_last_receive():
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode)
    cluster.run()
    life = prefill.machine.incarnation
    decode.machine.peer_lost(life, "silent", cluster.now)
    assert not [message for _, message in told(decode.machine) if isinstance(message, Abort)]
    assert life in decode.machine.peers, "its proof is awaited"
    decode.machine.sender_dead(life)
    assert life not in decode.machine.peers
    assert not decode.machine.live


def test_a_lost_life_that_no_receive_is_bound_to_is_forgotten_at_once():
    cluster, prefill, decode = pair()
    decode.machine.peer_lost(prefill.machine.incarnation, "silent", cluster.now)
    assert prefill.machine.incarnation not in decode.machine.peers


def test_a_refused_link_fails_the_rooms_that_wait_on_it():
    cluster, _, decode = pair()
    receive(cluster, decode)
    cluster.run()
    receive(cluster, decode, room=8, ids=(9,), slot=1, prefill=("tcp://other:1",))
    decode.machine.link_refused(ADDRESS, PeerError("keys differ"), cluster.now)
    decode.pump()
    assert decode.shown[0, 0].state is State.FENCING
    assert "keys differ" in str(decode.shown[0, 0].last.error)
    assert decode.shown[0, 1].state is State.WAITING, "it names another address"


def test_a_fence_waits_for_its_proof_before_it_is_shown_as_a_quarantine():
    cluster, prefill, decode = pair(silent=False)
    receive(cluster, decode)
    open_room(cluster, prefill)
    send(prefill)
    cluster.network.cut.add((prefill.machine.incarnation, decode.machine.incarnation))
    decode.machine.abort(0, 0, "enough", cluster.now)
    decode.pump()
    cluster.pass_time(limits.FENCE_DEADLINE_S - 1)
    assert decode.shown[0, 0].state is State.FENCING
    cluster.pass_time(2)
    assert decode.shown[0, 0].state is State.QUARANTINED
    cluster.network.cut.clear()
    cluster.run()
    assert decode.shown[0, 0].state is State.FAILED
    assert decode.shown[0, 0].last.fence == "drained"

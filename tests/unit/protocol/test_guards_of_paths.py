"""What a path that opens or closes, and a life that is lost, mean for the sends that use it."""

import pytest

from pdxfer.layout import Rank
from pdxfer.protocol.effects import ClosePath
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Attach, Drained, Failed, Matched, Place, Receive
from tests.support.transfers import layout, open_room, pair, receive, send, told

LIFE = b"o" * 16


def matched():
    """A prefill machine, and its send that a decode life has received and placed nothing of."""
    machine = PrefillMachine(b"p" * 16)
    worker = Worker(0, "", Rank(), layout(), "never", ())
    machine.attach(worker)
    attach = Attach(revision=1, workers=[worker.info()], lane="inproc", lane_address=b"one")
    machine.on_message(LIFE, attach, 0.0)
    machine.on_path_opened(LIFE, "")
    sending = machine.open(0, 7, 0, deadline=60.0, lease_s=30.0)
    message = Receive(
        room=7,
        generation=1,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=1,
    )
    machine.on_message(LIFE, message, 0.0)
    assert any(isinstance(message, Matched) for _, message in told(machine))
    return machine, sending


@pytest.mark.parametrize("drained", [True, False])
def test_a_path_that_closes_ends_the_matched_sends_that_have_nothing_on_it(drained):
    machine, sending = matched()
    machine.on_path_closed(LIFE, "cut", drained=drained)
    assert sending.state is State.FAILED
    assert [m for _, m in told(machine) if isinstance(m, Failed)]


def test_a_lost_life_without_a_path_ends_its_sends_at_once():
    cluster, prefill, decode = pair()
    prefill.fabric.paths[decode.machine.incarnation].fail("cut")
    cluster.run()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    assert prefill.shown[0, 0].state is State.READY
    prefill.machine.peer_lost(decode.machine.incarnation, "goodbye")
    prefill.pump()
    assert prefill.shown[0, 0].state is State.FAILED
    assert "goodbye" in str(prefill.shown[0, 0].last.error)


def test_a_path_that_opens_to_a_life_that_is_forgotten_is_closed():
    machine, _ = matched()
    machine.on_path_opened(b"u" * 16, "")
    assert machine.take_effects() == [ClosePath(b"u" * 16)]


def test_a_generation_that_has_ended_is_not_matched_again():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    cluster.run()
    assert prefill.shown[0, 0].state is State.COMMITTED
    open_room(cluster, prefill, slot=1)
    again = Receive(
        room=7,
        generation=1,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=1,
        place=Place(generation=1, source_worker=0, tokens=8),
    )
    prefill.machine.on_message(decode.machine.incarnation, again, cluster.now)
    messages = [type(message) for _, message in told(prefill.machine)]
    assert Drained in messages
    assert Matched not in messages

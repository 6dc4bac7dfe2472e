"""A send to two decode agents: what one leg suffers, and what the other may still do."""

import numpy as np
import pytest

from pdxfer.protocol.effects import PostCommit
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Chunk, Failed, Matched, Receive
from tests.support.transfers import one_to_two_agents, open_room, pair, receive, send, told


def lives_of(decodes):
    return [decode.machine.incarnation for decode in decodes]


def deliver_all(cluster):
    """Every control message arrives; the lane stands still."""
    while cluster.deliver_one():
        pass


def half_blocked():
    """Both receivers have placed pages and all is sent; only the first one's path is open."""
    cluster, prefill, decodes = one_to_two_agents()
    prefill.fabric.paths[lives_of(decodes)[1]].fail("cut")
    cluster.run()
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill)
    assert prefill.shown[0, 0].state is State.MOVING
    return cluster, prefill, decodes


def test_a_path_that_opens_while_its_send_ends_is_given_no_write():
    cluster, prefill, decodes = half_blocked()
    first, second = decodes
    first.machine.abort(0, 0, "enough", cluster.now)
    first.pump()
    deliver_all(cluster)
    assert prefill.shown[0, 0].state is State.FENCING
    second.machine.announce_to(prefill.machine.incarnation)
    second.pump()
    deliver_all(cluster)
    prefill.take_lane_events()  # the path to the second is open
    assert not prefill.fabric.paths[second.machine.incarnation].work
    before = [part.copy() for part in second.memory[1]]
    cluster.run()
    assert second.shown[1, 0].state is State.FAILED
    for was, now in zip(before, second.memory[1], strict=True):
        assert np.array_equal(was, now)


def test_a_path_that_opens_late_moves_its_leg_and_asks_for_no_commit_twice():
    _, prefill, decodes = half_blocked()
    _, second = lives_of(decodes)
    prefill.machine.on_path_opened(second, "")
    commits = [e.peer for e in prefill.machine.take_effects() if isinstance(e, PostCommit)]
    assert commits == [second]


def test_source_pages_come_back_when_both_legs_are_drained_and_not_at_the_first():
    cluster, prefill, decodes = one_to_two_agents()
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, last=False)
    prefill.machine.abort(0, 0, "enough")
    prefill.pump()
    for life in lives_of(decodes):
        assert prefill.shown[0, 0].state is State.FENCING
        while prefill.fabric.paths[life].work:
            prefill.fabric.paths[life].step()
        prefill.take_lane_events()
    assert prefill.shown[0, 0].state is State.FAILED


def test_a_receiver_whose_leg_is_drained_hears_it_when_the_whole_send_is():
    cluster, prefill, decodes = one_to_two_agents()
    for tp, decode in enumerate(decodes):
        receive(cluster, decode, tp)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, last=False)
    decodes[0].machine.abort(0, 0, "enough", cluster.now)
    decodes[0].pump()
    cluster.run()
    for tp, decode in enumerate(decodes):
        assert decode.shown[tp, 0].state is State.FAILED
        assert decode.shown[tp, 0].last.fence == "drained"


def test_a_chunk_is_announced_once():
    cluster, prefill, decode = pair()
    receive(cluster, decode)
    open_room(cluster, prefill)
    cluster.run()
    send(prefill, ids=(2,), last=False)
    announced = []
    for second in range(3):
        prefill.machine.tick(cluster.now + second)
        announced += [m.number for _, m in told(prefill.machine) if isinstance(m, Chunk)]
    assert announced == [0]


@pytest.mark.parametrize("open_first", [True, False])
def test_a_receive_refused_at_one_source_worker_is_not_matched_at_another(open_first):
    cluster, prefill, decode = pair()
    life = decode.machine.incarnation
    if open_first:
        open_room(cluster, prefill)

    def receive_from(worker):
        message = Receive(
            room=7,
            generation=9,
            source_worker=worker,
            destination_worker=0,
            receiver_index=0,
            receiver_count=1,
        )
        prefill.machine.on_message(life, message, cluster.now)
        return [type(message) for _, message in told(prefill.machine)]

    assert receive_from(5) == [Failed]  # no such worker is attached
    assert Matched not in receive_from(0)
    if not open_first:
        prefill.machine.open(0, 7, 0, deadline=cluster.now + 60, lease_s=30.0)
        assert Matched not in [type(message) for _, message in told(prefill.machine)]
    assert prefill.machine.sendings.get((0, 7)) is None, "it ends with its transfer"

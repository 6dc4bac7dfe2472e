"""Waiting, polling, listing and ending of transfers."""

import sys
import threading
import time
import timeit

import pytest

from pdxfer import limits
from pdxfer.client import Commit, State
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    PeerError,
    ResourceError,
    TransferError,
)
from pdxfer.local.messages import AbortTransfer, OpenReceive, Outcome, Refused, ReleaseSlot

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


@pytest.fixture
def receiving(decode):
    return decode.receive(7, PREFILL, [1])


def in_thread(function):
    """Run beside this thread; the result, or the exception, by `join()`."""
    results = []

    def run():
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 handed to the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return results[0]

    return join


@pytest.mark.parametrize(
    ("until", "shown"),
    [
        (State.WAITING, State.WAITING),
        (State.READY, State.READY),
        (State.READY, State.MOVING),
        (State.READY, State.COMMITTED),
        (State.MOVING, State.COMMITTED),
        (State.SENT, State.SENT),
        (State.SENT, State.COMMITTED),
        (State.COMMITTED, State.COMMITTED),
        (State.FAILED, State.COMMITTED),
    ],
)
def test_a_later_good_state_satisfies_a_wait(decode_agent, receiving, until, shown):
    decode_agent.show(7, shown)
    assert isinstance(receiving.wait(WAIT_S, until=until), Commit)


@pytest.mark.parametrize(
    ("until", "shown"),
    [
        (State.COMMITTED, State.SENT),
        (State.COMMITTED, State.FENCING),
        (State.READY, State.FENCING),
        (State.READY, State.WAITING),
        (State.FAILED, State.QUARANTINED),
        (State.FAILED, State.MOVING),
    ],
)
def test_other_states_do_not(decode_agent, receiving, until, shown):
    decode_agent.show(7, shown, error=TransferError("x"))
    with pytest.raises(TimeoutError, match=f"room 7 is {shown.name} after timeout_s=0.01"):
        receiving.wait(0.01, until=until)


@pytest.mark.parametrize("until", [State.FENCING, State.QUARANTINED, 9])
def test_what_cannot_be_waited_for(receiving, until):
    with pytest.raises(ConfigError, match="until="):
        receiving.wait(1, until=until)


@pytest.mark.parametrize("fence", ["drained", "revoked", "dead"])
def test_failure_raises_the_agents_error(decode_agent, decode, receiving, fence):
    error = TransferError("lane broke", fence=fence, retryable=True, fields={"lane": "tcp"})
    decode_agent.show(7, State.FENCING, error=TransferError("lane broke", fence="quarantined"))
    assert receiving.error is not None
    assert not receiving.pages_returned
    decode_agent.show(7, State.FAILED, error=error)
    for _ in range(2):
        with pytest.raises(TransferError, match="lane broke") as caught:
            receiving.wait(WAIT_S)
        assert caught.value.fence == fence
        assert caught.value.retryable
        assert caught.value.fields["lane"] == "tcp"
    assert receiving.pages_returned
    assert isinstance(receiving.error, TransferError)
    assert decode.finished() == [receiving]


def test_quarantine_raises_and_is_listed_again_when_it_ends(decode_agent, decode, receiving):
    decode_agent.show(
        7, State.QUARANTINED, error=PeerError("gone", fields={"fence": "quarantined"})
    )
    with pytest.raises(PeerError, match="gone"):
        receiving.wait(WAIT_S)
    assert not receiving.pages_returned
    assert decode.finished() == [receiving]
    assert decode.finished() == []
    assert decode_agent.count(ReleaseSlot) == 0
    decode_agent.show(7, State.FAILED, error=PeerError("gone", fields={"fence": "dead"}))
    with pytest.raises(PeerError):
        receiving.wait(WAIT_S, until=State.FAILED)
    assert receiving.pages_returned
    assert decode.finished() == [receiving]
    assert decode.finished() == []
    assert decode_agent.next(ReleaseSlot).transfer == receiving.slot


def test_wait_is_woken_by_the_board(decode_agent, receiving):
    join = in_thread(lambda: receiving.wait(WAIT_S, until=State.READY))
    decode_agent.show(7, State.READY, outcome=False)
    assert join() == Commit(0, 0, b"", "")


def test_final_state_waits_for_its_outcome(decode_agent, receiving):
    """Should the word be seen before the outcome has been read, nothing is made up."""
    decode_agent.show(7, State.COMMITTED, outcome=False)
    with pytest.raises(TimeoutError):
        receiving.wait(0.02)
    decode_agent.show(7, State.COMMITTED, length_bytes=5)
    assert receiving.wait(WAIT_S).length_bytes == 5


def test_poll_is_one_memory_read(decode_agent, receiving):
    for state in State:
        if state not in (State.COMMITTED, State.FAILED):
            decode_agent.show(7, state, error=TransferError("x"))
            assert receiving.poll() is receiving.state is state
    if sys.gettrace() is None:
        best = min(timeit.repeat(receiving.poll, number=10_000, repeat=20)) / 10_000
        assert best < 1e-6


def test_finished_makes_no_system_call_while_nothing_changes(decode_agent, decode, monkeypatch):
    held = [decode.receive(room, PREFILL, [room]) for room in range(1, 6)]
    decode_agent.show(2, State.MOVING)
    assert decode.finished() == []

    def forbidden(*args):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(decode.channel, "_poll", forbidden)
        patch.setattr(decode.channel, "_sock", None)
        for _ in range(3):
            assert decode.finished() == []
    decode_agent.show(4, State.COMMITTED)
    decode_agent.show(1, State.FAILED, error=TransferError("x"))
    assert sorted(transfer.room for transfer in decode.finished()) == [1, 4]
    assert decode.finished() == []
    assert held[3].wait(0) == Commit(0, 0, b"", "")


def test_finished_waits_for_the_outcome(decode_agent, decode, receiving):
    decode_agent.show(7, State.COMMITTED, outcome=False)
    assert decode.finished() == []
    decode_agent.show(7, State.COMMITTED, aux=b"a")
    assert decode.finished() == [receiving]
    assert receiving.wait(0).aux == b"a"


def test_slots_are_given_back_without_finished(decode_agent, decode):
    """An application that only waits, or only polls, never runs out of slots."""
    for room in range(1, 4 * decode_agent.slots):
        receiving = decode.receive(room, PREFILL, [1])
        decode_agent.show(room, State.COMMITTED)
        assert receiving.poll() is State.COMMITTED
    assert decode_agent.board().live <= 1
    assert len(decode.finished()) == 4 * decode_agent.slots - 1


def test_finished_list_is_bounded(decode_agent, decode, monkeypatch):
    assert decode._ended.maxlen == limits.FINISHED_KEPT_MAX


def test_slots_run_out_with_a_typed_error(decode_agent, decode):
    for room in range(1, decode_agent.slots + 1):
        decode.receive(room, PREFILL, [1])
    with pytest.raises(ResourceError, match="all 8 transfers") as caught:
        decode.receive(99, PREFILL, [1])
    assert caught.value.retryable


def test_released_transfer_keeps_its_state_when_the_slot_is_used_again(decode_agent, decode):
    first = decode.receive(1, PREFILL, [1])
    decode_agent.show(1, State.COMMITTED, aux=b"one")
    assert decode.finished() == [first]
    decode_agent.next(ReleaseSlot)
    others = [decode.receive(room, PREFILL, [1]) for room in range(2, 2 + decode_agent.slots)]
    assert {other.slot for other in others} >= {first.slot}
    assert first.poll() is State.COMMITTED
    assert first.wait(0).aux == b"one"
    assert all(other.poll() is State.WAITING for other in others)


def test_abort_is_sent_once(decode_agent, receiving):
    receiving.abort("changed my mind")
    receiving.abort("twice")
    message = decode_agent.next(AbortTransfer)
    assert (message.transfer, message.sequence) == (receiving.slot, receiving.sequence)
    assert message.reason == "changed my mind"
    decode_agent.show(7, State.FAILED, error=TransferError("aborted: changed my mind"))
    with pytest.raises(TransferError, match="changed my mind"):
        receiving.wait(WAIT_S, until=State.FAILED)
    assert decode_agent.count(AbortTransfer) == 0


def test_abort_of_a_final_transfer_does_nothing(decode_agent, decode, receiving):
    decode_agent.show(7, State.COMMITTED)
    receiving.wait(WAIT_S)
    receiving.abort()
    decode.receive(8, PREFILL, [2])
    assert decode_agent.count(AbortTransfer) == 0


def test_agent_dies_under_a_wait(decode_agent, decode, receiving):
    decode_agent.show(7, State.MOVING)
    joins = [in_thread(lambda: receiving.wait(WAIT_S)) for _ in range(3)]
    decode_agent.die()
    for join in joins:
        error = join()
        assert isinstance(error, DaemonUnavailableError)
        assert "is gone" in str(error)
    assert receiving.poll() is State.QUARANTINED
    assert not receiving.pages_returned
    assert isinstance(receiving.error, DaemonUnavailableError)
    assert receiving.error.fields["fence"] == "quarantined"
    assert decode.finished() == [receiving]
    assert decode.finished() == []
    receiving.abort()
    with pytest.raises(DaemonUnavailableError):
        decode.receive(8, PREFILL)
    with pytest.raises(DaemonUnavailableError):
        decode.connect(PREFILL)


def test_words_before_the_agents_death_still_count(decode_agent, decode, receiving):
    decode_agent.show(7, State.COMMITTED, aux=b"last")
    decode_agent.die()
    assert receiving.wait(WAIT_S).aux == b"last"
    assert decode.finished() == [receiving]


def test_agent_dies_between_outcome_and_word(decode_agent, receiving):
    decode_agent.show(7, State.COMMITTED, publish=False)
    decode_agent.die()
    with pytest.raises(DaemonUnavailableError):
        receiving.wait(WAIT_S)
    assert receiving.poll() is State.QUARANTINED


def test_many_threads_wait_on_one_client(decode_agent, decode):
    rooms = range(1, 7)
    held = {room: decode.receive(room, PREFILL, [room]) for room in rooms}
    joins = {
        room: in_thread(lambda each=held[room]: each.wait(WAIT_S).length_bytes) for room in rooms
    }
    for room in reversed(rooms):
        decode_agent.show(room, State.READY)
        decode_agent.show(room, State.COMMITTED, length_bytes=room)
    assert {room: join() for room, join in joins.items()} == {room: room for room in rooms}


def test_requests_and_waits_from_two_threads(decode_agent, decode):
    """One thread waits long, another opens and finishes transfers meanwhile, by the same socket."""
    slow = decode.receive(1000, PREFILL, [1])
    join = in_thread(lambda: slow.wait(WAIT_S).length_bytes)
    for room in range(1, 200):
        receiving = decode.receive(room, PREFILL, [2])
        decode_agent.show(room, State.COMMITTED, length_bytes=room)
        assert receiving.wait(WAIT_S).length_bytes == room
    decode_agent.show(1000, State.COMMITTED, length_bytes=1)
    assert join() == 1


def test_a_waiter_that_times_out_hands_the_reading_on(decode_agent, decode):
    first, second = (decode.receive(room, PREFILL, [room]) for room in (1, 2))
    short = in_thread(lambda: first.wait(0.05))
    long = in_thread(lambda: second.wait(WAIT_S).length_bytes)
    assert isinstance(short(), TimeoutError)
    decode_agent.show(2, State.COMMITTED, length_bytes=2)
    assert long() == 2


def test_close_under_a_wait(decode_agent, decode, receiving):
    join = in_thread(lambda: receiving.wait(WAIT_S))
    deadline = time.monotonic() + WAIT_S
    while not decode.channel._leading and time.monotonic() < deadline:
        pass
    decode.close()
    error = join()
    assert isinstance(error, DaemonUnavailableError)
    assert "closed" in str(error)


def test_wait_with_no_time_still_looks_once(decode_agent, receiving):
    decode_agent.show(7, State.COMMITTED, length_bytes=3)
    assert receiving.wait(0).length_bytes == 3


def test_unknown_words_of_the_agent_end_the_connection(decode_agent, decode, receiving):
    def act():
        [conn] = decode_agent.boards
        conn._sock.send(b"\xff" * 16)

    decode_agent.run(act)
    with pytest.raises(Exception, match="a frame says"):
        receiving.wait(WAIT_S)


def test_threads_that_open_wait_abort_and_list_at_once(decode_agent, decode):
    """Four threads use one client for everything; an agent that commits or fails each room."""

    def act(conn, message):
        decode_agent.answer_open(conn, message)
        slot, sequence = decode_agent.rooms[message.room][1:]
        good = message.room % 3
        state = State.COMMITTED if good else State.FAILED
        error = None if good else Refused(**TransferError(f"no {message.room}").to_wire())
        conn.send(
            Outcome(
                transfer=slot,
                sequence=sequence,
                state=state,
                error=error,
                length_bytes=message.room,
            )
        )
        decode_agent.boards[conn].publish(slot, state)

    decode_agent.on[OpenReceive] = act
    listed = []

    def work(first):
        for room in range(first, first + 100):
            receiving = decode.receive(room, PREFILL, [1])
            if room % 3:
                assert receiving.wait(WAIT_S).length_bytes == room
            else:
                with pytest.raises(TransferError, match=f"no {room}"):
                    receiving.wait(WAIT_S)
            receiving.abort()
            listed.extend(decode.finished())

    joins = [in_thread(lambda first=first: work(first)) for first in (1, 1001, 2001, 3001)]
    assert [join() for join in joins] == [None] * 4
    listed.extend(decode.finished())
    rooms = [transfer.room for transfer in listed]
    assert len(rooms) == len(set(rooms)) == 400
    decode.receive(10_000, PREFILL, [1]).wait(WAIT_S)  # everything sent before has been read
    assert decode_agent.board().live <= 1

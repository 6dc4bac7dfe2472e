"""Calls that do not wait for the agent, calls that travel together, and what `finished` tells."""

import threading
import time

import pytest

from pdxfer.client import DecodeClient, PrefillClient, Rank, State
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    ResourceError,
    TransferError,
)
from pdxfer.layout import plan
from pdxfer.local.messages import (
    AbortTransfer,
    Connected,
    ConnectPeer,
    OpenReceive,
    OpenSend,
    Refused,
    ReleaseSlot,
    SendChunk,
    Together,
    Verdict,
)
from pdxfer.wire.messages import RankInfo
from tests.support.fake_agent import ignore, refuse_with

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


def calls(prefill, decode, **options):
    """Each call that may not wait, on its client."""
    return [
        lambda: prefill.open(1, **options),
        lambda: prefill.send(2, [1], **options),
        lambda: decode.receive(3, PREFILL, [1], **options),
    ]


def test_an_agent_that_says_nothing_holds_nobody_up(prefill_agent, decode_agent, prefill, decode):
    prefill_agent.on[OpenSend] = decode_agent.on[OpenReceive] = ignore
    for call in calls(prefill, decode, wait=False, tag="mine"):
        transfer = call()
        assert (transfer.poll(), transfer.error, transfer.tag) == (State.WAITING, None, "mine")
        assert not transfer.pages_returned
    assert prefill.finished() == decode.finished() == []


def test_a_refusal_is_the_transfers_error(prefill_agent, decode_agent, prefill, decode):
    refusal = LayoutMismatchError("heads differ", fields={"heads": "8, 4"})
    prefill_agent.on[OpenSend] = decode_agent.on[OpenReceive] = refuse_with(refusal)
    for call, client, agent in zip(
        calls(prefill, decode, wait=False),
        (prefill, prefill, decode),
        (prefill_agent, prefill_agent, decode_agent),
        strict=True,
    ):
        transfer = call()
        with pytest.raises(LayoutMismatchError, match="heads differ") as caught:
            transfer.wait(WAIT_S)
        assert caught.value.fields == {"heads": "8, 4"}
        assert transfer.poll() is State.FAILED
        assert transfer.pages_returned
        assert client.finished() == [transfer]
        assert agent.next(ReleaseSlot).transfer == transfer.slot


def test_pages_may_follow_before_the_agent_has_answered(prefill_agent, prefill):
    prefill_agent.on[OpenSend] = refuse_with(ResourceError("full"))
    sending = prefill.open(1, wait=False)
    sending.send([1])
    assert prefill_agent.next(SendChunk).sequence == sending.sequence
    with pytest.raises(ResourceError, match="full"):
        sending.wait(WAIT_S)


@pytest.mark.parametrize("wait", [None, 1, "no"])
def test_wait_is_true_or_false(prefill_agent, prefill, wait):
    with pytest.raises(ConfigError, match="wait="):
        prefill.open(1, wait=wait)
    assert prefill_agent.count(OpenSend) == 0


def test_fail_fast_terms_travel(decode_agent, decode):
    decode.receive(1, PREFILL, unreachable_s=3, must_exist=True)
    message = decode_agent.next(OpenReceive)
    assert (message.unreachable_s, message.must_exist) == (3.0, True)
    decode.receive(2, PREFILL)
    message = decode_agent.next(OpenReceive)
    assert (message.unreachable_s, message.must_exist) == (None, False)
    with pytest.raises(ConfigError, match="unreachable_s="):
        decode.receive(3, PREFILL, unreachable_s=0)
    with pytest.raises(ConfigError, match="must_exist="):
        decode.receive(3, PREFILL, must_exist=1)


# -- together --------------------------------------------------------------------------------
def test_calls_inside_together_travel_as_one_message(prefill_agent, prefill):
    with prefill.together():
        first = prefill.open(1)
        second = prefill.send(2, [3])
        first.send([1], last=False)
        second.abort("not wanted")
        assert prefill_agent.count(OpenSend) == 0
        assert [first.poll(), second.poll()] == [State.WAITING] * 2
    kinds = [type(each) for each in prefill_agent.next(Together).messages]
    assert kinds == [OpenSend, OpenSend, SendChunk, AbortTransfer]
    prefill_agent.show(1, State.READY, prefix_tokens=0)
    first.wait(WAIT_S, until=State.READY)
    assert prefill_agent.count(Together) == 0


def test_a_single_call_inside_together_travels_by_itself(prefill_agent, prefill):
    with prefill.together(), prefill.together():
        prefill.open(1)
    assert prefill_agent.next(OpenSend).room == 1
    assert prefill_agent.count(Together) == 0


def test_what_was_asked_for_travels_also_when_the_block_raises(prefill_agent, prefill):
    def act():
        with prefill.together():
            prefill.open(1)
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        act()
    assert prefill_agent.next(OpenSend).room == 1


def test_more_than_one_message_can_hold_goes_in_several(prefill_agent, prefill, monkeypatch):
    monkeypatch.setattr("pdxfer.client.line._TOGETHER_BYTES_MAX", 200)
    with prefill.together():
        held = [prefill.open(room) for room in range(1, 9)]
    for room in range(1, 9):
        assert prefill_agent.next(OpenSend).room == room
    assert prefill_agent.count(Together) > 1
    assert all(each.error is None for each in held)


def test_connect_inside_together_says_that_it_would_wait_for_ever(decode_agent, decode):
    with decode.together():
        with pytest.raises(LocalProtocolError, match="wait=False"):
            decode.connect(PREFILL)
        assert not decode.connect(PREFILL, wait=False).poll()
    assert decode_agent.next(ConnectPeer).prefill == [PREFILL]


def test_a_refusal_inside_together_ends_its_transfer_alone(prefill_agent, prefill):
    def act(conn, message):
        if message.room == 2:
            raise ResourceError("full")
        prefill_agent.answer_open(conn, message)

    prefill_agent.on[OpenSend] = act
    with prefill.together():
        held = [prefill.open(room) for room in (1, 2, 3)]
    with pytest.raises(ResourceError, match="full"):
        held[1].wait(WAIT_S)
    assert [each.wait(WAIT_S, until=State.WAITING).runs for each in (held[0], held[2])] == [0, 0]


# -- connect ---------------------------------------------------------------------------------
def test_connect_without_waiting_has_a_verdict_a_pair(decode_agent, cache):
    summary = plan(cache.layout, cache.layout).summary()
    refusal = LayoutMismatchError("heads differ")
    held = []
    decode_agent.on[ConnectPeer] = lambda conn, message: held.append((conn, message))
    with DecodeClient(decode_agent.socket_path, cache, rank=Rank(tp=1, tp_size=2)) as client:
        connecting = client.connect(PREFILL, wait=False)
        assert not connecting.poll()
        assert (connecting.error, connecting.summary, connecting.verdicts) == (None, None, {})
        with pytest.raises(TimeoutError, match="no verdict"):
            connecting.wait(0.01)
        decode_agent.next(ConnectPeer)
        [(conn, message)] = held
        answer = Connected(
            request=message.request,
            error=Refused(**refusal.to_wire()),
            verdicts=[
                Verdict(rank=RankInfo(tp=0, tp_size=2), summary=summary.to_wire()),
                Verdict(rank=RankInfo(tp=1, tp_size=2), error=Refused(**refusal.to_wire())),
            ],
        )
        decode_agent.run(conn.send, answer)
        with pytest.raises(LayoutMismatchError, match="heads differ"):
            connecting.wait(WAIT_S)
        assert connecting.poll()
        here = Rank(tp=1, tp_size=2)
        assert connecting.verdicts[Rank(tp=0, tp_size=2), here] == summary
        error = connecting.verdicts[here, here]
        assert isinstance(error, LayoutMismatchError)
        assert str(error) == str(connecting.error) == "heads differ"
        assert connecting.summary is None


def test_connect_that_the_agents_death_ends(decode_agent, decode):
    decode_agent.on[ConnectPeer] = ignore
    connecting = decode.connect(PREFILL, wait=False)
    decode_agent.die()
    deadline = time.monotonic() + WAIT_S
    while not connecting.poll() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(connecting.error, DaemonUnavailableError)


# -- close -----------------------------------------------------------------------------------
def test_close_waits_for_transfers_to_end(prefill_agent, cache):
    client = PrefillClient(prefill_agent.socket_path, cache)
    sending = client.send(1, [1])
    threading.Timer(0.1, lambda: prefill_agent.show(1, State.COMMITTED, length_bytes=3)).start()
    client.close(drain_s=WAIT_S)
    assert sending.poll() is State.COMMITTED


def test_close_waits_no_longer_than_it_may(prefill_agent, cache):
    client = PrefillClient(prefill_agent.socket_path, cache)
    client.send(1, [1])
    with pytest.raises(ConfigError, match="drain_s="):
        client.close(drain_s="soon")
    client.close(drain_s=0.05)
    with pytest.raises(DaemonUnavailableError, match="closed"):
        client.open(2)


async def test_draining_a_client_of_a_loop(prefill_agent, async_prefill):
    sending = await async_prefill.send(1, [1])
    assert not await async_prefill.drain(0.01)
    prefill_agent.show(1, State.FAILED, error=PeerError("away"))
    assert await async_prefill.drain(WAIT_S)
    assert async_prefill.finished() == [sending]


# -- finished --------------------------------------------------------------------------------
def test_finished_tells_of_source_pages_once(prefill_agent, prefill):
    sending = prefill.send(1, [1])
    prefill_agent.show(1, State.SENT, length_bytes=9)
    assert prefill.finished() == [sending]
    assert not sending.returned_before
    prefill_agent.show(1, State.COMMITTED, length_bytes=9)
    assert prefill.finished() == []
    assert prefill_agent.next(ReleaseSlot).transfer == sending.slot


def test_finished_marks_one_that_fails_after_its_pages_were_told_back(prefill_agent, prefill):
    sending = prefill.send(1, [1])
    prefill_agent.show(1, State.SENT, length_bytes=9)
    assert prefill.finished() == [sending]
    prefill_agent.show(1, State.FAILED, error=PeerError("decode went away"))
    assert prefill.finished() == [sending]
    assert sending.returned_before
    assert sending.pages_returned
    assert prefill.finished() == []


def test_finished_tells_once_what_was_sent_and_failed_between_two_calls(prefill_agent, prefill):
    sending = prefill.send(1, [1])
    prefill_agent.show(1, State.SENT, length_bytes=9)
    sending.wait(WAIT_S, until=State.SENT)
    prefill_agent.show(1, State.FAILED, error=PeerError("decode went away"))
    with pytest.raises(PeerError):
        sending.wait(WAIT_S)
    assert prefill.finished() == [sending]
    assert not sending.returned_before  # its pages come back with this very listing


def test_a_quarantined_one_is_not_told_back(decode_agent, decode):
    receiving = decode.receive(1, PREFILL, [1])
    error = TransferError("x", fence="quarantined")
    decode_agent.show(1, State.QUARANTINED, error=error)
    assert decode.finished() == [receiving]
    decode_agent.show(1, State.FAILED, error=TransferError("x", fence="dead"))
    assert decode.finished() == [receiving]
    assert not receiving.returned_before


def test_pages_are_taken_back_once_where_a_proof_comes_right_after_the_list(decode_agent, decode):
    receiving = decode.receive(1, PREFILL, [1])
    decode_agent.show(1, State.QUARANTINED, error=TransferError("x", fence="quarantined"))
    assert decode.finished() == [receiving]
    decode_agent.show(1, State.FAILED, error=TransferError("x", fence="dead"))
    assert (receiving.pages_returned, receiving.returned_now) == (True, False)
    assert decode.finished() == [receiving]
    assert receiving.returned_now
    assert decode.finished() == []


def test_source_pages_are_given_back_now_at_sent_and_not_at_a_later_failure(prefill_agent, prefill):
    sending = prefill.send(1, [1])
    prefill_agent.show(1, State.SENT)
    assert prefill.finished() == [sending]
    assert sending.returned_now
    prefill_agent.show(1, State.FAILED, error=PeerError("x"))
    assert prefill.finished() == [sending]
    assert (sending.returned_now, sending.returned_before) == (False, True)


# -- pages that come back before the end ----------------------------------------------------
def give_back(agent, room, tokens, chunks):
    conn, slot, _ = agent.rooms[room]
    agent.run(agent.boards[conn].set_returned, slot, tokens, chunks)


def test_returned_tokens_are_read_from_the_board(prefill_agent, prefill):
    sending = prefill.send(1, [1, 2], last=False)
    assert sending.returned_tokens == 0
    give_back(prefill_agent, 1, 8, 1)
    assert sending.returned_tokens == 8
    sending.wait_returned(WAIT_S)
    sending.send([3], tokens=12)
    with pytest.raises(TimeoutError, match="room 1 is WAITING"):
        sending.wait_returned(0.01)
    threading.Timer(0.05, lambda: give_back(prefill_agent, 1, 12, 2)).start()
    sending.wait_returned(WAIT_S)
    prefill_agent.show(1, State.SENT)
    prefill_agent.show(1, State.COMMITTED)
    sending.wait(WAIT_S)
    prefill.send(2, [5], last=False)  # whichever slot it has, the count stays
    assert sending.returned_tokens == 12


def test_waiting_for_pages_of_a_transfer_that_fails(prefill_agent, prefill):
    sending = prefill.send(1, [1], last=False)
    prefill_agent.show(1, State.FAILED, error=PeerError("decode went away"))
    with pytest.raises(PeerError, match="went away"):
        sending.wait_returned(WAIT_S)


async def test_pages_come_back_to_a_task(prefill_agent, async_prefill):
    sending = await async_prefill.send(1, [1], last=False)
    threading.Timer(0.05, lambda: give_back(prefill_agent, 1, 4, 1)).start()
    await sending.wait_returned(WAIT_S)
    assert sending.returned_tokens == 4


def test_a_commit_has_its_times(decode_agent, decode):
    receiving = decode.receive(1, PREFILL, [1])
    decode_agent.show(1, State.COMMITTED, times=(1.5, 0.0, 2.5, 2.75))
    commit = receiving.wait(WAIT_S)
    assert (commit.matched_s, commit.first_byte_s) == (1.5, None)
    assert (commit.last_byte_s, commit.committed_s) == (2.5, 2.75)

"""What several threads, tasks or loops do to one client at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdxfer.client import AsyncDecodeClient, State
from pdxfer.errors import DaemonUnavailableError, LocalProtocolError, PeerError
from pdxfer.local.messages import AbortTransfer, OpenReceive, OpenSend
from tests.support.fake_agent import refuse_with

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


def error_on_another_thread(work):
    """The exception that `work` ends with on a thread of its own; None: it returned."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).exception(WAIT_S)


# -- together --------------------------------------------------------------------------------
def test_another_thread_is_answered_while_one_is_inside_together(decode_agent, decode):
    decode_agent.on[OpenReceive] = refuse_with(PeerError("no"))
    with decode.together():
        error = error_on_another_thread(lambda: decode.receive(1, PREFILL, [1]))
    assert isinstance(error, PeerError)  # it asked with wait=True, so the refusal is raised


def test_another_thread_may_connect_while_one_is_inside_together(decode_agent, decode):
    with decode.together():
        decode.receive(1, PREFILL, [1])
        error = error_on_another_thread(lambda: decode.connect(PREFILL, timeout_s=0.01))
    assert not isinstance(error, LocalProtocolError)


def test_a_wait_inside_together_has_the_request_travel_first(decode_agent, decode):
    decode_agent.on[OpenReceive] = refuse_with(PeerError("no"))
    with decode.together():
        receiving = decode.receive(1, PREFILL, [1])
        with pytest.raises(PeerError, match="no"):
            receiving.wait(WAIT_S)


async def test_another_task_is_answered_while_one_is_inside_together(decode_agent, async_decode):
    decode_agent.on[OpenReceive] = refuse_with(PeerError("no"))
    entered, answered = asyncio.Event(), asyncio.Event()

    async def inside():
        with async_decode.together():
            receiving = await async_decode.receive(1, PREFILL, [1])
            entered.set()
            await answered.wait()
        return receiving

    task = asyncio.create_task(inside())
    await entered.wait()
    with pytest.raises(PeerError, match="no"):
        await async_decode.receive(2, PREFILL, [2])
    answered.set()
    assert (await task).room == 1


async def test_tasks_made_inside_together_are_inside(decode_agent, async_decode):
    decode_agent.on[OpenReceive] = refuse_with(PeerError("no"))
    with async_decode.together():
        receivings = await asyncio.gather(
            async_decode.receive(1, PREFILL, [1]), async_decode.receive(2, PREFILL, [2])
        )
        assert decode_agent.count(OpenReceive) == 0
    for receiving in receivings:
        with pytest.raises(PeerError, match="no"):
            await receiving.wait(WAIT_S)


# -- close -----------------------------------------------------------------------------------
def closed_meanwhile(*args):
    """What posting does when another thread has just closed the client."""
    raise DaemonUnavailableError("this client is closed")


def test_a_transfer_that_ends_while_another_thread_closes_is_listed(
    decode_agent, decode, monkeypatch
):
    receiving = decode.receive(1, PREFILL, [1])
    decode_agent.show(1, State.COMMITTED)
    monkeypatch.setattr(decode.channel, "post", closed_meanwhile)
    assert decode.finished() == [receiving]


def test_an_abort_while_another_thread_closes_says_nothing(decode, monkeypatch):
    receiving = decode.receive(1, PREFILL, [1])
    monkeypatch.setattr(decode.channel, "post", closed_meanwhile)
    receiving.abort()


def test_close_while_another_thread_gives_slots_back(decode_agent, decode, monkeypatch):
    """A slot that is given back while `close` looks at all transfers must not end the close."""
    receivings = [decode.receive(room, PREFILL, [room]) for room in (1, 2)]
    decode.finished()
    settled = threading.Event()

    def settle():
        decode_agent.show(2, State.COMMITTED)
        decode._settle_changed()
        settled.set()

    threads = [threading.Thread(target=settle)]

    def settle_on_another_thread(_):
        if threads:
            threads.pop().start()
            settled.wait(0.5)  # with the lock held it comes after, and this wait ends by its time
        return False

    slow_look = property(settle_on_another_thread)
    monkeypatch.setattr(type(receivings[0]), "holds_pages", slow_look, raising=False)
    for receiving in receivings:
        receiving.__dict__.pop("holds_pages", None)
    decode.close()
    assert settled.wait(WAIT_S)
    assert decode.channel.failure is not None


# -- another loop ----------------------------------------------------------------------------
def test_what_is_refused_on_another_loop_has_changed_nothing(decode_agent, cache):
    """Neither an abort nor a list of ended transfers is used up by a loop that it is not for."""
    own, other = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def call(function):
        return function()

    async def start():
        client = await AsyncDecodeClient.create(decode_agent.socket_path, cache)
        return client, [await client.receive(room, PREFILL, [room]) for room in (1, 2)]

    client, (ended, aborted) = own.run_until_complete(start())
    decode_agent.show(1, State.COMMITTED)
    for refused in (client.finished, aborted.abort):
        with pytest.raises(LocalProtocolError, match="another event loop"):
            other.run_until_complete(call(refused))
    assert own.run_until_complete(call(client.finished)) == [ended]
    own.run_until_complete(call(aborted.abort))
    assert decode_agent.next(AbortTransfer).transfer == aborted.slot
    own.run_until_complete(call(client.close))
    own.close()
    other.close()


# -- what has come back ----------------------------------------------------------------------
def test_returned_tokens_stay_when_the_slot_is_given_out_again(prefill_agent, prefill):
    sending = prefill.send(1, [1, 2])
    prefill_agent.run(lambda: prefill_agent.board().set_returned(sending.slot, 8, 1))
    prefill_agent.show(1, State.COMMITTED)
    assert prefill.finished() == [sending]

    def take_only(conn, message):
        prefill_agent.boards[conn].take(message.transfer, message.sequence, message.room)

    prefill_agent.on[OpenSend] = take_only  # the word is still that of the last use
    for room in range(2, 2 + prefill_agent.slots):
        prefill.open(room, wait=False)
    while prefill_agent.count(OpenSend) < 1 + prefill_agent.slots:
        pass
    prefill_agent.run(lambda: None)
    assert sending.returned_tokens == 8

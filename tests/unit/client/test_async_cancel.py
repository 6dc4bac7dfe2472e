"""Cancelling a task at each step: the transfer is in a state that is told, no slot is lost."""

import asyncio

import numpy as np
import pytest

from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, State
from pdxfer.errors import (
    DaemonUnavailableError,
    LocalProtocolError,
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
    Outcome,
    PlacePages,
    Refused,
    ReleaseSlot,
    SendChunk,
)
from tests.support.fake_agent import FakeAgent, ignore
from tests.unit.client.conftest import SmallCache
from tests.unit.client.test_async_transfer import Event, pause, resume

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20
GIVEN_UP = "the worker stopped waiting for the answer"
LARGE = np.tile(np.array([1, 3, 5, 7]), 100_000)


class Held:
    """Openings that the agent has read and not answered."""

    def __init__(self, agent, kind):
        self.agent = agent
        self.requests = []
        agent.on[kind] = lambda conn, message: self.requests.append((conn, message))

    def answer(self):
        """Answer all of them, then as usual."""
        self.agent.on.clear()
        for request in self.requests:
            self.agent.run(self.agent.answer_open, *request)

    def refuse(self):
        def act():
            for request in self.requests:
                self.agent.refuse(*request, ResourceError("no room"))

        self.agent.run(act)


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def asked(agent, kind, coroutine):
    """The task of an opening that the agent has read."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(agent.next, kind)
    return task


OPENINGS = [
    ("decode", OpenReceive, lambda client: client.receive(7, PREFILL), False),
    ("decode", OpenReceive, lambda client: client.receive(7, PREFILL, [1]), True),
    ("prefill", OpenSend, lambda client: client.open(7), False),
    ("prefill", OpenSend, lambda client: client.send(7, [1]), True),
]
CLIENTS = {"decode": AsyncDecodeClient, "prefill": AsyncPrefillClient}


@pytest.fixture(params=OPENINGS, ids=["receive", "receive with pages", "open", "send"])
def opening(request, tmp_path):
    role, kind, ask, pages = request.param
    with FakeAgent(tmp_path / "agent.sock", role) as agent:
        yield agent, CLIENTS[role], kind, ask, pages


@pytest.mark.parametrize("end", [State.FAILED, State.COMMITTED])
async def test_an_opening_cancelled_before_the_answer(opening, cache, end):
    agent, client_type, kind, ask, pages = opening
    held = Held(agent, kind)
    async with client_type(agent.socket_path, cache) as client:
        await cancelled(await asked(agent, kind, ask(client)))
        assert client.given_up == ({7} if pages else frozenset())
        held.answer()
        abort = await asyncio.to_thread(agent.next, AbortTransfer)
        assert abort.reason == GIVEN_UP
        assert client.given_up == ({7} if pages else frozenset())
        error = TransferError("aborted") if end is State.FAILED else None
        agent.show(7, State.FENCING, error=error)
        assert client.given_up == ({7} if pages else frozenset())
        agent.show(7, end, error=error)
        # The loop gives the slot back by itself: nobody has to call anything.
        assert (await asyncio.to_thread(agent.next, ReleaseSlot)).transfer == abort.transfer
        assert client.given_up == frozenset()
        assert client.finished() == []
        assert agent.board().live == 0


async def test_an_opening_cancelled_when_the_answer_has_been_read(opening, cache):
    """The answer is there, its task has not run yet."""
    agent, client_type, kind, ask, pages = opening
    held = Held(agent, kind)
    async with client_type(agent.socket_path, cache) as client:
        task = await asked(agent, kind, ask(client))
        held.answer()
        client.channel.collect()
        await cancelled(task)
        assert client.given_up == ({7} if pages else frozenset())
        abort = agent.next(AbortTransfer)
        agent.show(7, State.FAILED, error=TransferError("aborted"))
        assert (await asyncio.to_thread(agent.next, ReleaseSlot)).transfer == abort.transfer
        assert client.given_up == frozenset()
        assert client.finished() == []


async def test_an_opening_cancelled_when_it_has_ended_already(opening, cache):
    agent, client_type, kind, ask, _ = opening
    held = Held(agent, kind)
    async with client_type(agent.socket_path, cache) as client:
        task = await asked(agent, kind, ask(client))
        held.answer()
        agent.show(7, State.FAILED, error=TransferError("at once"))
        client.channel.collect()
        client._settle_changed()
        await cancelled(task)
        assert client.given_up == frozenset()
        assert client.finished() == []
        await asyncio.to_thread(agent.next, ReleaseSlot)
        assert agent.board().live == 0


async def test_an_opening_refused_after_it_was_cancelled(opening, cache):
    agent, client_type, kind, ask, _ = opening
    held = Held(agent, kind)
    async with client_type(agent.socket_path, cache) as client:
        await cancelled(await asked(agent, kind, ask(client)))
        held.refuse()
        client.check_agent()
        assert client.given_up == frozenset()
        assert agent.next(AbortTransfer).reason == GIVEN_UP
        assert client._live == {}


async def test_an_opening_that_was_too_late(opening, cache):
    agent, client_type, kind, ask, pages = opening
    held = Held(agent, kind)
    async with client_type(agent.socket_path, cache, timeout_s=0.2) as client:
        with pytest.raises(DaemonUnavailableError, match=f"{kind.__name__} within timeout_s"):
            await ask(client)
        assert client.given_up == ({7} if pages else frozenset())
        agent.next(kind)
        held.answer()
        assert (await asyncio.to_thread(agent.next, AbortTransfer)).reason == GIVEN_UP


async def test_an_opening_cancelled_while_the_socket_takes_it(prefill_agent, async_prefill):
    pause(prefill_agent)
    task = asyncio.ensure_future(async_prefill.send(7, LARGE))
    await asyncio.sleep(0.01)
    await cancelled(task)
    resume(prefill_agent)
    message = await asyncio.to_thread(prefill_agent.next, OpenSend)
    assert len(message.chunk.groups["full"].ids) == 4 * len(LARGE)
    assert (await asyncio.to_thread(prefill_agent.next, AbortTransfer)).reason == GIVEN_UP
    assert async_prefill.given_up == {7}


async def test_openings_cancelled_at_any_moment_never_use_up_the_slots(decode_agent, async_decode):
    """An agent that ends what is aborted; ten times as many openings as it has slots."""

    def fail(conn, message):
        error = Refused(**TransferError(message.reason).to_wire())
        place = {"transfer": message.transfer, "sequence": message.sequence}
        conn.send(Outcome(**place, state=State.FAILED, error=error))
        decode_agent.boards[conn].publish(message.transfer, State.FAILED)

    async def some_turns(turns):
        for _ in range(turns):
            await asyncio.sleep(0.0001)

    decode_agent.on[AbortTransfer] = fail
    kept = 0
    for room in range(1, 10 * decode_agent.slots):
        task = asyncio.ensure_future(async_decode.receive(room, PREFILL, [1]))
        await some_turns(room % 7)
        task.cancel()
        [receiving] = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(receiving, BaseException):
            kept += 1
            receiving.abort()
        else:  # ResourceError: earlier ones have not ended yet
            assert isinstance(receiving, asyncio.CancelledError | ResourceError)
    async with asyncio.timeout(WAIT_S):
        while decode_agent.board().live or async_decode.given_up:
            await some_turns(1)
    assert len(async_decode.finished()) == kept
    assert async_decode._live == async_decode._by_request == {}


async def test_cancelling_before_anything_was_asked(decode_agent, async_decode):
    task = asyncio.ensure_future(async_decode.receive(7, PREFILL, [1]))
    await cancelled(task)
    assert async_decode.given_up == frozenset()
    await async_decode.receive(8, PREFILL, [1])
    assert decode_agent.next(OpenReceive).room == 8


async def test_cancelling_a_wait_leaves_the_transfer_running(decode_agent, async_decode):
    receiving = await async_decode.receive(7, PREFILL, [1])
    tasks = [asyncio.ensure_future(receiving.wait(WAIT_S)) for _ in range(3)]
    await asyncio.sleep(0)
    await cancelled(tasks[1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await receiving.wait(WAIT_S)
    decode_agent.show(7, State.MOVING)
    assert receiving.poll() is State.MOVING
    decode_agent.show(7, State.COMMITTED, length_bytes=5)
    for task in (tasks[0], tasks[2]):
        assert (await task).length_bytes == 5
    assert decode_agent.count(AbortTransfer) == 0
    assert receiving.bell.waiting == []
    assert async_decode.finished() == [receiving]


async def test_cancelling_a_wait_that_has_just_been_woken(decode_agent, async_decode):
    receiving = await async_decode.receive(7, PREFILL, [1])
    task = asyncio.ensure_future(receiving.wait(WAIT_S))
    await asyncio.sleep(0)
    decode_agent.show(7, State.COMMITTED, length_bytes=5)
    assert async_decode.finished() == [receiving]
    await cancelled(task)
    assert (await receiving.wait(0)).length_bytes == 5


async def test_cancelling_connect_changes_nothing(decode_agent, async_decode, cache):
    decode_agent.on[ConnectPeer] = ignore
    await cancelled(await asked(decode_agent, ConnectPeer, async_decode.connect(PREFILL)))
    summary = plan(cache.layout, cache.layout).summary()
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.send(
        Connected(request=message.request, summary=summary.to_wire())
    )
    assert await async_decode.connect(PREFILL) == summary
    assert async_decode.channel._answers == {}


async def test_cancelling_a_chunk_that_the_socket_takes(prefill_agent, async_prefill):
    first, second = [await async_prefill.open(room) for room in (1, 2)]
    pause(prefill_agent)
    tasks = [asyncio.ensure_future(each.send(LARGE)) for each in (first, second)]
    await asyncio.sleep(0.01)
    await cancelled(tasks[0])
    with pytest.raises(LocalProtocolError, match="last chunk"):
        await first.send([1])
    resume(prefill_agent)
    await asyncio.wait_for(tasks[1], WAIT_S)
    chunks = [await asyncio.to_thread(prefill_agent.next, SendChunk) for _ in range(2)]
    assert [chunk.transfer for chunk in chunks] == [first.slot, second.slot]
    abort = await asyncio.to_thread(prefill_agent.next, AbortTransfer)
    assert (abort.transfer, abort.reason) == (
        first.slot,
        "cancelled while the agent took its SendChunk",
    )
    prefill_agent.show(1, State.FAILED, error=TransferError("aborted"))
    with pytest.raises(TransferError):
        await first.wait(WAIT_S)
    assert async_prefill.finished() == [first]
    assert prefill_agent.count(AbortTransfer) == 0


async def test_cancelling_place_while_the_socket_takes_it(decode_agent, async_decode):
    other, receiving = [await async_decode.receive(room, PREFILL) for room in (1, 2)]
    pause(decode_agent)
    blocked = asyncio.ensure_future(async_decode.connect([PREFILL * 40_000], timeout_s=WAIT_S))
    await asyncio.sleep(0)
    task = asyncio.ensure_future(receiving.place([1]))
    await asyncio.sleep(0.01)
    assert not task.done()
    await cancelled(task)
    with pytest.raises(LocalProtocolError, match="have been placed"):
        await receiving.place([1])
    resume(decode_agent)
    assert (await asyncio.to_thread(decode_agent.next, PlacePages)).transfer == receiving.slot
    abort = await asyncio.to_thread(decode_agent.next, AbortTransfer)
    assert abort.transfer == receiving.slot
    await cancelled(blocked)
    assert other.poll() is State.WAITING


async def test_cancelling_while_after_is_waited_for_sends_nothing(prefill_agent, async_prefill):
    sending = await async_prefill.open(1)
    task = asyncio.ensure_future(sending.send([1], after=Event(False)))
    await asyncio.sleep(0.005)
    await cancelled(task)
    await sending.send([2])
    assert len((await asyncio.to_thread(prefill_agent.next, SendChunk)).chunk.groups) == 1
    assert prefill_agent.count(SendChunk) == prefill_agent.count(AbortTransfer) == 0


@pytest.mark.parametrize("pages", [None, [1]], ids=["without pages", "with pages"])
async def test_the_memory_of_an_embedded_client_closed_with_an_opening_given_up(
    decode_agent, pages
):
    """With pages, its agent may have opened the transfer, and still write."""

    class Embedded:
        socket_path = decode_agent.socket_path

    agent, cache = Embedded(), SmallCache()
    decode_agent.on[OpenReceive] = ignore
    async with AsyncDecodeClient(agent, cache) as client:
        ask = client.receive(7, PREFILL, pages)
        await cancelled(await asked(decode_agent, OpenReceive, ask))
    if pages is None:
        cache.shared.close()
    else:
        with pytest.raises(BufferError):
            cache.shared.close()

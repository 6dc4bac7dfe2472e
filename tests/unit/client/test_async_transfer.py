"""Asking for transfers, waiting for them, and their end, on an event loop."""

import asyncio
import random

import numpy as np
import pytest

from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, Commit, Pages, PlanSummary, State
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    ResourceError,
    TransferError,
)
from pdxfer.layout import plan
from pdxfer.local.messages import (
    AbortTransfer,
    Attached,
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
from pdxfer.wire.pages import unpack_ids
from tests.support.fake_agent import FakeAgent, ignore, refuse_with

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


@pytest.fixture
async def receiving(async_decode):
    return await async_decode.receive(7, PREFILL, [1])


def ids_of(place):
    return {name: list(unpack_ids(g.encoding, g.ids)) for name, g in place.groups.items()}


async def test_open_and_send(prefill_agent, async_prefill):
    sending = await async_prefill.open(1 << 63, deadline_s=7, lease_s=8)
    message = prefill_agent.next(OpenSend)
    assert (message.room, message.deadline_s, message.lease_s) == (1 << 63, 7.0, 8.0)
    assert (sending.state, sending.error, sending.prefix_tokens) == (State.WAITING, None, None)
    await sending.send([1, 2], layers=[1, 0], last=False)
    await sending.send(Pages([3], first_token=8), tokens=11, aux=b"x")
    said = [await asyncio.to_thread(prefill_agent.next, SendChunk) for _ in range(2)]
    chunks = [message.chunk for message in said]
    assert [chunk.layers for chunk in chunks] == [[0, 1], None]
    assert [(chunk.tokens, chunk.last, chunk.aux) for chunk in chunks] == [
        (None, False, b""),
        (11, True, b"x"),
    ]
    with pytest.raises(LocalProtocolError, match="last chunk has been sent"):
        await sending.send([5])
    prefill_agent.show(1 << 63, State.READY, prefix_tokens=4)
    assert await sending.wait(WAIT_S, until=State.READY) == Commit(0, 0, b"", "")
    assert sending.prefix_tokens == 4


async def test_send_in_one_call(prefill_agent, async_prefill):
    sending = await async_prefill.send(3, np.array([4, 2, 9]), tokens=11, aux=b"first")
    chunk = prefill_agent.next(OpenSend).chunk
    assert list(unpack_ids("i4", chunk.groups["full"].ids)) == [4, 2, 9]
    prefill_agent.show(3, State.SENT, length_bytes=768, runs=3, lane="cma")
    assert await sending.wait(WAIT_S, until=State.SENT) == Commit(768, 3, b"", "cma")
    assert sending.pages_returned
    assert async_prefill.finished() == [sending]
    prefill_agent.show(3, State.COMMITTED, length_bytes=768, runs=3, lane="cma")
    assert await sending.wait(WAIT_S) == Commit(768, 3, b"", "cma")
    assert async_prefill.finished() == []
    with pytest.raises(LocalProtocolError):
        await sending.send([1])


async def test_bad_arguments_ask_for_nothing(prefill_agent, async_prefill):
    for call in (
        async_prefill.open(0),
        async_prefill.open(1, lease_s=0),
        async_prefill.send(1, [16]),
        async_prefill.send(1, [1], aux=bytes(65537)),
        async_prefill.send(1, [1], last=False, aux=b"x"),
    ):
        with pytest.raises(ConfigError):
            await call
    assert prefill_agent.count(OpenSend) == 0


async def test_receive_and_place(decode_agent, async_decode):
    receiving = await async_decode.receive(5, PREFILL)
    assert decode_agent.next(OpenReceive).place is None
    with pytest.raises(ConfigError, match="page id 99"):
        await receiving.place([99])
    await receiving.place(np.array([7, 8]), tokens=7)
    said = await asyncio.to_thread(decode_agent.next, PlacePages)
    assert (said.transfer, said.sequence) == (receiving.slot, receiving.sequence)
    assert (said.place.tokens, ids_of(said.place)) == (7, {"full": [7, 8]})
    with pytest.raises(LocalProtocolError, match="have been placed"):
        await receiving.place([9])
    with pytest.raises(ConfigError, match=r"place\(\)"):
        await async_decode.receive(6, PREFILL, tokens=8)
    with pytest.raises(ConfigError, match="prefill="):
        await async_decode.receive(6, "")


async def test_receive_with_pages(decode_agent, async_decode):
    receiving = await async_decode.receive(5, PREFILL, [3, 1], tokens=7, deadline_s=4)
    message = decode_agent.next(OpenReceive)
    assert (message.room, message.deadline_s, ids_of(message.place)) == (5, 4.0, {"full": [3, 1]})
    with pytest.raises(LocalProtocolError, match="have been placed"):
        await receiving.place([4])


async def test_connect(decode_agent, async_decode, cache):
    summary = plan(cache.layout, cache.layout).summary()
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.send(
        Connected(request=message.request, summary=summary.to_wire())
    )
    got = await async_decode.connect([PREFILL], timeout_s=3)
    assert isinstance(got, PlanSummary)
    assert got == summary
    assert decode_agent.next(ConnectPeer).timeout_s == 3.0
    error = LayoutMismatchError("no", fields={"dtype": "prefill=a, decode=b"})
    decode_agent.on[ConnectPeer] = refuse_with(error)
    with pytest.raises(LayoutMismatchError, match="no") as caught:
        await async_decode.connect(PREFILL)
    assert caught.value.fields == error.fields


async def test_refusals_raise(decode_agent, async_decode):
    decode_agent.on[OpenReceive] = refuse_with(LocalProtocolError("duplicate room 1"))
    with pytest.raises(LocalProtocolError, match="duplicate room 1"):
        await async_decode.receive(1, PREFILL, [1])
    assert async_decode.given_up == frozenset()


async def test_agent_that_answers_nonsense(decode_agent, async_decode):
    decode_agent.on[ConnectPeer] = lambda conn, message: conn.send(
        Attached(request=message.request, worker_id=1)
    )
    with pytest.raises(RemoteProtocolError, match="answered ConnectPeer with Attached"):
        await async_decode.connect(PREFILL)


async def test_refusal_of_the_whole_connection(decode_agent, async_decode):
    def act(conn, message):
        conn.send(Refused(code="remote_protocol", text="go away", retryable=False, fields={}))
        conn.close()

    decode_agent.on[OpenReceive] = act
    for room in (1, 2):
        with pytest.raises(RemoteProtocolError, match="go away"):
            await async_decode.receive(room, PREFILL)


async def test_unknown_words_of_the_agent_end_the_connection(decode_agent, receiving):
    def act():
        [conn] = decode_agent.boards
        conn._sock.send(b"\xff" * 16)

    waiting = asyncio.ensure_future(receiving.wait(WAIT_S))
    await asyncio.sleep(0)
    decode_agent.run(act)
    with pytest.raises(RemoteProtocolError, match="a frame says"):
        await waiting


async def test_outcome_right_behind_the_opening(decode_agent, async_decode):
    def act(conn, message):
        decode_agent.answer_open(conn, message)
        slot, sequence = decode_agent.rooms[message.room][1:]
        conn.send(Outcome(transfer=slot, sequence=sequence, state=State.COMMITTED, length_bytes=9))
        decode_agent.boards[conn].publish(slot, State.COMMITTED)

    decode_agent.on[OpenReceive] = act
    receiving = await async_decode.receive(1, PREFILL, [1])
    assert (await receiving.wait(WAIT_S)).length_bytes == 9
    assert async_decode.finished() == [receiving]


# -- waiting ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("until", "shown"),
    [
        (State.WAITING, State.WAITING),
        (State.READY, State.MOVING),
        (State.SENT, State.COMMITTED),
        (State.COMMITTED, State.COMMITTED),
        (State.FAILED, State.COMMITTED),
    ],
)
@pytest.mark.parametrize("before", [True, False])
async def test_a_later_good_state_satisfies_a_wait(decode_agent, receiving, until, shown, before):
    if before:
        decode_agent.show(7, shown)
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S, until=until))
    await asyncio.sleep(0)
    if not before:
        decode_agent.show(7, shown)
    assert isinstance(await waiting, Commit)


@pytest.mark.parametrize(
    ("until", "shown"),
    [
        (State.COMMITTED, State.SENT),
        (State.COMMITTED, State.FENCING),
        (State.FAILED, State.QUARANTINED),
        (State.FAILED, State.MOVING),
    ],
)
async def test_other_states_do_not(decode_agent, receiving, until, shown):
    decode_agent.show(7, shown, error=TransferError("x"))
    with pytest.raises(TimeoutError, match=f"room 7 is {shown.name} after timeout_s=0.01"):
        await receiving.wait(0.01, until=until)


async def test_what_cannot_be_waited_for(receiving):
    with pytest.raises(ConfigError, match="until="):
        await receiving.wait(1, until=State.FENCING)


async def test_wait_with_no_time_still_looks_once(decode_agent, receiving):
    with pytest.raises(TimeoutError):
        await receiving.wait(0)
    decode_agent.show(7, State.COMMITTED, length_bytes=3)
    assert (await receiving.wait(0)).length_bytes == 3


async def test_final_state_waits_for_its_outcome(decode_agent, async_decode, receiving):
    decode_agent.show(7, State.COMMITTED, outcome=False)
    with pytest.raises(TimeoutError):
        await receiving.wait(0.02)
    assert async_decode.finished() == []
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S))
    await asyncio.sleep(0.01)
    decode_agent.show(7, State.COMMITTED, length_bytes=5, publish=False)
    assert (await waiting).length_bytes == 5


async def test_failure_raises_the_agents_error(decode_agent, async_decode, receiving):
    decode_agent.show(7, State.FENCING, error=TransferError("lane broke", fence="quarantined"))
    assert str(receiving.error) == "lane broke"
    assert not receiving.pages_returned
    error = TransferError("lane broke", fence="revoked", retryable=True, fields={"lane": "tcp"})
    decode_agent.show(7, State.FAILED, error=error)
    for _ in range(2):
        with pytest.raises(TransferError, match="lane broke") as caught:
            await receiving.wait(WAIT_S)
        assert (caught.value.fence, caught.value.retryable) == ("revoked", True)
    assert receiving.pages_returned
    assert async_decode.finished() == [receiving]


async def test_an_error_that_is_not_explained_yet(decode_agent, receiving):
    decode_agent.show(7, State.FENCING, outcome=False)
    assert "FENCING" in str(receiving.error)


async def test_quarantine_raises_and_is_listed_again_when_it_ends(
    decode_agent, async_decode, receiving
):
    gone = PeerError("gone", fields={"fence": "quarantined"})
    decode_agent.show(7, State.QUARANTINED, error=gone)
    with pytest.raises(PeerError, match="gone"):
        await receiving.wait(WAIT_S)
    assert async_decode.finished() == [receiving]
    assert async_decode.finished() == []
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S, until=State.FAILED))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    decode_agent.show(7, State.FAILED, error=PeerError("gone", fields={"fence": "dead"}))
    with pytest.raises(PeerError):
        await waiting
    assert async_decode.finished() == [receiving]
    assert decode_agent.next(ReleaseSlot).transfer == receiving.slot


async def test_a_waiter_is_woken_though_another_task_listed_the_change(
    decode_agent, async_decode, receiving
):
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S, until=State.MOVING))
    await asyncio.sleep(0)
    decode_agent.show(7, State.MOVING)
    assert async_decode.finished() == []  # before the loop has looked at the eventfd
    assert isinstance(await asyncio.wait_for(waiting, WAIT_S / 2), Commit)


async def test_many_waits_at_once(tmp_path, cache):
    rooms = list(range(1, 401))
    with FakeAgent(tmp_path / "many.sock", "decode", slots=len(rooms)) as agent:
        async with AsyncDecodeClient(agent.socket_path, cache) as client:
            held = await asyncio.gather(*(client.receive(room, PREFILL, [1]) for room in rooms))
            waits = [
                asyncio.ensure_future(transfer.wait(WAIT_S)) for transfer in held for _ in range(2)
            ]
            ready = [
                asyncio.ensure_future(transfer.wait(WAIT_S, until=State.READY)) for transfer in held
            ]
            await asyncio.sleep(0)
            random.Random(1).shuffle(rooms)
            for room in rooms:
                await asyncio.to_thread(agent.show, room, State.READY)
            await asyncio.gather(*ready)
            assert not any(wait.done() for wait in waits)

            def finish():
                for room in rooms:
                    agent.show(room, State.COMMITTED, length_bytes=room)

            await asyncio.to_thread(finish)
            commits = await asyncio.gather(*waits)
            assert [commit.length_bytes for commit in commits] == [
                transfer.room for transfer in held for _ in range(2)
            ]
            assert {transfer.room for transfer in client.finished()} == set(rooms)
            assert not any(transfer.bell.waiting for transfer in held)


async def test_slots_are_given_back_without_finished(decode_agent, async_decode):
    for room in range(1, 4 * decode_agent.slots):
        receiving = await async_decode.receive(room, PREFILL, [1])
        decode_agent.show(room, State.COMMITTED)
        await receiving.wait(WAIT_S)
    assert len(async_decode.finished()) == 4 * decode_agent.slots - 1
    for room in range(101, 101 + decode_agent.slots):
        await async_decode.receive(room, PREFILL, [1])
    with pytest.raises(ResourceError, match="all 8 transfers"):
        await async_decode.receive(200, PREFILL, [1])
    assert async_decode.given_up == frozenset()


async def test_released_transfer_keeps_its_state_when_the_slot_is_used_again(
    decode_agent, async_decode
):
    first = await async_decode.receive(1, PREFILL, [1])
    decode_agent.show(1, State.COMMITTED, aux=b"one")
    assert async_decode.finished() == [first]
    others = [
        await async_decode.receive(room, PREFILL, [1]) for room in range(2, 2 + decode_agent.slots)
    ]
    assert first.slot in {other.slot for other in others}
    assert first.poll() is State.COMMITTED
    assert (await first.wait(0)).aux == b"one"


async def test_abort_is_sent_once(decode_agent, receiving):
    receiving.abort("changed my mind")
    receiving.abort("twice")
    message = decode_agent.next(AbortTransfer)
    assert (message.transfer, message.reason) == (receiving.slot, "changed my mind")
    decode_agent.show(7, State.FAILED, error=TransferError("aborted: changed my mind"))
    with pytest.raises(TransferError, match="changed my mind"):
        await receiving.wait(WAIT_S, until=State.FAILED)
    assert decode_agent.count(AbortTransfer) == 0


async def test_a_refused_chunk_gives_the_transfer_up(prefill_agent, async_prefill):
    prefill_agent.on[SendChunk] = refuse_with(ConfigError("pages end at 4, tokens=9"))
    sending = await async_prefill.open(1)
    await sending.send([1], tokens=9, last=False)
    assert (
        await asyncio.to_thread(prefill_agent.next, AbortTransfer)
    ).reason == "pages end at 4, tokens=9"
    assert isinstance(sending.error, ConfigError)
    with pytest.raises(ConfigError, match="tokens=9"):
        await sending.send([2])
    prefill_agent.show(1, State.FAILED, error=TransferError("aborted"))
    with pytest.raises(ConfigError, match="pages end at 4, tokens=9"):
        await sending.wait(WAIT_S)


async def test_send_after_failure_raises_the_cause(prefill_agent, async_prefill):
    sending = await async_prefill.open(1)
    prefill_agent.show(1, State.FENCING, error=PeerError("decode went away"))
    with pytest.raises(PeerError, match="decode went away"):
        await sending.send([1])
    assert prefill_agent.count(SendChunk) == 0


# -- the agent's death --------------------------------------------------------------------------
async def test_death_wakes_every_waiter(decode_agent, async_decode, receiving):
    decode_agent.on[ConnectPeer] = decode_agent.on[OpenReceive] = ignore
    decode_agent.show(7, State.MOVING)
    waits = [receiving.wait(WAIT_S) for _ in range(3)]
    waits += [receiving.wait(WAIT_S, until=State.FAILED), async_decode.connect(PREFILL)]
    waits += [async_decode.receive(8, PREFILL, [2])]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.to_thread(decode_agent.next, ConnectPeer)
    decode_agent.die()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, DaemonUnavailableError)
        assert "is gone" in str(error)
    assert receiving.poll() is State.QUARANTINED
    assert not receiving.pages_returned
    assert isinstance(receiving.error, DaemonUnavailableError)
    receiving.abort()
    for call in (async_decode.receive(9, PREFILL), async_decode.connect(PREFILL)):
        with pytest.raises(DaemonUnavailableError):
            await call
    assert async_decode.given_up == {8}  # nobody can say what has become of its pages


async def test_death_of_an_agent_that_has_just_failed_a_transfer(decode_agent, receiving):
    decode_agent.show(7, State.FAILED, outcome=False)
    decode_agent.die()
    with pytest.raises(DaemonUnavailableError):
        await receiving.wait(WAIT_S)
    assert isinstance(receiving.error, DaemonUnavailableError)


async def test_words_before_the_agents_death_still_count(decode_agent, async_decode, receiving):
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S))
    await asyncio.sleep(0)
    decode_agent.show(7, State.COMMITTED, aux=b"last")
    decode_agent.die()
    assert (await waiting).aux == b"last"
    assert async_decode.finished() == [receiving]


async def test_close_wakes_every_waiter(decode_agent, async_decode, receiving):
    decode_agent.on[ConnectPeer] = ignore
    tasks = [
        asyncio.ensure_future(wait)
        for wait in (receiving.wait(WAIT_S), async_decode.connect(PREFILL))
    ]
    await asyncio.sleep(0)
    async_decode.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, DaemonUnavailableError)
        assert "closed" in str(error)


async def test_a_bug_of_ours_leaves_nobody_waiting(decode_agent, async_decode, receiving):
    def broken(message):
        raise ZeroDivisionError

    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    waiting = asyncio.ensure_future(receiving.wait(WAIT_S))
    await asyncio.sleep(0)
    async_decode.channel.on_message = broken
    decode_agent.show(7, State.COMMITTED)
    with pytest.raises(DaemonUnavailableError, match="ZeroDivisionError"):
        await waiting
    assert [type(error) for error in reported] == [ZeroDivisionError]


# -- a socket that is full ----------------------------------------------------------------------
def pause(agent):
    def act():
        [conn] = agent._server.connections
        agent._loop.remove_reader(conn._sock.fileno())

    agent.run(act)


def resume(agent):
    def act():
        [conn] = agent._server.connections
        agent._loop.add_reader(conn._sock.fileno(), conn._on_readable)

    agent.run(act)


LARGE = np.tile(np.array([1, 3, 5, 7]), 100_000)
"""Page ids that no socket takes at once."""


async def test_large_sends_go_out_in_order_when_the_agent_reads(prefill_agent, async_prefill):
    sendings = [await async_prefill.open(room) for room in (1, 2, 3)]
    pause(prefill_agent)
    tasks = [asyncio.ensure_future(each.send(LARGE, last=False)) for each in sendings]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in tasks)
    assert async_prefill.channel._writing
    resume(prefill_agent)
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    chunks = [await asyncio.to_thread(prefill_agent.next, SendChunk) for _ in sendings]
    assert [chunk.transfer for chunk in chunks] == [each.slot for each in sendings]
    for message in chunks:
        group = message.chunk.groups["full"]
        assert np.array_equal(unpack_ids(group.encoding, group.ids), LARGE)
    assert not async_prefill.channel._writing


async def test_agent_that_stops_reading(prefill_agent, cache):
    async with AsyncPrefillClient(prefill_agent.socket_path, cache, timeout_s=0.2) as client:
        sending = await client.open(1)
        pause(prefill_agent)
        with pytest.raises(DaemonUnavailableError, match="did not read the pages of room 1"):
            await sending.send(LARGE)
        resume(prefill_agent)
        message = await asyncio.to_thread(prefill_agent.next, AbortTransfer)
        assert message.reason == "the agent did not take its pages"


async def test_agent_that_dies_while_it_takes_a_chunk(prefill_agent, async_prefill):
    sending = await async_prefill.open(1)
    pause(prefill_agent)
    task = asyncio.ensure_future(sending.send(LARGE))
    await asyncio.sleep(0.01)
    assert not task.done()
    prefill_agent.die()
    # The kernel says so at the next write, or at the next read: by then nothing is in the way.
    await asyncio.wait([task], timeout=WAIT_S)
    assert task.exception() is None or isinstance(task.exception(), DaemonUnavailableError)
    with pytest.raises(DaemonUnavailableError):
        await sending.wait(WAIT_S)


# -- a GPU event --------------------------------------------------------------------------------
class Event:
    def __init__(self, *answers):
        self.answers = list(answers)

    def query(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def test_after_is_waited_for(prefill_agent, async_prefill):
    event = Event(False, False, True)
    sending = await async_prefill.open(1)
    await sending.send([1], after=event)
    assert event.answers == [True]
    assert (await asyncio.to_thread(prefill_agent.next, SendChunk)).chunk.last


async def test_after_that_never_comes(prefill_agent, cache):
    async with AsyncPrefillClient(prefill_agent.socket_path, cache, timeout_s=0.2) as client:
        sending = await client.open(1)
        with pytest.raises(TimeoutError, match=r"`after` .*timeout_s=0\.2; nothing was sent"):
            await sending.send([1], after=Event(False))
        await sending.send([2])
        chunk = (await asyncio.to_thread(prefill_agent.next, SendChunk)).chunk
        assert list(unpack_ids(chunk.groups["full"].encoding, chunk.groups["full"].ids)) == [2]


async def test_a_transfer_that_fails_while_after_is_waited_for(prefill_agent, async_prefill):
    sending = await async_prefill.open(1)
    task = asyncio.ensure_future(sending.send([1], after=Event(*[False] * 20, True)))
    await asyncio.sleep(0)
    prefill_agent.show(1, State.FAILED, error=PeerError("decode went away"))
    with pytest.raises(PeerError, match="went away"):
        await task
    assert prefill_agent.count(SendChunk) == 0

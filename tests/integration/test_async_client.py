"""Async clients of real agents: requests at once on one loop, cancelling, the agent's death."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import numpy as np
import pytest
import uvloop

from pdxfer.agent.config import AgentConfig
from pdxfer.cli.status import ask
from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, State
from pdxfer.embedded import decode_agent, prefill_agent
from pdxfer.errors import DaemonUnavailableError, LayoutMismatchError, PdxferError
from pdxfer.launch.daemons import DaemonProcess
from tests.support.caches import PAGE, SeededCache, expect, small, small_token_major

pytestmark = pytest.mark.ucx
LANES = ["tcp", "cma"]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
WAIT_S = 20.0


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine to its end under one of the loops."""

    def call(coroutine):
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(coroutine, 60))

    return call


@contextlib.contextmanager
def daemons(folder, lane="tcp"):
    """A prefill and a decode daemon, with their facts."""
    with contextlib.ExitStack() as stack:
        started = []
        for role in ("prefill", "decode"):
            process = stack.enter_context(DaemonProcess(role, folder, ["--lanes", lane]))
            started.append((process, process.wait_ready()))
        yield started


@contextlib.asynccontextmanager
async def workers(prefill, decode, source=None, destination=None):
    """A client on each side with a cache of its own."""
    source = SeededCache(source or small(), 1)
    destination = SeededCache(destination or small(), 2)
    async with (
        AsyncPrefillClient(prefill, source) as sender,
        AsyncDecodeClient(decode, destination) as receiver,
    ):
        yield sender, receiver, source, destination


async def cross(pair, room, source_pages, destination_pages, chunks):
    """One request, both sides at once; its commit."""
    sender, receiver, _, _ = pair
    tokens = len(source_pages) * PAGE

    async def send():
        sending = await sender.open(room)
        parts = np.array_split(source_pages, chunks)
        for index, part in enumerate(parts):
            last = index == chunks - 1
            await sending.send(part, tokens=tokens, last=last, aux=b"aux" if last else b"")
            await asyncio.sleep(0)
        await sending.wait(WAIT_S, until=State.SENT)
        assert sending.pages_returned
        await sending.wait(WAIT_S)

    async def receive():
        receiving = await receiver.receive(room, sender.addresses)
        await receiving.place(destination_pages, tokens=tokens)
        commit = await receiving.wait(WAIT_S)
        assert receiving.pages_returned
        return commit

    return (await asyncio.gather(receive(), send()))[0]


async def many_at_once(pair, lane):
    """Twenty requests of three pages each, all under way at once; whole pools compared."""
    sender, receiver, source, destination = pair
    await receiver.connect(sender.addresses)
    before = destination.snapshot()
    rng = np.random.default_rng(1)
    source_pages = rng.permutation(np.arange(1, 64))[:60].reshape(20, 3)
    destination_pages = rng.permutation(np.arange(1, 64))[:60].reshape(20, 3)
    commits = await asyncio.gather(
        *(
            cross(pair, room + 1, source_pages[room], destination_pages[room], 1 + room % 3)
            for room in range(20)
        )
    )
    assert {(commit.aux, commit.lane) for commit in commits} == {(b"aux", lane)}
    tokens = 60 * PAGE
    expect(source, destination, before, source_pages.ravel(), destination_pages.ravel(), tokens)
    assert len(sender.finished()) == len(receiver.finished()) == 20


@pytest.mark.parametrize(("lane", "layout"), [("tcp", small), ("cma", small_token_major)])
def test_many_requests_at_once_over_daemons(tmp_path, run, lane, layout):
    async def main():
        async with workers(prefill.socket, decode.socket, layout(), layout()) as pair:
            await many_at_once(pair, lane)

    with daemons(tmp_path, lane) as ((_, prefill), (_, decode)):
        run(main())


@pytest.mark.parametrize("lane", LANES)
def test_many_requests_at_once_over_embedded_agents(run, lane):
    async def main():
        async with workers(prefill, decode) as pair:
            await many_at_once(pair, lane)

    with (
        prefill_agent(AgentConfig(role="prefill", socket_path="", lanes=(lane,))) as prefill,
        decode_agent(AgentConfig(role="decode", socket_path="", lanes=(lane,))) as decode,
    ):
        run(main())


@pytest.mark.parametrize(("run", "lane"), [("asyncio", "tcp"), ("uvloop", "cma")], indirect=["run"])
def test_cancelled_tasks_leave_the_agents_and_the_pages_in_order(tmp_path, run, lane):
    """Openings cancelled at any moment: their pages come back, and the next requests cross."""

    async def main():
        async with workers(prefill.socket, decode.socket) as pair:
            sender, receiver, source, destination = pair
            for room in range(100, 140):
                tasks = [
                    asyncio.ensure_future(
                        receiver.receive(room, sender.addresses, [room % 60 + 1])
                    ),
                    asyncio.ensure_future(sender.send(room, [room % 60 + 1])),
                ]
                for _ in range(room % 5):
                    await asyncio.sleep(0.0002)
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(ended, BaseException):
                        ended.abort()
                        with contextlib.suppress(PdxferError):
                            await ended.wait(WAIT_S, until=State.FAILED)
                        assert ended.pages_returned
            async with asyncio.timeout(WAIT_S):
                # Nobody is told when what was given up has ended, so it is asked for.
                while any((c.given_up or c._live) for c in (sender, receiver)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            before = destination.snapshot()
            await cross(pair, 1, [5, 3], [9, 4], 2)
            expect(source, destination, before, [5, 3], [9, 4], 2 * PAGE)
            for facts in (prefill, decode):
                status = await asyncio.to_thread(ask, facts.socket, WAIT_S)
                assert status.live_transfers == 0

    with daemons(tmp_path, lane) as ((_, prefill), (_, decode)):
        run(main())


@pytest.mark.parametrize("run", ["uvloop"], indirect=True)
def test_a_cancelled_wait_goes_on_and_an_abort_returns_the_pages(tmp_path, run):
    async def main():
        async with workers(prefill.socket, decode.socket) as (sender, receiver, *_):
            receiving = await receiver.receive(1, sender.addresses, [3], tokens=PAGE)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await receiving.wait(WAIT_S)
            sending = await sender.send(1, [3], tokens=PAGE)
            await asyncio.gather(receiving.wait(WAIT_S), sending.wait(WAIT_S))
            receiving = await receiver.receive(2, sender.addresses, [3], tokens=PAGE)
            receiving.abort("not wanted")
            with pytest.raises(PdxferError, match="not wanted"):
                await receiving.wait(WAIT_S)
            assert receiving.pages_returned

    with daemons(tmp_path) as ((_, prefill), (_, decode)):
        run(main())


@pytest.mark.parametrize("run", ["asyncio"], indirect=True)
def test_layouts_that_cannot_be_joined_are_refused(tmp_path, run):
    async def main():
        layouts = (small(), small(kv_heads=4))
        async with workers(prefill.socket, decode.socket, *layouts) as (sender, receiver, *_):
            with pytest.raises(LayoutMismatchError):
                await receiver.connect(sender.addresses)
            with pytest.raises(LayoutMismatchError):
                await receiver.receive(1, sender.addresses, [3], tokens=PAGE)
            assert receiver.given_up == frozenset()

    with daemons(tmp_path) as ((_, prefill), (_, decode)):
        run(main())


@pytest.mark.parametrize(
    ("run", "victim"), [("asyncio", 0), ("uvloop", 1)], ids=["prefill", "decode"], indirect=["run"]
)
def test_a_killed_daemon_wakes_every_task(tmp_path, run, victim):
    async def main():
        async with workers(prefill[1].socket, decode[1].socket) as (sender, receiver, *_):
            sendings = [await sender.open(room) for room in range(1, 6)]
            receivings = [
                await receiver.receive(room, sender.addresses, [room]) for room in range(1, 6)
            ]
            mine = (sendings, receivings)[victim]
            tasks = [asyncio.ensure_future(each.wait(WAIT_S)) for each in mine]
            await asyncio.sleep(0)
            (prefill, decode)[victim][0].signal(signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
            assert {type(end) for end in ends} == {DaemonUnavailableError}
            # Which of them have their proof already is a question of moments.
            assert {each.poll() for each in mine} <= {State.QUARANTINED, State.FAILED}

    with daemons(tmp_path) as (prefill, decode):
        run(main())

"""Coming and going of an async client: nothing blocks, nothing is left behind."""

import asyncio
import contextlib
import inspect
import os
import socket
import subprocess
import sys
import threading

import pytest

import pdxfer.client
from pdxfer.client import (
    AsyncDecodeClient,
    AsyncPrefillClient,
    AsyncReceiving,
    AsyncSending,
    DecodeClient,
    PrefillClient,
    Rank,
    Receiving,
    Sending,
    State,
)
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LocalProtocolError,
    ResourceError,
)
from pdxfer.layout import KVLayout
from pdxfer.local.messages import AttachWorker, WorkerHello
from tests.support.fake_agent import FakeAgent, ignore, refuse_with

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Ticker:
    """Counts turns of the loop."""

    def __init__(self):
        self.turns = 0

    async def __aenter__(self):
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *exc_info):
        self._task.cancel()

    async def _run(self):
        while True:
            self.turns += 1
            await asyncio.sleep(0.001)


def test_async_names_are_loaded_when_asked_for():
    code = (
        "import sys, pdxfer.client as c; "
        "before = 'asyncio' in sys.modules; c.AsyncDecodeClient; c.AsyncPrefillClient; "
        "print(before, [m for m in sys.modules if m.split('.')[0] in ('torch', 'zmq', 'uvloop') "
        "or m.startswith(('pdxfer._ucx', 'pdxfer.fabric', 'pdxfer.agent', 'pdxfer.pool'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False []\n"
    for name in pdxfer.client.__all__:
        assert getattr(pdxfer.client, name).__name__ == name
    with pytest.raises(AttributeError, match="AsyncNothing"):
        _ = pdxfer.client.AsyncNothing


@pytest.mark.parametrize(
    ("threaded", "tasks"),
    [
        (PrefillClient, AsyncPrefillClient),
        (DecodeClient, AsyncDecodeClient),
        (Sending, AsyncSending),
        (Receiving, AsyncReceiving),
    ],
)
def test_the_surface_is_that_of_the_threaded_client(threaded, tasks):
    names = {name for name in dir(threaded) if not name.startswith("_")}
    assert names <= {name for name in dir(tasks) if not name.startswith("_")}
    for name in names | {"__init__"}:
        ours, theirs = getattr(threaded, name), getattr(tasks, name)
        if not callable(ours):
            continue
        wanted = inspect.signature(ours).parameters.values()
        if name == "close":  # waits on an event loop by `drain`
            wanted = [each for each in wanted if each.name != "drain_s"]
        got = inspect.signature(theirs).parameters.values()
        assert [(p.name, p.kind, p.default) for p in wanted] == [
            (p.name, p.kind, p.default) for p in got
        ], name
    coroutines = {name for name in names if inspect.iscoroutinefunction(getattr(tasks, name))}
    assert coroutines == names & {
        "open",
        "begin",
        "send",
        "connect",
        "receive",
        "place",
        "wait",
        "wait_returned",
        "resume",
    }


@pytest.mark.parametrize("how", ["create", "enter", "create and enter"])
async def test_attach_hands_over_layout_rank_and_memory(prefill_agent, cache, how):
    arguments = (prefill_agent.socket_path, cache)
    options = {"rank": Rank(tp=1, tp_size=2), "instance": "one", "ignore_parts": ("draft.k",)}
    threads = threading.active_count()
    if how == "enter":
        client = AsyncPrefillClient(*arguments, **options)
        async with client as entered:
            assert entered is client
    else:
        client = await AsyncPrefillClient.create(*arguments, **options)
        if how == "create and enter":
            async with client:
                await client.open(1)
        client.close()
    assert threading.active_count() == threads
    hello = prefill_agent.next(WorkerHello)
    assert (hello.role, hello.pid) == ("prefill", os.getpid())
    attach = prefill_agent.next(AttachWorker)
    assert (attach.instance, attach.ignore_parts, attach.rank.tp) == ("one", ["draft.k"], 1)
    assert KVLayout.from_wire(attach.layout) == cache.layout
    cache.shared.buffer[100] = 42
    assert prefill_agent.memory[0].buffer[100] == 42
    assert client.addresses == (PREFILL + "#one",)
    assert prefill_agent.count(AttachWorker) == 0


async def test_a_client_that_is_not_attached_says_so(prefill_agent, cache):
    client = AsyncPrefillClient(prefill_agent.socket_path, cache)
    for call in (client.open(1), client.send(1, [1])):
        with pytest.raises(LocalProtocolError, match=r"not attached .*create.*async with"):
            await call
    with pytest.raises(LocalProtocolError, match="not attached"):
        _ = client.addresses
    with pytest.raises(LocalProtocolError, match="not attached"):
        client.check_agent()
    assert client.finished() == []
    client.close()
    with pytest.raises(LocalProtocolError, match="make a new one"):
        await client.__aenter__()


async def test_a_closed_client_cannot_be_entered_again(prefill_agent, cache):
    client = await AsyncPrefillClient.create(prefill_agent.socket_path, cache)
    client.close()
    with pytest.raises(DaemonUnavailableError, match="closed"):
        await client.__aenter__()


async def test_a_client_is_entered_by_one_task(prefill_agent, cache):
    client = AsyncPrefillClient(prefill_agent.socket_path, cache)
    results = await asyncio.gather(client.__aenter__(), client.__aenter__(), return_exceptions=True)
    assert results[0] is client
    assert isinstance(results[1], LocalProtocolError)
    client.close()


async def test_embedded_agent_keeps_the_memory(decode_agent, cache):
    class Embedded:
        socket_path = decode_agent.socket_path

    agent = Embedded()
    async with AsyncDecodeClient(agent, cache) as client:
        attach = decode_agent.next(AttachWorker)
        assert [(p.kind, p.address) for p in attach.memory] == [("address", cache.shared.address)]
        with pytest.raises(BufferError):
            cache.shared.close()
        receiving = await client.receive(1, PREFILL, [1])
        decode_agent.show(1, State.COMMITTED)
        await receiving.wait(WAIT_S)
    cache.shared.close()


async def test_nobody_listens(tmp_path, cache):
    before = descriptors()
    for path in (tmp_path / "none.sock", str(tmp_path)):
        with pytest.raises(DaemonUnavailableError, match="socket_path=") as caught:
            await AsyncPrefillClient.create(path, cache)
        assert caught.value.retryable
    with pytest.raises(ConfigError, match="socket_path"):
        await AsyncPrefillClient.create("x" * 300, cache)
    assert descriptors() == before


@pytest.mark.parametrize("silent", [WorkerHello, AttachWorker])
async def test_agent_that_does_not_answer(prefill_agent, cache, silent):
    prefill_agent.on[silent] = ignore
    async with Ticker() as ticker:
        with pytest.raises(DaemonUnavailableError, match=rf"{silent.__name__} .*timeout_s=0\.2"):
            await AsyncPrefillClient.create(prefill_agent.socket_path, cache, timeout_s=0.2)
        assert ticker.turns > 2
    assert prefill_agent.closed() == "the worker closed its connection"


@pytest.fixture
def full_backlog(tmp_path):
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        others = []
        for _ in range(8):
            other = socket.socket(socket.AF_UNIX)
            other.setblocking(False)
            others.append(other)
            if other.connect_ex(path):
                break
        yield path, listener
        for other in others:
            other.close()


async def test_agent_that_does_not_accept(full_backlog, cache):
    async with Ticker() as ticker:
        with pytest.raises(DaemonUnavailableError, match=r"does not accept .*timeout_s=0\.05"):
            await AsyncPrefillClient.create(full_backlog[0], cache, timeout_s=0.05)
        assert ticker.turns > 2


async def test_agent_that_accepts_later(full_backlog, cache):
    path, listener = full_backlog
    listener.setblocking(False)
    made = asyncio.ensure_future(AsyncPrefillClient.create(path, cache, timeout_s=0.1))
    await asyncio.sleep(0.01)
    accepted = []
    while not made.done():
        with contextlib.suppress(BlockingIOError):
            accepted.append(listener.accept()[0])
        await asyncio.sleep(0.005)
    with pytest.raises(DaemonUnavailableError, match="did not answer WorkerHello"):
        await made
    for sock in accepted:
        sock.close()


@pytest.mark.parametrize("step", ["connect", WorkerHello, AttachWorker])
async def test_cancelling_the_attachment_leaves_nothing(prefill_agent, full_backlog, cache, step):
    path = full_backlog[0] if step == "connect" else prefill_agent.socket_path
    prefill_agent.on[step] = ignore
    before = descriptors()
    made = asyncio.ensure_future(AsyncPrefillClient.create(path, cache))
    if step == "connect":
        await asyncio.sleep(0.02)
    else:
        await asyncio.to_thread(prefill_agent.next, step)
    made.cancel()
    with pytest.raises(asyncio.CancelledError):
        await made
    if step != "connect":
        assert prefill_agent.closed() == "the worker closed its connection"
    assert descriptors() <= before + 2  # the mapping of the fake agent


async def test_other_version_and_role_are_refused(tmp_path, prefill_agent, cache):
    with FakeAgent(tmp_path / "old.sock", "prefill", version="0.0.9") as agent:
        with pytest.raises(ConfigError, match=r"0\.1\.0.*0\.0\.9"):
            await AsyncPrefillClient.create(agent.socket_path, cache)
    with pytest.raises(ConfigError, match=r"is a decode worker.*a prefill agent"):
        await AsyncDecodeClient.create(prefill_agent.socket_path, cache)


async def test_refused_attach_raises_the_agents_error_and_detaches(prefill_agent, cache):
    prefill_agent.on[AttachWorker] = refuse_with(ResourceError("256 workers", retryable=True))
    before = descriptors()
    with pytest.raises(ResourceError, match="256 workers") as caught:
        await AsyncPrefillClient.create(prefill_agent.socket_path, cache)
    assert caught.value.retryable
    assert prefill_agent.closed() == "the worker closed its connection"
    assert descriptors() <= before + 2  # the mapping of the fake agent


@pytest.mark.parametrize(
    "options", [{"relayout": "maybe"}, {"timeout_s": 0}, {"timeout_s": float("nan")}]
)
def test_bad_options_are_named_before_anything_is_connected(prefill_agent, cache, options):
    [name] = options
    with pytest.raises(ConfigError, match=f"{name}="):
        AsyncPrefillClient(prefill_agent.socket_path, cache, **options)


async def test_close_is_idempotent_and_leaves_no_descriptors(prefill_agent, cache):
    before = descriptors()
    client = await AsyncPrefillClient.create(prefill_agent.socket_path, cache)
    sending = await client.open(5)
    prefill_agent.show(5, State.READY)
    client.close()
    client.close()
    assert prefill_agent.closed() == "the worker closed its connection"
    assert descriptors() <= before + 2  # the mapping of the fake agent
    assert sending.poll() is State.QUARANTINED
    for call in (client.open(6), sending.send([1]), sending.wait(1)):
        with pytest.raises(DaemonUnavailableError, match="this client is closed"):
            await call
    sending.abort()
    assert client.finished() == []


def test_close_after_the_loop(prefill_agent, cache):
    with asyncio.Runner() as runner:
        client = runner.run(AsyncPrefillClient.create(prefill_agent.socket_path, cache))
    client.close()
    assert prefill_agent.closed() == "the worker closed its connection"


async def test_check_agent_sees_the_death(prefill_agent, async_prefill):
    async_prefill.check_agent()
    prefill_agent.die()
    with pytest.raises(DaemonUnavailableError, match="is gone"):
        async_prefill.check_agent()


async def test_a_dead_agents_socket_does_not_keep_the_loop_busy(prefill_agent, async_prefill):
    prefill_agent.die()
    calls = 0
    read = async_prefill.channel._read

    def counted():
        nonlocal calls
        calls += 1
        read()

    async_prefill.channel._read = counted
    await asyncio.sleep(0.05)
    assert calls <= 1


def test_an_async_client_used_on_another_loop_says_so(decode_agent, cache):
    async def make():
        return await AsyncDecodeClient.create(decode_agent.socket_path, cache)

    async def use(client):
        with pytest.raises(LocalProtocolError, match="another event loop"):
            await client.receive(1, PREFILL)
        with pytest.raises(LocalProtocolError, match="another event loop"):
            await client.connect(PREFILL)

    loop, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    client = loop.run_until_complete(make())
    other.run_until_complete(use(client))
    client.close()
    loop.close()
    other.close()

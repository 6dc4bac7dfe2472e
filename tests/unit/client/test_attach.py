"""Coming and going of a client: what is handed over, what is refused, what stays behind."""

import dataclasses
import gc
import os
import socket
import subprocess
import sys

import pytest

from pdxfer import memory
from pdxfer.client import DecodeClient, PrefillClient, Rank, State
from pdxfer.errors import ConfigError, DaemonUnavailableError, ResourceError
from pdxfer.layout import KVLayout, token_major
from pdxfer.local.messages import AttachWorker, WorkerHello
from tests.support.fake_agent import FakeAgent, ignore, refuse_with
from tests.unit.client.conftest import SmallCache

PREFILL = "tcp://127.0.0.1:4711"


def test_imports_neither_torch_nor_zmq_nor_ucx():
    code = (
        "import sys, pdxfer.client; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'zmq', 'uvloop', 'asyncio')"
        " or m.startswith(('pdxfer._ucx', 'pdxfer.fabric', 'pdxfer.agent', 'pdxfer.pool'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_attach_hands_over_layout_rank_and_memory(prefill_agent, cache):
    rank = Rank(tp=1, tp_size=2, pp=2, pp_size=3)
    with PrefillClient(
        prefill_agent.socket_path,
        cache,
        rank=rank,
        instance="one",
        ignore_parts=("draft.k",),
    ) as client:
        hello = prefill_agent.next(WorkerHello)
        assert (hello.role, hello.pid) == ("prefill", os.getpid())
        attach = prefill_agent.next(AttachWorker)
        assert attach.instance == "one"
        assert attach.ignore_parts == ["draft.k"]
        assert attach.relayout == cache.layout.relayout == "never"
        assert (attach.rank.tp, attach.rank.tp_size, attach.rank.pp, attach.rank.cp) == (1, 2, 2, 0)
        assert KVLayout.from_wire(attach.layout) == cache.layout
        cache.shared.buffer[100] = 42
        assert prefill_agent.memory[0].buffer[100] == 42
        assert client.addresses == (PREFILL + "#one",)


def test_regions_of_one_memfd_are_handed_over_once(decode_agent):
    layout = token_major(
        layers=range(3), kv_heads=1, head_dim=8, page_size=4, pages=4, dtype="bfloat16"
    )
    cache = SmallCache(layout)
    with DecodeClient(decode_agent.socket_path, cache, relayout="never"):
        attach = decode_agent.next(AttachWorker)
        assert attach.relayout == "never"
        assert len(attach.memory) == 6
        assert {part.fd_index for part in attach.memory} == {0}
        assert [part.offset_bytes for part in attach.memory] == [256 * i for i in range(6)]
    cache.shared.close()


def test_embedded_agent_gets_addresses_and_keeps_the_memory(decode_agent, cache):
    class Embedded:
        def __init__(self, socket_path):
            self.socket_path = socket_path

    agent = Embedded(decode_agent.socket_path)
    client = DecodeClient(agent, cache)
    attach = decode_agent.next(AttachWorker)
    assert [(part.kind, part.address) for part in attach.memory] == [
        ("address", cache.shared.address)
    ]
    with pytest.raises(BufferError):
        cache.shared.close()
    client.receive(1, PREFILL, [1])
    client.close()
    with pytest.raises(BufferError):  # a transfer was alive: the agent may still write
        cache.shared.close()
    del agent, client
    gc.collect()
    cache.shared.close()


def test_embedded_agent_lets_go_when_nothing_was_alive(decode_agent, cache):
    class Embedded:
        socket_path = decode_agent.socket_path

    agent = Embedded()
    with DecodeClient(agent, cache) as client:
        receiving = client.receive(1, PREFILL, [1])
        decode_agent.show(1, State.COMMITTED)
        receiving.wait(20)
    cache.shared.close()


def test_embedded_agent_takes_any_memory(decode_agent):
    class Embedded:
        socket_path = decode_agent.socket_path

    cache = SmallCache()
    foreign = memory.MemoryRange(cache.shared.address, cache.shared.length_bytes, object())
    cache.memory = (foreign,)
    agent = Embedded()
    DecodeClient(agent, cache).close()
    with pytest.raises(ConfigError, match=r"memory\[0\] is not in a memfd.*allocate.*embedded"):
        DecodeClient(decode_agent.socket_path, cache)
    cache.shared.close()


def test_nobody_listens(tmp_path, cache):
    for path in (tmp_path / "none.sock", str(tmp_path)):
        with pytest.raises(DaemonUnavailableError, match="socket_path=") as caught:
            PrefillClient(path, cache)
        assert caught.value.retryable
    with pytest.raises(ConfigError, match="socket_path"):
        PrefillClient("x" * 300, cache)


def test_agent_that_does_not_answer(prefill_agent, cache):
    prefill_agent.on[WorkerHello] = ignore
    with pytest.raises(DaemonUnavailableError, match=r"WorkerHello within timeout_s=0\.05"):
        PrefillClient(prefill_agent.socket_path, cache, timeout_s=0.05)
    assert prefill_agent.closed() == "the worker closed its connection"


def test_agent_that_does_not_accept(tmp_path, cache):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "full.sock"))
        listener.listen(0)
        others = []
        for _ in range(8):  # fill its backlog
            other = socket.socket(socket.AF_UNIX)
            other.setblocking(False)
            others.append(other)
            if other.connect_ex(str(tmp_path / "full.sock")):
                break
        with pytest.raises(DaemonUnavailableError, match=r"timeout_s=0\.05"):
            PrefillClient(tmp_path / "full.sock", cache, timeout_s=0.05)
        for other in others:
            other.close()


def test_other_version_is_refused_with_both(tmp_path, cache):
    with (
        FakeAgent(tmp_path / "old.sock", "prefill", version="0.0.9") as agent,
        pytest.raises(ConfigError, match=r"0\.1\.0.*0\.0\.9"),
    ):
        PrefillClient(agent.socket_path, cache)


def test_other_role_is_refused(prefill_agent, cache):
    with pytest.raises(ConfigError, match=r"is a decode worker.*a prefill agent"):
        DecodeClient(prefill_agent.socket_path, cache)


def test_refused_attach_raises_the_agents_error_and_detaches(prefill_agent, cache):
    error = ResourceError("this agent has 256 workers", retryable=True, fields={"workers": "256"})
    prefill_agent.on[AttachWorker] = refuse_with(error)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match="256 workers") as caught:
        PrefillClient(prefill_agent.socket_path, cache)
    assert caught.value.retryable
    assert caught.value.fields == {"workers": "256"}
    assert prefill_agent.closed() == "the worker closed its connection"
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the mapping of the fake agent


def test_memory_must_fit_the_layout(prefill_agent, cache):
    whole = cache.memory
    cache.memory = ()
    with pytest.raises(ConfigError, match="0 ranges, its layout 1 regions"):
        PrefillClient(prefill_agent.socket_path, cache)
    cache.memory = (dataclasses.replace(whole[0], length_bytes=4095),)
    with pytest.raises(ConfigError, match=r"memory\[0\] has 4095 bytes, region 0 .* 4096"):
        PrefillClient(prefill_agent.socket_path, cache)


@pytest.mark.parametrize(
    "options", [{"relayout": "maybe"}, {"timeout_s": 0}, {"timeout_s": float("nan")}]
)
def test_bad_options_are_named(prefill_agent, cache, options):
    [name] = options
    with pytest.raises(ConfigError, match=f"{name}="):
        PrefillClient(prefill_agent.socket_path, cache, **options)


def test_close_is_idempotent_and_leaves_no_descriptors(prefill_agent, cache):
    before = len(os.listdir("/proc/self/fd"))
    client = PrefillClient(prefill_agent.socket_path, cache)
    sending = client.open(5)
    prefill_agent.show(5, State.READY)
    client.close()
    client.close()
    assert prefill_agent.closed() == "the worker closed its connection"
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the mapping of the fake agent
    assert sending.poll() is State.QUARANTINED
    with pytest.raises(DaemonUnavailableError, match="this client is closed"):
        client.open(6)
    with pytest.raises(DaemonUnavailableError):
        sending.send([1])
    with pytest.raises(DaemonUnavailableError):
        sending.wait(1)
    sending.abort()
    assert client.finished() == []


def test_check_agent_sees_the_death(prefill_agent, prefill):
    prefill.check_agent()
    prefill_agent.die()
    with pytest.raises(DaemonUnavailableError, match="is gone"):
        prefill.check_agent()

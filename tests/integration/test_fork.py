"""Forked children of a worker: what they inherit is their parent's, and stays whole there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer import embedded
from pdxfer.client import AsyncPrefillClient, DecodeClient, PrefillClient, State
from pdxfer.errors import LocalProtocolError
from tests.support.fake_agent import FakeAgent
from tests.support.forks import in_fork
from tests.unit.client.conftest import SmallCache

PREFILL = "tcp://127.0.0.1:4711"
WAIT_S = 20


@pytest.fixture
def cache():
    made = SmallCache()
    yield made
    made.shared.close()


@pytest.fixture
def agent(tmp_path):
    with FakeAgent(tmp_path / "agent.sock", "decode") as made:
        yield made


def test_a_child_that_closes_an_inherited_client_leaves_the_parents_alone(agent, cache):
    with DecodeClient(agent.socket_path, cache) as client:
        receiving = client.receive(1, PREFILL, [1])

        def leave():
            with client:
                sys.exit(3)

        assert in_fork(client.close) is None
        assert isinstance(in_fork(leave), SystemExit)
        agent.show(1, State.COMMITTED, length_bytes=7)
        assert receiving.wait(WAIT_S).length_bytes == 7
        assert client.receive(2, PREFILL, [1]).poll() is State.WAITING


@pytest.mark.parametrize(
    "use",
    [
        lambda client, receiving: client.receive(2, PREFILL, [2]),
        lambda client, receiving: client.connect(PREFILL),
        lambda client, receiving: client.finished(),
        lambda client, receiving: client.check_agent(),
        lambda client, receiving: receiving.wait(WAIT_S),
        lambda client, receiving: receiving.place([2]),
        lambda client, receiving: receiving.abort(),
    ],
    ids=["receive", "connect", "finished", "check_agent", "wait", "place", "abort"],
)
def test_a_child_that_uses_an_inherited_client_is_told_at_once(agent, cache, use):
    with DecodeClient(agent.socket_path, cache) as client:
        receiving = client.receive(1, PREFILL)
        error = in_fork(lambda: use(client, receiving))
        assert isinstance(error, LocalProtocolError)
        assert f"belongs to process {os.getpid()}" in str(error)
        receiving.place([1])
        agent.show(1, State.COMMITTED)
        receiving.wait(WAIT_S)


def test_a_child_made_while_another_thread_waits_can_close(agent, cache):
    """That thread may hold any lock, and is not there in the child to give it back."""
    with DecodeClient(agent.socket_path, cache) as client:
        client.receive(1, PREFILL, [1])
        with client.channel._changed, client.channel._out_lock, client._lock:
            assert in_fork(client.close) is None
            assert isinstance(in_fork(client.finished), LocalProtocolError)


async def test_a_child_of_a_loop_that_closes_the_client_leaves_the_parents_watched(tmp_path, cache):
    with FakeAgent(tmp_path / "agent.sock", "prefill") as agent:
        async with AsyncPrefillClient(agent.socket_path, cache) as client:
            sending = await client.open(1)
            assert in_fork(client.close) is None
            agent.show(1, State.READY, prefix_tokens=0)
            await sending.wait(WAIT_S, until=State.READY)


def test_a_child_that_closes_an_embedded_agent_leaves_the_parents_folder(cache):
    with embedded.prefill_agent() as agent, PrefillClient(agent, cache) as client:
        assert in_fork(agent.close) is None
        assert Path(agent.socket_path).exists()
        assert client.open(1).poll() is State.WAITING
        with PrefillClient(agent, cache, instance="second"):
            pass
    assert not Path(agent.socket_path).parent.exists()


def test_a_child_that_ends_in_order_leaves_the_parents_folder():
    """Its exit handlers run, which a fork has inherited."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pdxfer import embedded\n"
        "with embedded.decode_agent() as agent:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    print(Path(agent.socket_path).exists())\n"
        "print(Path(agent.socket_path).parent.exists())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "False"]

"""A worker process with an embedded agent ends: what the decode worker on the same host sees."""

import os
import subprocess
import sys
import time

import pytest

from pdxfer import embedded
from pdxfer.agent.config import AgentConfig
from pdxfer.client import DecodeClient, PrefillClient, State
from pdxfer.errors import PeerError
from tests.support.caches import PAGE, SeededCache, small

pytestmark = pytest.mark.ucx
WAIT_S = 30.0

_PREFILL = """
import sys
from pdxfer import embedded
from pdxfer.agent.config import AgentConfig
from pdxfer.client import PrefillClient
from tests.support.caches import SeededCache, small

config = AgentConfig(role="prefill", socket_path="", lanes=(sys.argv[1],), drain_deadline_s=0.1)
cache = SeededCache(small(), 1)
with embedded.prefill_agent(config) as agent, PrefillClient(agent, cache) as sender:
    print(sender.addresses[0], flush=True)
    sender.send(9, [1], last=False)
    input()
print("closed", flush=True)
input()
"""


def until(holds):
    deadline = time.monotonic() + WAIT_S
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


@pytest.mark.parametrize("lane", ["cma", "tcp"])
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_end_of_an_embedded_prefill_agent_leaves_nothing_quarantined(tmp_path, lane, end):
    child = subprocess.Popen(
        [sys.executable, "-c", _PREFILL, lane],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(["", *sys.path]),
            "TMPDIR": str(tmp_path),
        },
    )
    address = child.stdout.readline().strip()
    config = AgentConfig(role="decode", socket_path="", lanes=(lane,))
    with (
        embedded.decode_agent(config) as agent,
        DecodeClient(agent, SeededCache(small(), 2)) as receiver,
    ):
        receiving = receiver.receive(9, address, [1, 2], tokens=2 * PAGE)
        assert until(lambda: receiving.poll() is State.MOVING)
        if end == "closed":
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "closed\n"
            assert list(tmp_path.iterdir()) == []
        else:
            child.kill()
        assert until(lambda: receiving.poll() is State.FAILED), receiving
        assert receiving.pages_returned
        with pytest.raises(PeerError):
            receiving.wait(WAIT_S)
    child.kill()
    child.communicate()


@pytest.mark.parametrize("lane", ["cma", "tcp"])
def test_a_worker_whose_embedded_agent_was_closed_has_its_pages_back(lane):
    """No process has ended, but the agent has closed its lanes; nobody else was told a page."""
    config = AgentConfig(role="prefill", socket_path="", lanes=(lane,), drain_deadline_s=0.1)
    agent = embedded.prefill_agent(config)
    with PrefillClient(agent, SeededCache(small(), 1)) as sender:
        sending = sender.send(9, [1], last=False)
        agent.close()
        assert until(lambda: sending.poll() is State.FAILED)
        assert sending.pages_returned
        assert sender.finished() == [sending]

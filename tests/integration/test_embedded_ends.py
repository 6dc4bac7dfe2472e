"""An embedded agent and its process: it keeps none alive, and leaves nothing in /tmp."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pdxfer import embedded
from pdxfer.client import DecodeClient, PrefillClient
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.local.folder import PREFIX, OwnFolder, remove_left
from tests.integration.test_daemons import cross
from tests.support.caches import SeededCache, small
from tests.support.forks import in_fork

WAIT_S = 60
LANES = ("tcp",)

PRELUDE = """
import multiprocessing, os, signal, sys, threading
from pdxfer import embedded
from pdxfer.client import DecodeClient, PrefillClient, State
from tests.support.caches import SeededCache, small

def config(role):
    "A drain would take longer than the test."
    return embedded.AgentConfig(
        role=role, socket_path="", lanes=("tcp",), drain_deadline_s=1000.0
    )

def live():
    "An agent with a transfer that waits, and nobody who closes anything."
    agent = embedded.prefill_agent(config("prefill"))
    client = PrefillClient(agent, SeededCache(small(), 1))
    client.send(1, [1], last=False)
    return agent, client

"""


def child(folder, code, *, ends=None, environment=None):
    """Run Python in a process of its own, whose temporary files go into `folder`: its exit code."""
    variables = {**os.environ, "TMPDIR": str(folder), **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=variables,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=WAIT_S,  # a process that is kept alive fails here
        check=False,
    )
    if ends is not None:
        assert done.returncode == ends, done.stderr
    return done


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


WAYS = {
    "the end of the script": ("kept = live()", 0),
    "an exception": ("kept = live()\nraise KeyError(1)", 1),
    "an exception inside a with": (
        "with embedded.decode_agent(config('decode')) as agent:\n    raise KeyError(1)",
        1,
    ),
    "an exception inside a with, with a transfer that waits": (
        "with embedded.prefill_agent(config('prefill')) as agent:\n"
        "    client = PrefillClient(agent, SeededCache(small(), 1))\n"
        "    client.send(1, [1], last=False)\n"
        "    raise KeyError(1)",
        1,
    ),
    "sys.exit": ("kept = live()\nsys.exit(7)", 7),
    "an interrupt": ("kept = live()\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()", -2),
    "an exception in another thread": (
        "threading.excepthook = lambda *_: None\n"
        "def fails():\n    global kept\n    kept = live()\n    raise KeyError(1)\n"
        "thread = threading.Thread(target=fails)\nthread.start()\nthread.join()",
        0,
    ),
    "an agent that was made in a thread that goes on": (
        "made = threading.Event()\n"
        "def work():\n    global kept\n    kept = live()\n    made.set()\n"
        "threading.Thread(target=work).start()\nmade.wait()",
        0,
    ),
    "both roles": ("kept = embedded.both_agents(config('prefill'), config('decode'))", 0),
    "an agent that could not start": (
        "embedded.prefill_agent(embedded.AgentConfig(role='prefill', socket_path='',"
        " ucx='/nowhere', lanes=('tcp',)))",
        1,
    ),
}


@pytest.mark.ucx
@pytest.mark.parametrize(("code", "ends"), WAYS.values(), ids=WAYS)
def test_a_process_ends_and_leaves_nothing(tmp_path, code, ends):
    done = child(tmp_path, code, ends=ends)
    assert left_in(tmp_path) == []
    assert "nanobind" not in done.stderr  # which tells of a lane that nobody closed


@pytest.mark.ucx
def test_a_process_ends_where_its_agent_hangs_and_says_so(tmp_path):
    hangs = (
        "import time\nfrom pdxfer import limits\nkept = live()\n"
        "limits.ENGINE_CLOSE_DEADLINE_S = 0.2\n"
        "kept[0]._loop.call_soon_threadsafe(time.sleep, 1000)"
    )
    done = child(tmp_path, hangs, ends=0)
    assert left_in(tmp_path) == []
    assert "the embedded prefill agent did not stop within" in done.stderr


@pytest.mark.ucx
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_ends_and_leaves_nothing(tmp_path, method):
    """It runs no exit handlers of `atexit`, and waits for threads that are not daemons."""
    script = tmp_path / "script.py"
    script.write_text(
        PRELUDE + "def work():\n    global kept\n    kept = live()\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    process.start()\n    process.join()\n    sys.exit(process.exitcode)\n"
    )
    place = Path(tempfile.mkdtemp(prefix="pdx"))  # short, as the path of a socket has to be
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    left = left_in(place)
    shutil.rmtree(place)
    assert done.returncode == 0, done.stderr
    assert left == []


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("code", "ends"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6)],
)
def test_what_a_process_that_could_not_clean_up_left_goes_with_the_next(tmp_path, code, ends):
    child(tmp_path, f"kept = live()\n{code}", ends=ends, environment={"PYTHONFAULTHANDLER": ""})
    assert len(left_in(tmp_path)) == 1
    child(tmp_path, "embedded.decode_agent(config('decode')).close()", ends=0)
    assert left_in(tmp_path) == []


def test_folders_of_the_living_and_what_is_no_folder_of_ours_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = OwnFolder()
    (Path(living.path) / "agent").touch()
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    (tmp_path / f"{PREFIX}dead").mkdir()
    (tmp_path / f"{PREFIX}dead" / "agent").touch()
    remove_left()
    assert set(left_in(tmp_path)) == {
        Path(living.path).name,
        f"{PREFIX}file",
        f"{PREFIX}link",
        "other",
    }
    assert in_fork(living.close) is None
    assert Path(living.path).name in left_in(tmp_path)
    living.close()
    living.close()
    assert Path(living.path).name not in left_in(tmp_path)
    (tmp_path / f"{PREFIX}of-another-user").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    remove_left()
    assert f"{PREFIX}of-another-user" in left_in(tmp_path)


def test_a_folder_taken_for_dead_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = str(tmp_path / f"{PREFIX}first")
    real, taken = os.open, []

    def opened(path, *rest):
        fd = real(path, *rest)
        if not taken:
            taken.append(path)
            os.rmdir(path)
        return fd

    monkeypatch.setattr(os, "open", opened)
    folder = OwnFolder()
    assert folder.path != taken[0] != first
    assert os.path.isdir(folder.path)
    folder.close()


@pytest.mark.ucx
def test_both_roles_in_one_agent_on_one_thread():
    configs = [
        embedded.AgentConfig(role=role, socket_path="", lanes=LANES)
        for role in ("prefill", "decode")
    ]

    before = {thread.ident for thread in threading.enumerate()}
    with embedded.both_agents(*configs) as agents:
        [thread] = [each for each in threading.enumerate() if each.ident not in before]
        assert thread.name == "pdxfer-prefill-decode"
        source, destination = SeededCache(small(), 1), SeededCache(small(), 2)
        with (
            PrefillClient(agents.prefill, source) as sender,
            DecodeClient(agents.decode, destination) as receiver,
        ):
            for room in range(1, 4):
                cross(sender, receiver, source, destination, room)
        agents.prefill.close()
        assert agents.prefill.closed
        assert not agents.decode.closed
        with DecodeClient(agents.decode, destination):
            pass
    assert agents.decode.closed
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.ucx
def test_both_roles_where_one_cannot_start_run_none(tmp_path):
    sockets = tmp_path / "agents"
    prefill = embedded.AgentConfig(role="prefill", socket_path=str(tmp_path / "p"), lanes=LANES)
    decode = embedded.AgentConfig(role="decode", socket_path=str(sockets / "d"), lanes=LANES)
    with pytest.raises(ResourceError, match="there is no folder"):
        embedded.both_agents(prefill, decode)
    assert left_in(tmp_path) == []
    with pytest.raises(ConfigError, match="role='decode'"):
        embedded.both_agents(prefill, prefill)
    assert left_in(tmp_path) == []

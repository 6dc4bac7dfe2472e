"""`pdxfer status` of a daemon that is another one, or does not answer."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from pdxfer.cli import status
from pdxfer.cli.main import main
from pdxfer.local.messages import AgentStatus

LISTENS = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener(tmp_path):
    """A process that listens and never answers: (socket path, pid)."""
    path = str(tmp_path / "a.sock")
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"listening\n"
    yield path, process.pid
    process.kill()
    process.communicate()


def test_a_silent_daemon_is_named(listener, capsys):
    path, pid = listener
    assert main(["status", "prefill", "--socket-path", path, "--timeout-s", "0.1"]) == 1
    err = capsys.readouterr().err
    assert f"{path} did not answer AskStatus within timeout_s=0.1. Its process {pid} is not" in err
    assert "longer --timeout-s" in err


def test_a_stopped_daemon_is_told_with_the_remedy(listener, capsys):
    path, pid = listener
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert main(["status", "prefill", "--socket-path", path, "--timeout-s", "0.1"]) == 1
    err = capsys.readouterr().err
    assert f"Its process {pid} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}" in err


def test_a_daemon_whose_queue_is_full_is_stopped_or_busy(tmp_path):
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as waiting:
        listening.bind(path)
        listening.listen(0)
        waiting.connect(path)
        assert "Its process is stopped (then kill -CONT it), or busy: " in status.silent(path)


def test_where_none_listens_nothing_is_said(tmp_path, capsys):
    path = str(tmp_path / "none.sock")
    assert main(["status", "prefill", "--socket-path", path]) == 1
    assert "Its process" not in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_another_daemon_than_asked_for_is_refused(monkeypatch, capsys, flags):
    answer = AgentStatus(
        version="1", role="prefill", pid=1, incarnation=b"", addresses=[], lanes=[],
        lanes_in_use=[], ucx_version="", workers=[], live_transfers=0, transfers=[],
        stopping=False, request=1,
    )  # fmt: skip
    monkeypatch.setattr(status, "ask", lambda path, timeout_s: answer)
    assert main(["status", "decode", "--socket-path", "prefill.sock", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "asked for the decode daemon, and at prefill.sock a prefill daemon answers" in err
    assert "run `pdxfer status prefill`" in err
    assert main(["status", "prefill", "--socket-path", "prefill.sock", *flags]) == 0

"""Processes that a command starts: what they say, how they fail, that they always end."""

import os

import pytest

from pdxfer import limits
from pdxfer.launch.child import Child, ChildFailedError
from pdxfer.launch.daemons import DaemonPair

MODULE = "tests.support.launched"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def child():
    with Child("helper", MODULE, say="hello") as started:
        assert started.receive("ready")["said"] == "hello"
        yield started
    assert not alive(started.pid)


def test_it_answers_and_ends_with_its_parent(child):
    child.send(do="echo", value=[1, "two"])
    assert child.receive("echo")["value"] == [1, "two"]


def test_its_failure_is_told_with_its_name_and_text(child):
    child.send(do="fail")
    with pytest.raises(ChildFailedError, match="helper process failed: ValueError: as asked"):
        child.receive("echo")


def test_its_exit_is_told_with_its_code(child):
    child.send(do="leave")
    with pytest.raises(ChildFailedError, match="helper process ended with exit code 7"):
        child.receive("echo")


def test_its_death_is_told(child):
    child.kill()
    with pytest.raises(ChildFailedError, match="exit code -9"):
        child.receive("echo")


def test_another_answer_than_the_expected_one_is_refused(child):
    child.send(do="echo", value=1)
    with pytest.raises(ChildFailedError, match="said 'echo', expected 'ready'"):
        child.receive("ready")


def test_its_silence_has_a_deadline_and_it_is_killed(monkeypatch):
    monkeypatch.setattr(limits, "CHILD_STOP_TIMEOUT_S", 0.2)
    with Child("helper", MODULE, say="") as started:
        started.receive("ready")
        started.send(do="hang", seconds=60)
        with pytest.raises(ChildFailedError, match=r"within 0\.1 s"):
            started.receive("echo", timeout_s=0.1)
    assert not alive(started.pid)


@pytest.mark.ucx
def test_daemons_end_and_show_their_logs_when_the_command_fails(capfd):
    class FailedError(Exception):
        pass

    with pytest.raises(FailedError), DaemonPair("tcp") as daemons:
        raise FailedError
    assert not alive(daemons.prefill.pid)
    assert not alive(daemons.decode.pid)
    err = capfd.readouterr().err
    assert "log of pdxfer-prefill" in err
    assert "ready role=decode" in err


@pytest.mark.ucx
def test_a_daemon_that_cannot_start_is_told_with_its_log():
    refused = pytest.raises(ChildFailedError, match="no lane 'pigeon' in this build")
    with refused as caught, DaemonPair("pigeon"):
        pass
    assert "exit code" in str(caught.value)

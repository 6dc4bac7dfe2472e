"""What a worker proves by itself after its agent's death."""

import os
import socket
import subprocess
import sys

import pytest

from pdxfer.client.proofs import AgentProcess, Writers
from pdxfer.local.board import Entry
from pdxfer.local.messages import TransferWriters, Writer

ONE, OTHER = b"1" * 16, b"2" * 16


@pytest.fixture
def process():
    """Makes processes that live until they are killed."""
    made = []

    def make():
        made.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.communicate()


@pytest.fixture
def writers():
    made = Writers()
    yield made
    made.close()


def name(writers, incarnation, child):
    fds = [os.pidfd_open(child.pid)]
    writers.hear(Writer(incarnation=incarnation), fds)
    assert fds == []


def entry(count, incarnation=ONE):
    return Entry(7, 3, 3, incarnation, count, 0)


def end(child):
    child.kill()
    child.wait()


def test_where_the_agent_placed_all_its_end_is_enough(writers):
    assert writers.all_ended(0, 1, None)
    assert writers.all_ended(0, 1, entry(0))


def test_a_writer_has_to_end_too(writers, process):
    child, other = process(), process()
    name(writers, ONE, child)
    name(writers, OTHER, other)
    assert not writers.all_ended(0, 1, entry(1))
    end(other)
    assert not writers.all_ended(0, 1, entry(1))
    end(child)
    assert writers.all_ended(0, 1, entry(1))
    assert writers.all_ended(0, 1, entry(1))


def test_a_writer_that_was_not_named_is_never_taken_for_ended(writers, process):
    child = process()
    name(writers, OTHER, child)
    end(child)
    assert not writers.all_ended(0, 1, entry(1))
    assert not writers.all_ended(0, 1, entry(2))


def test_of_several_writers_all_have_to_end(writers, process):
    first, second = process(), process()
    name(writers, ONE, first)
    name(writers, OTHER, second)
    writers.hear(TransferWriters(transfer=4, sequence=9, incarnations=[ONE, OTHER]), [])
    end(first)
    assert not writers.all_ended(4, 9, entry(2))
    end(second)
    assert writers.all_ended(4, 9, entry(2))
    assert not writers.all_ended(4, 10, entry(2))  # of another use of the slot
    assert not writers.all_ended(5, 9, entry(2))


def test_descriptors_of_ended_writers_are_closed_and_their_end_is_remembered(writers, process):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        child = process()
        name(writers, bytes([number]) * 16, child)
        end(child)
        child.communicate()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert writers.all_ended(0, 1, entry(1, bytes([0]) * 16))


def test_the_same_writer_named_again_costs_no_descriptor(writers, process):
    child = process()
    name(writers, ONE, child)
    before = len(os.listdir("/proc/self/fd"))
    name(writers, ONE, child)
    assert len(os.listdir("/proc/self/fd")) == before


_LISTENER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    connection, _ = listener.accept()
    input()
    connection.close()
    print("closed", flush=True)
    input()
"""


def test_a_closed_connection_is_not_the_end_of_the_agents_process(tmp_path):
    path = str(tmp_path / "agent")
    child = subprocess.Popen(
        [sys.executable, "-c", _LISTENER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "listening\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        agent = AgentProcess(sock, lambda: True)
        assert not agent.ended
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "closed\n"
        assert sock.recv(1) == b""
        assert not agent.ended
        child.kill()
        child.communicate()
        assert agent.ended
    agent.close()
    assert not agent.ended


def test_an_agent_of_this_process_says_itself_when_it_has_ended(tmp_path):
    said = [False]
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        sock.connect(str(tmp_path / "agent"))
        agent = AgentProcess(sock, lambda: said[0])
    assert not agent.ended
    said[0] = True
    assert agent.ended
    agent.close()

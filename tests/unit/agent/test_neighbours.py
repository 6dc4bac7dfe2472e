"""Agents of one host prove it to each other, and see each other die."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from pdxfer import limits
from pdxfer.agent.host import host_id
from pdxfer.agent.neighbour_line import Line, Meet, Met, Silent, connect
from pdxfer.agent.neighbours import Neighbours
from pdxfer.wire.messages import Hello

DECODE, PREFILL = b"d" * 16, b"p" * 16


@dataclass
class Agent:
    """One side, without anything around it."""

    incarnation: bytes
    role: str
    room: Neighbours = None
    dead: list[bytes] = field(default_factory=list)
    silent: list[bytes] = field(default_factory=list)

    def hello(self, peer=b"", **changes):
        said = {
            "version": 0,
            "role": self.role,
            "boot_id": host_id(),
            "uid": os.geteuid(),
            "local_socket": self.room.local_socket,
            "nonce": self.room.nonce(peer),
        }
        return Hello(**{**said, **changes})


def agent(incarnation, role, folder):
    made = Agent(incarnation, role)
    made.room = Neighbours(
        incarnation,
        str(folder / f"{role}.sock"),
        on_dead=made.dead.append,
        on_silent=made.silent.append,
    )
    made.room.start(asyncio.get_running_loop(), listening=role == "prefill")
    return made


@pytest.fixture
def pair(tmp_path):
    """Runs a test on a loop with both agents, and closes them."""

    def run(test):
        async def body():
            both = agent(DECODE, "decode", tmp_path), agent(PREFILL, "prefill", tmp_path)
            try:
                await asyncio.wait_for(test(*both), 20)
            finally:
                for each in both:
                    each.room.close()
            assert list(tmp_path.iterdir()) == []

        asyncio.run(body())

    return run


async def until(holds):
    while not holds():  # noqa: ASYNC110 any condition
        await asyncio.sleep(0.002)


async def meeting(decode, hello):
    """What decode finds out about a prefill life with this hello."""
    done = asyncio.get_running_loop().create_future()
    decode.room.meet(PREFILL, hello, done.set_result)
    return await done


async def both_near(decode, prefill):
    prefill.room.expect(DECODE, decode.hello())
    assert await meeting(decode, prefill.hello(DECODE)) == ""
    await until(lambda: prefill.room.is_near(DECODE))


def test_two_agents_prove_to_be_on_one_host(pair):
    async def body(decode, prefill):
        assert stat.S_IMODE(os.stat(prefill.room.local_socket).st_mode) == 0o600
        await both_near(decode, prefill)
        assert decode.room.is_near(PREFILL)
        assert decode.room.peers == (PREFILL,)
        assert prefill.room.peers == (DECODE,)

    pair(body)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"uid": os.geteuid() + 1}, f"as user {os.geteuid() + 1}"),
        ({"nonce": b""}, "how to prove"),
        ({"local_socket": ""}, "no socket"),
        ({"local_socket": "/run/other.sock"}, "not the path"),
        ({"local_socket": "relative." + PREFILL.hex()[:8]}, "not the path"),
        ({"local_socket": "\0abstract." + PREFILL.hex()[:8]}, "not the path"),
        ({"local_socket": "/nowhere/a." + PREFILL.hex()[:8]}, "cannot be reached"),
    ],
)
def test_what_a_hello_says_is_not_enough(pair, changes, why):
    async def body(decode, prefill):
        prefill.room.expect(DECODE, decode.hello())
        assert why in await meeting(decode, prefill.hello(DECODE, **changes))
        assert decode.room.peers == prefill.room.peers == ()

    pair(body)


def test_a_path_told_by_a_peer_that_is_no_socket_is_not_opened(pair, tmp_path):
    async def body(decode, prefill):
        file = tmp_path / f"x.{PREFILL.hex()[:8]}"
        file.touch()
        said = prefill.hello(DECODE, local_socket=str(file))
        assert "cannot be reached" in await meeting(decode, said)
        file.unlink()

    pair(body)


@pytest.mark.parametrize("forged", ["nonce", "incarnation", "session"])
def test_whoever_does_not_return_the_nonce_is_no_neighbour(pair, forged):
    async def body(decode, prefill):
        if forged != "session":
            prefill.room.expect(DECODE, decode.hello())
        said = prefill.hello(b"e" * 16 if forged == "incarnation" else DECODE)
        if forged == "nonce":
            said = prefill.hello(DECODE, nonce=bytes(16))
        assert "closed the connection" in await meeting(decode, said)
        assert prefill.room.peers == decode.room.peers == ()

    pair(body)


def test_an_answer_without_decodes_nonce_proves_nothing(pair):
    """Another agent's socket under the right name: it does not know what decode's Hello said."""

    async def body(decode, prefill):
        prefill.room.expect(DECODE, decode.hello(nonce=bytes(16)))
        why = await meeting(decode, prefill.hello(DECODE))
        assert "is not the one of the session" in why
        assert decode.room.peers == ()

    pair(body)


def greeting(prefill, fds, said=None):
    """What prefill makes of a stranger that knows the nonce and passes these descriptors."""
    answers, ended = [], []
    line = Line(
        asyncio.get_running_loop(),
        connect(prefill.room.local_socket),
        lambda line, message, fds: answers.append(message),
        lambda line, why: ended.append(why),
    )
    line.send(said or Meet(incarnation=DECODE, nonce=prefill.room.nonce(DECODE)), fds)
    return answers, ended


@pytest.mark.parametrize("passed", ["none", "a file", "another process", "a dead process"])
def test_a_descriptor_that_is_not_of_the_other_end_is_refused(pair, passed):
    async def body(decode, prefill):
        prefill.room.expect(DECODE, decode.hello())
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        pidfd, file = os.pidfd_open(child.pid), os.open("/dev/null", os.O_RDONLY)
        if passed == "a dead process":
            child.kill()
            child.wait()
        fds = {"none": [], "a file": [file]}.get(passed, [pidfd])
        answers, ended = greeting(prefill, fds)
        await until(lambda: ended)
        assert answers == []
        assert prefill.room.peers == ()
        child.kill()
        child.communicate()
        os.close(pidfd)
        os.close(file)

    pair(body)


@pytest.mark.parametrize("said", [Met(incarnation=DECODE, nonce=b""), Silent()])
def test_other_messages_of_a_stranger_prove_nothing(pair, said):
    async def body(decode, prefill):
        prefill.room.expect(DECODE, decode.hello())
        _, ended = greeting(prefill, [], said)
        await asyncio.sleep(0.05)
        assert prefill.room.peers == ()
        assert prefill.silent == []
        assert bool(ended) == isinstance(said, Met)

    pair(body)


def test_a_nonce_serves_once(pair):
    async def body(decode, prefill):
        await both_near(decode, prefill)
        own = os.pidfd_open(os.getpid())
        answers, ended = greeting(prefill, [own])
        await until(lambda: answers or ended)
        assert answers == []
        assert prefill.room.is_near(DECODE)
        os.close(own)

    pair(body)


def test_a_neighbour_that_does_not_answer_is_none_after_a_while(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "NEIGHBOUR_TIMEOUT_S", 0.05)

    async def body(decode, prefill):
        path = str(tmp_path / f"mute.{PREFILL.hex()[:8]}")
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind(path)
            mute.listen()
            said = prefill.hello(DECODE, local_socket=path)
            assert "did not answer within" in await meeting(decode, said)
        os.unlink(path)

    pair(body)


def test_a_stranger_that_says_nothing_is_let_go_and_too_many_are_not_let_in(pair, monkeypatch):
    monkeypatch.setattr(limits, "NEIGHBOUR_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "NEIGHBOURS_UNPROVEN_MAX", 2)

    async def body(decode, prefill):
        loop = asyncio.get_running_loop()
        mute = [connect(prefill.room.local_socket) for _ in range(3)]
        assert await loop.sock_recv(mute[2], 1) == b""  # one too many: at once
        assert await loop.sock_recv(mute[0], 1) == b""  # silent too long
        assert await loop.sock_recv(mute[1], 1) == b""
        for each in mute:
            each.close()
        await both_near(decode, prefill)

    pair(body)


_PREFILL_ELSEWHERE = """
import asyncio, sys
from tests.unit.agent.test_neighbours import DECODE, PREFILL, agent
from pathlib import Path
from pdxfer.wire.messages import Hello
import msgspec

async def main():
    prefill = agent(PREFILL, "prefill", Path(sys.argv[1]))
    hello = msgspec.json.decode(sys.argv[2].encode(), type=Hello)
    prefill.room.expect(DECODE, hello)
    print(msgspec.json.encode(prefill.hello(DECODE)).decode(), flush=True)
    while not prefill.room.is_near(DECODE):
        await asyncio.sleep(0.002)
    print("near", flush=True)
    await asyncio.to_thread(input)
    prefill.room.close(silent=True)
    print("closed", flush=True)
    await asyncio.to_thread(input)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_end_of_a_neighbour_is_told_and_an_open_connection_is_not_it(pair, tmp_path, end):
    import msgspec

    async def body(decode, prefill):
        prefill.room.close()
        command = [sys.executable, "-c", _PREFILL_ELSEWHERE, str(tmp_path)]
        told = msgspec.json.encode(decode.hello()).decode()
        child = subprocess.Popen(  # noqa: ASYNC220 at once
            [*command, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        read = lambda: asyncio.to_thread(child.stdout.readline)  # noqa: E731
        hello = msgspec.json.decode((await read()).encode(), type=Hello)
        assert await meeting(decode, hello) == ""
        assert await read() == "near\n"
        assert decode.room.is_near(PREFILL)
        if end == "closed":
            child.stdin.write("\n")
            child.stdin.flush()
            assert await read() == "closed\n"
            await until(lambda: decode.silent)
            assert decode.dead == []
            assert decode.room.is_near(PREFILL)
        child.kill()
        await until(lambda: decode.dead)
        assert decode.dead == [PREFILL]
        assert not decode.room.is_near(PREFILL)
        assert decode.room.pidfd(PREFILL) == -1
        child.communicate()
        if end == "killed":  # its file stays, and goes with the next start at the same place
            left = list(tmp_path.iterdir())
            assert [path.name for path in left] == [f"prefill.sock.{PREFILL.hex()[:8]}"]
            later = agent(b"q" * 16, "prefill", tmp_path)
            assert [path.name for path in tmp_path.iterdir()] == ["prefill.sock.71717171"]
            later.room.close()

    pair(body)


def test_a_socket_in_use_is_left_alone_by_another_start(pair, tmp_path):
    async def body(decode, prefill):
        other = agent(b"q" * 16, "prefill", tmp_path)
        await both_near(decode, prefill)
        other.room.close()

    pair(body)


def test_a_long_folder_is_no_hindrance(tmp_path):
    folder = tmp_path / ("f" * 120)
    folder.mkdir()

    async def body():
        decode, prefill = agent(DECODE, "decode", folder), agent(PREFILL, "prefill", folder)
        await both_near(decode, prefill)
        decode.room.close()
        prefill.room.close()

    asyncio.run(body())


def test_without_a_socket_nobody_is_a_neighbour_and_the_log_says_why(tmp_path, caplog):
    async def body():
        prefill = agent(PREFILL, "prefill", tmp_path / "none")
        assert prefill.room.local_socket == ""
        prefill.room.close()

    asyncio.run(body())
    assert "neighbour_socket_failed" in caplog.text


def test_nothing_stays_open(pair):
    async def body(decode, prefill):
        await both_near(decode, prefill)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await both_near(decode, prefill)
        await asyncio.sleep(0.02)
        assert len(os.listdir("/proc/self/fd")) == before

    pair(body)


def test_a_folder_that_somebody_has_tidied_is_no_hindrance_to_closing(pair):
    async def body(decode, prefill):
        os.unlink(prefill.room.local_socket)
        prefill.room.close()
        prefill.room.close()

    pair(body)

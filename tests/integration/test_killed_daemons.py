"""Daemons of both roles are killed, at each stage of a transfer, over each lane: what the worker on
the other side sees, and what the worker of the dead daemon can prove by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import msgspec
import numpy as np
import pytest

from pdxfer.client import DecodeClient, PrefillClient, State
from pdxfer.errors import DaemonUnavailableError, PdxferError, PeerError
from pdxfer.launch.daemons import DaemonProcess
from pdxfer.local.messages import HeldTransfer
from pdxfer.wire.messages import GroupPages
from pdxfer.wire.pages import pack_ids
from tests.support.caches import PAGE, SeededCache, small

pytestmark = pytest.mark.ucx
LANES = ["tcp", "cma"]
STAGES = ["waiting", "bound", "moving"]
WAIT_S = 30.0


@contextlib.contextmanager
def daemons(folder, lane, roles=("prefill", "decode")):
    """One daemon a role, with its facts."""
    with contextlib.ExitStack() as stack:
        started = []
        for role in roles:
            place = folder / role
            place.mkdir(parents=True)
            process = stack.enter_context(DaemonProcess(role, place, ["--lanes", lane]))
            started.append(process.wait_ready())
        yield started


@contextlib.contextmanager
def workers(prefill, decode):
    with (
        PrefillClient(prefill.socket, SeededCache(small(), 1)) as sender,
        DecodeClient(decode.socket, SeededCache(small(), 2)) as receiver,
    ):
        yield sender, receiver


def until(holds, timeout_s=WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


def begin(sender, receiver, stage):
    """A transfer of room 9 at a stage: (sending, receiving)."""
    receiver.connect(sender.addresses)
    sending = None
    receiving = receiver.receive(9, sender.addresses, [1, 2], tokens=2 * PAGE)
    assert until(lambda: receiver.board.entry(receiving.slot, receiving.sequence).generation)
    if stage != "waiting":
        sending = sender.open(9)
        assert until(lambda: receiving.poll() is State.READY)
    if stage == "moving":
        sending.send([1], last=False)
        assert until(lambda: receiving.poll() is State.MOVING)
        assert until(lambda: sending.poll() is State.MOVING)
    return sending, receiving


def kill(facts):
    os.kill(facts.pid, signal.SIGKILL)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_decode_worker_of_a_killed_prefill_daemon(tmp_path, lane, stage):
    with daemons(tmp_path, lane) as (prefill, decode), workers(prefill, decode) as pair:
        _, receiving = begin(*pair, stage)
        kill(prefill)
        assert until(lambda: receiving.poll() is State.FAILED), receiving
        assert receiving.pages_returned
        with pytest.raises(PeerError) as raised:
            receiving.wait(WAIT_S)
        assert "no sign of the peer" not in str(raised.value)
        assert receiving.error.fields["fence"] == {"tcp": "revoked", "cma": "dead"}[lane]
        with pytest.raises(PeerError, match="connect timed out") as raised:
            pair[1].connect(pair[0].addresses, timeout_s=0.5)
        assert "no sign of the peer" not in str(raised.value)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_prefill_daemon_of_another_host_is_found_by_its_connections(tmp_path, stage):
    """Without its socket for neighbours it cannot be told from one on another host."""
    with daemons(tmp_path, "tcp") as (prefill, decode):
        (socket_file,) = (tmp_path / "prefill").glob("prefill.sock.*")
        socket_file.unlink()
        with workers(prefill, decode) as pair:
            _, receiving = begin(*pair, stage)
            kill(prefill)
            assert until(lambda: receiving.poll() is State.FAILED), receiving
            assert receiving.error.fields["fence"] == "revoked"
            with pytest.raises(PeerError, match="connect timed out") as raised:
                pair[1].connect(pair[0].addresses, timeout_s=0.5)
            assert "no sign of the peer" not in str(raised.value)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("stage", ["bound", "moving"])
def test_the_prefill_worker_of_a_killed_decode_daemon(tmp_path, lane, stage):
    with daemons(tmp_path, lane) as (prefill, decode), workers(prefill, decode) as pair:
        sending, _ = begin(*pair, stage)
        kill(decode)
        assert until(lambda: sending.poll() is State.FAILED), sending
        assert sending.pages_returned
        with pytest.raises(PdxferError) as raised:
            sending.wait(WAIT_S)
        assert "no sign of the" not in str(raised.value)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("stage", ["bound", "moving"])
def test_the_own_worker_of_a_killed_prefill_daemon(tmp_path, lane, stage):
    with daemons(tmp_path, lane) as (prefill, decode), workers(prefill, decode) as pair:
        sending, _ = begin(*pair, stage)
        kill(prefill)
        assert until(lambda: sending.poll() is State.FAILED), sending
        assert sending.pages_returned
        assert isinstance(sending.error, DaemonUnavailableError)
        assert sending.error.fields["fence"] == "dead"
        assert listed(pair[0], sending)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("stage", ["untold", *STAGES])
def test_the_own_worker_of_a_killed_decode_daemon(tmp_path, lane, stage):
    """Over cma the prefill daemon may write on: only its end gives back pages that it was told."""
    with daemons(tmp_path, lane) as (prefill, decode), workers(prefill, decode) as pair:
        if stage == "untold":
            nobody = "tcp://127.0.0.1:9"
            receiving = pair[1].receive(9, nobody, [1, 2], tokens=2 * PAGE)
        else:
            _, receiving = begin(*pair, stage)
        kill(decode)
        if lane == "cma" and stage != "untold":
            assert until(lambda: receiving.poll() is State.QUARANTINED)
            assert until(lambda: listed(pair[1], receiving))
            time.sleep(0.3)
            assert receiving.poll() is State.QUARANTINED
            assert not receiving.pages_returned
            assert receiving.error.fields["fence"] == "quarantined"
            assert pair[1].finished() == []
            kill(prefill)
        assert until(lambda: receiving.poll() is State.FAILED), receiving
        assert receiving.pages_returned
        assert isinstance(receiving.error, DaemonUnavailableError)
        assert receiving.error.fields["fence"] == "dead"
        assert listed(pair[1], receiving)


def listed(client, transfer):
    return client.finished() == [transfer]


class Returning(DecodeClient):
    """Comes back to a new daemon with what a dead one has left."""

    left: HeldTransfer

    def _begin(self):
        self._attach = msgspec.structs.replace(self._attach, held=[self.left])
        super()._begin()


@pytest.mark.parametrize("stage", STAGES)
def test_a_daemon_that_came_back_gives_the_pages_of_its_dead_life_back(tmp_path, stage):
    """Over cma, with the prefill daemon alive: it says that it has nothing of that life left."""
    with daemons(tmp_path, "cma") as (prefill, decode), workers(prefill, decode) as pair:
        _, receiving = begin(*pair, stage)
        life = pair[1].board.incarnation
        entry = pair[1].board.entry(receiving.slot, receiving.sequence)
        kill(decode)
        assert until(lambda: receiving.poll() is State.QUARANTINED)
        (tmp_path / "decode" / "decode.ready").unlink()
        with DaemonProcess("decode", tmp_path / "decode", ["--lanes", "cma"]) as again:
            encoding, ids = pack_ids(np.array([1, 2]))
            Returning.left = HeldTransfer(
                transfer=50,
                sequence=1,
                life=life,
                room=9,
                groups={"full": GroupPages(first_token=0, encoding=encoding, ids=ids)},
                prefill=list(pair[0].addresses),
                writers=[entry.peer_incarnation],
            )
            with Returning(again.wait_ready().socket, SeededCache(small(), 2)) as client:
                assert until(lambda: client.board.state(50, 1) is State.FAILED)
                sending = pair[0].send(10, [3], tokens=PAGE)
                client.receive(10, pair[0].addresses, [1], tokens=PAGE).wait(WAIT_S)
                sending.wait(WAIT_S)

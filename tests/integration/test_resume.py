"""A worker goes on with its daemon that came back: the same client, the same transfers."""

import pytest

from pdxfer.client import AsyncDecodeClient, State
from pdxfer.errors import DaemonUnavailableError, LocalProtocolError, PdxferError
from pdxfer.launch.daemons import DaemonProcess
from tests.integration.test_killed_daemons import WAIT_S, begin, daemons, kill, until, workers
from tests.support.caches import PAGE, SeededCache, small

pytestmark = pytest.mark.ucx


def again(folder, role, lane):
    """The daemon of a role that was killed, started once more where it was."""
    (folder / role / f"{role}.ready").unlink()
    process = DaemonProcess(role, folder / role, ["--lanes", lane])
    process.wait_ready()
    return process


def cross(sender, receiver, room):
    """A transfer that works."""
    receiving = receiver.receive(room, sender.addresses, [5], tokens=PAGE)
    sending = sender.send(room, [6], tokens=PAGE)
    assert receiving.wait(WAIT_S).length_bytes > 0
    sending.wait(WAIT_S)
    assert receiving in receiver.finished()


def test_resuming_with_an_agent_that_lives_changes_nothing(tmp_path):
    with daemons(tmp_path, "tcp") as (prefill, decode), workers(prefill, decode) as pair:
        for client in pair:
            with pytest.raises(LocalProtocolError, match="lives"):
                client.resume()
        cross(*pair, room=1)
        kill(decode)
        assert until(lambda: pair[1].board.ended)
        for _ in range(2):
            with pytest.raises(DaemonUnavailableError):
                pair[1].resume()  # nobody is there yet
        with again(tmp_path, "decode", "tcp"):
            pair[1].resume()
            cross(*pair, room=2)
        pair[1].close()
        with pytest.raises(LocalProtocolError, match="closed"):
            pair[1].resume()


def test_what_the_dead_daemon_had_is_failed_and_the_client_goes_on(tmp_path):
    with (
        daemons(tmp_path, "tcp") as (prefill, decode),
        workers(prefill, decode) as (
            sender,
            receiver,
        ),
    ):
        _, receiving = begin(sender, receiver, "moving")
        kill(decode)
        assert until(lambda: receiving.poll() is State.FAILED)
        with again(tmp_path, "decode", "tcp"):
            receiver.resume()
            assert receiver.finished() == [receiving]
            assert receiving.poll() is State.FAILED
            assert receiving.pages_returned
            cross(sender, receiver, room=20)
            assert receiving.poll() is State.FAILED  # also when its slot is another's


def test_the_prefill_worker_goes_on_too(tmp_path):
    with (
        daemons(tmp_path, "tcp") as (prefill, decode),
        workers(prefill, decode) as (
            sender,
            receiver,
        ),
    ):
        sending, _ = begin(sender, receiver, "moving")
        kill(prefill)
        assert until(lambda: sending.poll() is State.FAILED)
        with again(tmp_path, "prefill", "tcp"):
            sender.resume()
            assert sender.finished() == [sending]
            cross(sender, receiver, room=20)


def test_a_transfer_without_a_proof_goes_on_as_the_same_object(tmp_path):
    """Over cma the prefill daemon may write on; the new decode daemon asks it, and is answered."""
    with (
        daemons(tmp_path, "cma") as (prefill, decode),
        workers(prefill, decode) as (
            sender,
            receiver,
        ),
    ):
        _, receiving = begin(sender, receiver, "moving")
        kill(decode)
        assert until(lambda: receiving.poll() is State.QUARANTINED)
        assert until(lambda: receiver.finished() == [receiving])
        with again(tmp_path, "decode", "cma"):
            receiver.resume()
            with pytest.raises(PdxferError):
                receiving.wait(WAIT_S, until=State.FAILED)
            assert receiving.pages_returned
            assert until(lambda: receiving in receiver.finished())
            again_there = receiver.receive(30, sender.addresses, [1, 2], tokens=2 * PAGE)
            sender.send(30, [3, 4], tokens=2 * PAGE)
            again_there.wait(WAIT_S)


def test_pages_of_a_transfer_without_a_proof_stay_held(tmp_path):
    """Where nobody can answer for the life that was told, only its end is a proof."""
    with (
        daemons(tmp_path, "cma") as (prefill, decode),
        workers(prefill, decode) as (
            sender,
            receiver,
        ),
    ):
        _, receiving = begin(sender, receiver, "moving")
        receiving.prefill = ["tcp://127.0.0.1:9"]  # where the new daemon finds nobody
        kill(decode)
        assert until(lambda: receiving.poll() is State.QUARANTINED)
        with again(tmp_path, "decode", "cma"):
            receiver.resume()
            assert not receiving.pages_returned
            with pytest.raises(PdxferError, match="held by room 9"):
                receiver.receive(30, sender.addresses, [2], tokens=PAGE).wait(WAIT_S)
            assert receiving.poll() in (State.FENCING, State.QUARANTINED)
            kill(prefill)
            assert until(lambda: receiver.finished() is not None and receiving.pages_returned)


async def test_a_client_of_a_loop_goes_on(tmp_path):
    with daemons(tmp_path, "tcp", roles=("decode",)) as [decode]:
        async with AsyncDecodeClient(decode.socket, SeededCache(small(), 2)) as client:
            await client.receive(1, "tcp://127.0.0.1:9")
            kill(decode)
            assert until(lambda: client._proofs.agent_ended)
            with again(tmp_path, "decode", "tcp"):
                await client.resume()
                receiving = await client.receive(2, "tcp://127.0.0.1:9")
                assert receiving.poll() is State.WAITING

"""The status board: one writer, read-only readers, waits that end."""

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pdxfer import _core
from pdxfer.errors import LocalProtocolError
from pdxfer.fabric.lanes import LANES, board_code, board_names
from pdxfer.local.board import BoardReader, BoardWriter, Entry
from pdxfer.protocol.state import State

INCARNATION = bytes(range(16))
PEER = bytes(range(16, 32))


@pytest.fixture
def writer():
    board = BoardWriter(4, INCARNATION)
    yield board
    board.close()


@pytest.fixture
def reader(writer):
    return BoardReader(writer.fd, writer.slots)


def take(writer, slot, room, sequence=1):
    """Take a slot and show WAITING there; the use of it."""
    writer.take(slot, sequence, room)
    writer.publish(slot, State.WAITING)
    return slot, sequence


def test_states_cross(writer, reader):
    slot, sequence = take(writer, 0, 7)
    assert reader.state(slot, sequence) is State.WAITING
    for state in State:
        writer.publish(slot, state)
        assert reader.state(slot, sequence) is state
        assert reader.word(slot) == sequence << 8 | state


def test_line_is_64_bytes():
    assert _core.board_bytes(0) == 128
    assert _core.board_bytes(4096) - _core.board_bytes(4095) == 64


def test_details_cross(writer, reader):
    slot, sequence = take(writer, 0, (1 << 64) - 1)
    generation = (1 << 64) - 2
    writer.set_details(
        slot, generation=generation, lane_code=3, peer_incarnation=PEER, peer_count=1
    )
    whole = Entry((1 << 64) - 1, generation, 3, PEER, 1, 0)
    assert reader.entry(slot, sequence) == whole
    writer.set_details(slot, lane_code=4, peer_count=3, bytes_done=1 << 40)
    assert reader.entry(slot, sequence) == Entry(whole.room, whole.generation, 4, PEER, 3, 1 << 40)
    assert reader.incarnation == INCARNATION


@pytest.mark.parametrize("lane", LANES)
def test_lane_codes_cross(writer, reader, lane):
    slot, sequence = take(writer, 0, 1)
    writer.set_details(slot, lane_code=board_code(lane))
    entry = reader.entry(slot, sequence)
    assert entry is not None
    assert board_names()[entry.lane_code] == lane


def test_a_slot_comes_back_in_its_next_use(writer, reader):
    for slot in range(4):
        take(writer, slot, slot + 1)
    writer.release(2, 1)
    assert writer.live == 3
    assert reader.state(2, 1) is None
    assert reader.entry(2, 1) is None
    take(writer, 2, 6, sequence=2)
    assert reader.state(2, 1) is None
    assert reader.state(2, 2) is State.WAITING
    assert reader.entry(2, 2) == Entry(6, 0, 0, bytes(16), 0, 0)


@pytest.mark.parametrize(
    ("slot", "sequence", "text"),
    [
        (0, 2, "has the live transfer 1"),
        (0, 1, "has the live transfer 1"),
        (1, 1, "the next use of this slot is 2"),
        (1, 3, "the next use of this slot is 2"),
        (2, 0, "the next use of this slot is 1"),
        (4, 1, "slots 0 to 3"),
        (-1, 1, "slots 0 to 3"),
    ],
)
def test_only_the_next_use_of_a_free_slot_is_taken(writer, reader, slot, sequence, text):
    take(writer, 0, 1)
    take(writer, 1, 2)
    writer.release(1, 1)
    with pytest.raises(LocalProtocolError, match=text):
        writer.take(slot, sequence, 3)
    assert writer.live == 1
    assert reader.entry(0, 1) == Entry(1, 0, 0, bytes(16), 0, 0)


def test_only_a_live_use_is_written_or_released(writer):
    with pytest.raises(LocalProtocolError):
        writer.publish(0, State.READY)
    slot, sequence = take(writer, 0, 1)
    with pytest.raises(LocalProtocolError):
        writer.release(slot, sequence + 1)
    writer.release(slot, sequence)
    with pytest.raises(LocalProtocolError):
        writer.release(slot, sequence)
    with pytest.raises(LocalProtocolError):
        writer.set_details(slot, lane_code=4)


def test_slot_out_of_range_is_an_index_error(reader):
    with pytest.raises(IndexError):
        reader.word(4)


def test_worker_cannot_map_it_writable(writer):
    size = os.fstat(writer.fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, size)
    view = mmap.mmap(writer.fd, size, prot=mmap.PROT_READ)
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_reader_refuses_what_is_no_board(writer):
    fd = os.memfd_create("no board")
    try:
        os.ftruncate(fd, _core.board_bytes(4))
        with pytest.raises(OSError, match="Invalid argument"):
            BoardReader(fd, 4)
        with pytest.raises(OSError, match="Invalid argument"):
            BoardReader(writer.fd, 5)
    finally:
        os.close(fd)


def test_publish_makes_the_eventfd_readable(writer):
    slot, _ = take(writer, 0, 1)
    writer.publish(slot, State.READY)
    assert os.eventfd_read(writer.eventfd) == 2
    with pytest.raises(BlockingIOError):
        os.eventfd_read(writer.eventfd)


def test_full_eventfd_does_not_stop_the_agent(writer):
    os.eventfd_write(writer.eventfd, (1 << 64) - 2)
    slot, _ = take(writer, 0, 1)
    writer.publish(slot, State.READY)


def test_wait_returns_at_once_when_the_state_is_another(writer, reader):
    slot, sequence = take(writer, 0, 1)
    assert reader.wait(slot, sequence, State.READY, 60) is State.WAITING


def test_wait_times_out(writer, reader):
    slot, sequence = take(writer, 0, 1)
    before = time.monotonic()
    assert reader.wait(slot, sequence, State.WAITING, 0.02) is State.WAITING
    assert 0.02 <= time.monotonic() - before < 5


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf"), 1e10])
def test_wait_refuses_a_bad_timeout(writer, reader, timeout):
    with pytest.raises(ValueError, match="timeout_s"):
        reader.wait(0, 0, State.WAITING, timeout)


def test_wait_is_woken_and_leaves_the_gil_free(writer, reader):
    slot, sequence = take(writer, 0, 1)
    seen = []
    waiter = threading.Thread(
        target=lambda: seen.append(reader.wait(slot, sequence, State.WAITING, 60))
    )
    waiter.start()
    writer.publish(slot, State.READY)
    waiter.join(30)
    assert seen == [State.READY]


def test_wait_in_another_process_is_woken(writer):
    slot, sequence = take(writer, 0, 1)
    code = (
        "import sys; from pdxfer.local.board import *; "
        "r = BoardReader(int(sys.argv[1]), 4); print('up', flush=True); "
        "print(r.wait(int(sys.argv[2]), int(sys.argv[3]), State.WAITING, 30).name)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(writer.fd), str(slot), str(sequence)],
        pass_fds=[writer.fd],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        writer.publish(slot, State.COMMITTED)
        assert child.stdout.read() == "COMMITTED\n"


def test_signal_handler_runs_and_its_exception_ends_the_wait(writer, reader):
    class StopWaiting(Exception):
        pass

    def handler(number, frame):
        raise StopWaiting

    slot, sequence = take(writer, 0, 1)
    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(StopWaiting):
            reader.wait(slot, sequence, State.WAITING, 60)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_signal_without_exception_does_not_end_the_wait(writer, reader):
    slot, sequence = take(writer, 0, 1)
    old = signal.signal(signal.SIGALRM, lambda number, frame: writer.publish(slot, State.READY))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert reader.wait(slot, sequence, State.WAITING, 60) is State.READY
    finally:
        signal.signal(signal.SIGALRM, old)


def test_close_leaves_readers_their_last_words(writer, reader):
    slot, sequence = take(writer, 0, 1)
    writer.publish(slot, State.COMMITTED)
    writer.close()
    writer.close()
    assert reader.state(slot, sequence) is State.COMMITTED


def test_details_read_while_the_slot_is_freed_and_taken_anew_are_nobodys(writer, reader):
    slot, sequence = take(writer, 0, room=7)
    looks = []

    def word(slot):
        looks.append(_core.BoardReader(writer.fd, writer.slots).word(slot))
        if len(looks) == 1:  # behind the first look, ahead of the details
            writer.release(slot, sequence)
            writer.take(slot, sequence + 1, 8)
        return looks[-1]

    reader.word = word
    assert reader.entry(slot, sequence) is None
    assert len(looks) > 1

"""The bench's own movers, checked against a copy in Python."""

import os
import socket
import threading

import numpy as np
import pytest

from pdxfer.bench import _pieces

RUNS = np.array([[0, 3, 1, 5, 7], [1, 0, 0, 0, 4], [0, 100, 1, 64, 9000]], np.int64)
LENGTH = 1 << 14


@pytest.fixture
def sides():
    generator = np.random.default_rng(3)
    source = [generator.integers(0, 256, LENGTH, dtype=np.uint8) for _ in range(2)]
    destination = [np.full(LENGTH, 0xA5, np.uint8) for _ in range(2)]
    return source, destination


def bases(arrays):
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def expected(source):
    result = [np.full(LENGTH, 0xA5, np.uint8) for _ in range(2)]
    for from_region, from_offset, region, offset, length in RUNS.tolist():
        result[region][offset : offset + length] = source[from_region][
            from_offset : from_offset + length
        ]
    return result


def by_memcpy(source, destination):
    _pieces.copy_runs(RUNS, source, destination)


def by_writev(source, destination):
    _pieces.vm_write_runs(os.getpid(), RUNS, source, destination)


def by_stream(source, destination):
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=_pieces.send_runs, args=(left.fileno(), RUNS, source))
        sender.start()
        _pieces.receive_runs(right.fileno(), RUNS, destination)
        sender.join()


@pytest.mark.parametrize("move", [by_memcpy, by_writev, by_stream])
def test_each_mover_places_every_byte_and_no_other(sides, move):
    source, destination = sides
    assert _pieces.first_difference(RUNS, bases(source), bases(destination)) == 0
    move(bases(source), bases(destination))
    assert _pieces.first_difference(RUNS, bases(source), bases(destination)) == -1
    for placed, wanted in zip(destination, expected(source), strict=True):
        assert np.array_equal(placed, wanted)


def test_a_wrong_byte_is_found(sides):
    source, destination = sides
    by_memcpy(bases(source), bases(destination))
    destination[1][64 + 8999] ^= 1
    assert _pieces.first_difference(RUNS, bases(source), bases(destination)) == 2


def test_a_closed_stream_is_an_error(sides):
    left, right = socket.socketpair()
    left.close()
    with right, pytest.raises(ConnectionResetError):
        _pieces.receive_runs(right.fileno(), RUNS, bases(sides[1]))


def test_a_region_that_is_not_there_is_refused(sides):
    with pytest.raises(ValueError, match="region"):
        _pieces.copy_runs(RUNS, bases(sides[0]), bases(sides[1])[:1])

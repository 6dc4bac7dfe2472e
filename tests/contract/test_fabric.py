"""One suite for every lane: what `fabric.base` promises, over memory, UCX tcp and UCX cma."""

from __future__ import annotations

import os
import select
import time

import numpy as np
import pytest

from pdxfer.errors import LocalProtocolError
from pdxfer.fabric.base import (
    Cancelled,
    CommitArrived,
    CommitSent,
    PathClosed,
    PathOpened,
    Posted,
    RemoteRegion,
    SenderLost,
)
from pdxfer.fabric.inproc import Hub, InprocFabric
from pdxfer.fabric.ucx import UcxFabric

WAIT_S = 20.0
SIZE = 1 << 20


class Ends:
    """A sending and a receiving fabric of one lane, each with a region of random bytes."""

    def __init__(self, lane: str) -> None:
        self.sender_id, self.receiver_id = os.urandom(16), os.urandom(16)
        if lane == "inproc":
            hub = Hub(automatic=True)
            self.sender = InprocFabric(hub, self.sender_id)
            self.receiver = InprocFabric(hub, self.receiver_id)
        else:
            self.sender = UcxFabric(lane, net_device="lo")
            self.receiver = UcxFabric(lane, net_device="lo")
        rng = np.random.default_rng(0)
        self.source = rng.integers(0, 256, size=SIZE, dtype=np.uint8)
        self.target = rng.integers(0, 256, size=SIZE, dtype=np.uint8)
        self.seen: list[object] = []

    def open(self):
        address = self.receiver.open_receiver(self.sender_id)
        self.local = self.sender.register(self.source.ctypes.data, SIZE, self.source)
        region = self.receiver.register(self.target.ctypes.data, SIZE, self.target)
        self.remote = RemoteRegion(region.address, region.length_bytes, region.rkey)
        self.path = self.sender.connect(self.receiver_id, address, WAIT_S)
        assert self.wait(PathOpened).error == ""
        self.receiver.watch_sender(self.sender_id, self.sender.send_address())
        return self

    def wait(self, kind, count=1):
        """The last of `count` events of a kind; what came before stays in `seen`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = [event for event in self.seen if isinstance(event, kind)]
            if len(found) >= count:
                return found[count - 1]
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__}; seen {self.seen}"
            fds = [self.sender.fileno(), self.receiver.fileno()]
            select.select(fds, [], [], min(left, 0.2))
            self.seen += self.sender.drain() + self.receiver.drain()

    def post(self, runs, splits=None, generation=1):
        runs = np.array(runs, dtype=np.int64).reshape(-1, 5)
        splits = np.array([0, len(runs)] if splits is None else splits, dtype=np.int64)
        return self.path.post(generation, runs, splits, [self.local], [self.remote])

    def close(self):
        self.sender.close(5.0)
        self.receiver.close(5.0)


@pytest.fixture(params=["inproc", "tcp", "cma"])
def ends(request):
    made = Ends(request.param)
    try:
        yield made.open()
    finally:
        made.close()


def test_batches_land_where_they_should_and_nowhere_else(ends):
    expected = ends.target.copy()
    rng = np.random.default_rng(1)
    places = rng.permutation(SIZE // 1024)[:300]
    runs = [(0, int(a) * 1024, 0, i * 1024, 1000) for i, a in enumerate(places)]
    for _, offset, _, to, length in runs:
        expected[to : to + length] = ends.source[offset : offset + length]
    tickets = ends.post(runs, [0, 100, 250, 300])
    assert len(set(tickets)) == 3
    last = ends.wait(Posted, 3)
    posted = {event.ticket: event for event in ends.seen if isinstance(event, Posted)}
    assert list(posted) == tickets
    assert [posted[t].length_bytes for t in tickets] == [100_000, 150_000, 50_000]
    assert [posted[t].runs for t in tickets] == [100, 150, 50]
    assert last.error == ""
    assert np.array_equal(ends.target, expected)


def test_a_commit_comes_behind_its_bytes(ends):
    for generation in range(1, 20):
        ends.source[:] = generation
        ends.post([(0, 0, 0, 0, SIZE)], generation=generation)
        ticket = ends.path.commit(generation, b"payload %d" % generation)
        arrived = ends.wait(CommitArrived, generation)
        assert ends.target[0] == ends.target[-1] == generation
        assert (ends.target == generation).all()
        assert arrived == CommitArrived(ends.sender_id, b"payload %d" % generation)
        sent = ends.wait(CommitSent, generation)
        assert (sent.ticket, sent.error) == (ticket, "")


def test_a_commit_without_bytes(ends):
    ends.path.commit(1, b"")
    assert ends.wait(CommitArrived).payload == b""


@pytest.mark.parametrize(
    "run",
    [
        (0, 0, 0, 0, SIZE + 1),
        (0, SIZE - 10, 0, 0, 11),
        (0, 0, 0, SIZE - 10, 11),
        (0, -1, 0, 0, 10),
        (0, 0, 0, -1, 10),
        (1, 0, 0, 0, 10),
        (0, 0, 1, 0, 10),
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, -5),
        (0, 1 << 62, 0, 0, 1 << 62),
        (0, 0, 0, (1 << 63) - 1, 2),
    ],
)
def test_a_run_out_of_bounds_refuses_the_whole_post(ends, run):
    before = ends.target.copy()
    with pytest.raises(LocalProtocolError):
        ends.post([(0, 0, 0, 0, 100), run])
    ends.path.commit(2, b"after")
    ends.wait(CommitArrived)
    assert np.array_equal(ends.target, before)


def test_cancel_answers_behind_every_ticket(ends):
    runs = [(0, i * 64, 0, i * 64, 64) for i in range(SIZE // 64)]
    tickets = ends.post(runs * 4, list(range(0, 4 * len(runs) + 1, len(runs))))
    ends.path.cancel(1)
    assert ends.wait(Cancelled) == Cancelled(ends.receiver_id, 1)
    events = [e for e in ends.seen if isinstance(e, Posted | Cancelled)]
    assert isinstance(events[-1], Cancelled)
    assert sorted(e.ticket for e in events[:-1]) == tickets
    ends.target[:] = 7
    ends.path.commit(2, b"later")
    ends.wait(CommitArrived)
    assert (ends.target == 7).all()


def test_a_closed_path_ends_every_ticket_and_tells_both_sides(ends):
    runs = [(0, i * 64, 0, i * 64, 64) for i in range(SIZE // 64)]
    tickets = ends.post(runs)
    ends.path.close()
    ends.path.close()
    ends.wait(PathClosed)
    assert sorted(e.ticket for e in ends.seen if isinstance(e, Posted)) == tickets
    with pytest.raises(LocalProtocolError):
        ends.post([(0, 0, 0, 0, 1)])
    assert ends.wait(SenderLost).peer == ends.sender_id
    if ends.receiver.capabilities.handler_proves_silence:
        after = ends.target.copy()
        time.sleep(0.2)
        assert np.array_equal(ends.target, after)


def test_a_closed_receiver_fails_the_sender(ends):
    ends.receiver.close_receiver(ends.sender_id)
    ends.receiver.close_receiver(ends.sender_id)
    runs = [(0, i * 64, 0, i * 64, 64) for i in range(SIZE // 64)]
    try:
        ends.post(runs)
    except LocalProtocolError:
        return  # it was told before
    if ends.receiver.capabilities.handler_proves_silence:
        assert ends.wait(Posted).error


def test_a_path_to_nobody_does_not_open(ends):
    address = ends.receiver.open_receiver(b"x" * 16)
    ends.receiver.close_receiver(b"x" * 16)
    if ends.sender.lane == "inproc":
        address = b"nowhere!"
    ends.sender.connect(os.urandom(16), address, 1.0)
    assert ends.wait(PathOpened, 2).error


def test_close_is_idempotent_and_bounded(ends):
    began = time.monotonic()
    for _ in range(2):
        ends.sender.close(5.0)
        ends.receiver.close(5.0)
    assert time.monotonic() - began < 12

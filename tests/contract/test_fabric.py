"""One suite for every lane: what `fabric.base` promises, over memory, UCX tcp, UCX cma, and a
made-up lane whose receiver places the bytes."""

from __future__ import annotations

import os
import select
import time

import numpy as np
import pytest

from pdxfer.errors import LocalProtocolError, PdxferError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    CommitArrived,
    CommitSent,
    Destination,
    GenerationClosed,
    PathClosed,
    PathOpened,
    PlacingFailed,
    RemoteRegion,
    Scope,
    SenderLost,
    Write,
)
from pdxfer.fabric.inproc import Hub, InprocFabric
from pdxfer.fabric.lanes import LANES, LaneSettings
from pdxfer.layout import Pages, PlannedChunk, page_major, plan, token_major
from tests.support import socketpair_lane

WAIT_S = 20.0
PAGE, PAGES = 8, 64
SHAPE = {
    "layers": range(4),
    "kv_heads": 2,
    "head_dim": 32,
    "page_size": PAGE,
    "pages": PAGES,
    "dtype": "uint8",
}
SOURCE, TARGET = page_major(**SHAPE), token_major(**SHAPE)
PLAN = plan(SOURCE, TARGET, relayout="allow")
EVERY = np.arange(PAGES - 1) + 1
PLACING = ["socketpair"]
LANE_NAMES = [*LANES, *PLACING]


def memory_of(layout, rng):
    return [rng.integers(0, 256, size=r.length_bytes, dtype=np.uint8) for r in layout.regions]


class Ends:
    """A sending and a receiving fabric of one lane, each with a pool of random bytes."""

    def __init__(self, lane: str) -> None:
        self.sender_id, self.receiver_id = os.urandom(16), os.urandom(16)
        self.row = LANES[lane]
        if lane == "inproc":
            hub = Hub(automatic=True)
            self.sender = InprocFabric(hub, self.sender_id)
            self.receiver = InprocFabric(hub, self.receiver_id)
        else:
            self.sender, self.receiver = (
                self.row.make(LaneSettings(net_device="lo")) for _ in range(2)
            )
        rng = np.random.default_rng(0)
        self.source, self.target = memory_of(SOURCE, rng), memory_of(TARGET, rng)
        self.opened: set[int] = set()
        self.seen: list[object] = []

    def open(self):
        address = self.receiver.open_receiver(self.sender_id)
        self.local = [self.sender.register(p.ctypes.data, p.nbytes, p) for p in self.source]
        self.placed = [self.receiver.register(p.ctypes.data, p.nbytes, p) for p in self.target]
        self.path = self.sender.connect(self.receiver_id, address, WAIT_S)
        assert self.wait(PathOpened).error == ""
        self.receiver.watch_sender(self.sender_id, self.sender.send_address())
        return self

    @property
    def remote(self):
        return [RemoteRegion(r.address, r.length_bytes, r.rkey) for r in self.placed]

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
            self.seen += self.sender.take_events() + self.receiver.take_events()

    def chunk(self, source_ids=EVERY, target_ids=EVERY, tokens=None):
        tokens = (0, PAGE * len(target_ids)) if tokens is None else tokens
        pages = ({"full": Pages(source_ids)}, {"full": Pages(target_ids)})
        return PlannedChunk(PLAN, *pages, {"full": tokens})

    def open_generation(self, generation, target_ids=EVERY, regions=None):
        self.opened.add(generation)
        pages = {"full": Pages(target_ids)}
        destination = Destination(0, PLAN, pages, regions or self.placed)
        self.receiver.open_generation(self.sender_id, generation, destination)

    def post(self, chunk=None, generation=1, number=0, source=None, destination=None):
        chunk = chunk or self.chunk()
        if generation not in self.opened:
            self.open_generation(generation, chunk.destination["full"].ids)
        write = Write(
            generation=generation,
            source_worker=0,
            number=number,
            chunk=chunk,
            source=source or self.local,
            destination=destination or self.remote,
        )
        return self.path.post(write)

    def expected(self, *chunks):
        memory = [part.copy() for part in self.target]
        for chunk in chunks:
            for region, at, to, offset, length in chunk.batches().runs.tolist():
                memory[to][offset : offset + length] = self.source[region][at : at + length]
        return memory

    def close(self):
        self.sender.close(5.0)
        self.receiver.close(5.0)


def equal(memory, wanted):
    return all(np.array_equal(a, b) for a, b in zip(memory, wanted, strict=True))


@pytest.fixture(autouse=True)
def _made_up_lane(monkeypatch):
    monkeypatch.setitem(LANES, "socketpair", socketpair_lane.ROW)


@pytest.fixture(params=LANE_NAMES)
def ends(request):
    made = Ends(request.param)
    try:
        yield made.open()
    finally:
        made.close()


@pytest.fixture(params=[name for name in LANES if not LANES[name].capabilities.places_at_receiver])
def writing(request):
    """Lanes whose sender writes into the receiver's memory."""
    made = Ends(request.param)
    try:
        yield made.open()
    finally:
        made.close()


@pytest.fixture(params=PLACING)
def placing(request):
    """Lanes whose receiver places the bytes."""
    made = Ends(request.param)
    try:
        yield made.open()
    finally:
        made.close()


def test_the_row_and_the_lane_say_the_same(ends):
    assert ends.sender.capabilities == ends.row.capabilities
    assert ends.sender.lane == ends.row.name
    codes = [lane.board_code for lane in LANES.values()]
    assert len(set(codes)) == len(codes)


def test_chunks_land_where_they_should_and_nowhere_else(ends):
    rng = np.random.default_rng(1)
    chunks = [
        ends.chunk(rng.permutation(EVERY)[:9], ids, (3, PAGE * 9 - 2))
        for ids in np.split(rng.permutation(EVERY)[:45], 5)
    ]
    expected = ends.expected(*chunks)
    posted, tickets = [], []
    for number, chunk in enumerate(chunks):
        posted.append(ends.post(chunk, generation=number + 1))
        tickets += posted[-1].numbers
        assert posted[-1].length_bytes == chunk.length_bytes
        assert posted[-1].runs > 0
    assert len(set(tickets)) == len(tickets)
    ends.wait(BatchEnded, len(tickets))
    ended = {event.ticket: event for event in ends.seen if isinstance(event, BatchEnded)}
    assert sorted(ended) == tickets
    for generation, (mine, chunk) in enumerate(zip(posted, chunks, strict=True), 1):
        assert [t for t in ended if ended[t].generation == generation] == list(mine.numbers)
        assert sum(ended[t].length_bytes for t in mine.numbers) == chunk.length_bytes
        assert sum(ended[t].runs for t in mine.numbers) == mine.runs
        assert not any(ended[t].error for t in mine.numbers)
    assert equal(ends.target, expected)


def test_intervals_of_a_chunk_are_that_chunk(ends):
    rng = np.random.default_rng(2)
    chunk = ends.chunk(rng.permutation(EVERY), rng.permutation(EVERY), (5, PAGE * len(EVERY) - 9))
    expected = ends.expected(chunk)
    parts = list(chunk.intervals(int(PLAN.runs_per_page * 10)))
    assert len(parts) > 5
    ends.open_generation(1, chunk.destination["full"].ids)
    count = sum(len(ends.post(part).numbers) for part in reversed(parts))
    ends.wait(BatchEnded, count)
    assert equal(ends.target, expected)


def test_a_commit_comes_behind_its_bytes(ends):
    for generation in range(1, 20):
        for part in ends.source:
            part[:] = generation
        expected = ends.expected(ends.chunk())
        ends.post(generation=generation)
        ticket = ends.path.commit(generation, b"payload %d" % generation)
        arrived = ends.wait(CommitArrived, generation)
        assert equal(ends.target, expected)
        assert arrived == CommitArrived(ends.sender_id, b"payload %d" % generation)
        sent = ends.wait(CommitSent, generation)
        assert (sent.ticket, sent.error) == (ticket, "")


def test_a_commit_without_bytes(ends):
    ends.path.commit(1, b"")
    assert ends.wait(CommitArrived).payload == b""


@pytest.mark.parametrize(
    "run",
    [
        (0, 0, 0, 0, 1 << 30),
        (0, SOURCE.regions[0].length_bytes - 10, 0, 0, 11),
        (0, 0, 0, TARGET.regions[0].length_bytes - 10, 11),
        (0, -1, 0, 0, 10),
        (0, 0, 0, -1, 10),
        (99, 0, 0, 0, 10),
        (0, 0, 99, 0, 10),
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, -5),
        (0, 1 << 62, 0, 0, 1 << 62),
        (0, 0, 0, (1 << 63) - 1, 2),
    ],
)
def test_a_run_out_of_bounds_refuses_the_whole_post(writing, run):
    before = writing.expected()
    runs = np.array([(0, 0, 0, 0, 100), run], dtype=np.int64)
    with pytest.raises(LocalProtocolError):
        writing.path.post_runs(1, runs, np.array([0, 2]), writing.local, writing.remote)
    writing.path.commit(2, b"after")
    writing.wait(CommitArrived)
    assert equal(writing.target, before)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_region_that_is_shorter_than_its_layout_is_never_left(ends, side):
    before = ends.expected()
    if side == "source":
        with pytest.raises(PdxferError):
            ends.post(source=[ends.sender.register(*_half(p)) for p in ends.source])
    elif ends.row.capabilities.places_at_receiver:
        ends.open_generation(1, regions=[ends.receiver.register(*_half(p)) for p in ends.target])
        ends.post()
        assert "leaves region" in ends.wait(PlacingFailed).error
        assert ends.wait(BatchEnded).error
    else:
        short = [RemoteRegion(r.address, r.length_bytes // 2, r.rkey) for r in ends.remote]
        with pytest.raises(PdxferError):
            ends.post(destination=short)
    ends.path.commit(2, b"after")
    ends.wait(CommitArrived)
    assert equal(ends.target, before)


def _half(part):
    return part.ctypes.data, part.nbytes // 2, part


def test_cancel_answers_behind_every_ticket(ends):
    tickets = []
    for number in range(4):
        tickets += ends.post(number=number).numbers
    ends.path.cancel(1)
    assert ends.wait(Cancelled) == Cancelled(ends.receiver_id, 1)
    events = [e for e in ends.seen if isinstance(e, BatchEnded | Cancelled)]
    assert isinstance(events[-1], Cancelled)
    assert sorted(e.ticket for e in events[:-1]) == tickets
    marked = ends.expected()
    for part, wanted in zip(ends.target, marked, strict=True):
        part[:] = wanted[:] = 7
    ends.path.commit(2, b"later")
    ends.wait(CommitArrived)
    assert equal(ends.target, marked)


def test_a_closed_path_ends_every_ticket_and_tells_both_sides(ends):
    tickets = list(ends.post().numbers)
    ends.path.close()
    ends.path.close()
    ends.wait(PathClosed)
    assert sorted(e.ticket for e in ends.seen if isinstance(e, BatchEnded)) == tickets
    with pytest.raises(LocalProtocolError):
        ends.post()
    assert ends.wait(SenderLost).peer == ends.sender_id
    if ends.row.capabilities.revoke_scope is not Scope.NOTHING:
        after = ends.expected()
        time.sleep(0.2)
        assert equal(ends.target, after)


def test_a_closed_receiver_fails_the_sender(ends):
    ends.receiver.close_receiver(ends.sender_id)
    ends.receiver.close_receiver(ends.sender_id)
    try:
        ends.post()
    except LocalProtocolError:
        return  # it was told before
    if ends.row.capabilities.revoke_scope is not Scope.NOTHING:
        assert ends.wait(BatchEnded).error


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


def test_a_closed_generation_places_nothing_and_others_go_on(placing):
    placing.post(generation=1)
    placing.wait(BatchEnded)
    placing.receiver.close_generation(placing.sender_id, 1)
    assert placing.wait(GenerationClosed) == GenerationClosed(placing.sender_id, 1)
    for part in placing.source:
        part[:] = 9
    before = placing.expected()
    placing.post(generation=1, number=1)
    assert placing.wait(BatchEnded, 2).error
    assert equal(placing.target, before)
    expected = placing.expected(placing.chunk())
    placing.post(generation=2)
    assert not placing.wait(BatchEnded, 3).error
    assert equal(placing.target, expected)


def test_a_generation_that_was_never_opened_places_nothing(placing):
    before = placing.expected()
    placing.opened.add(5)
    placing.post(generation=5)
    assert placing.wait(BatchEnded).error
    assert equal(placing.target, before)


def test_a_lane_whose_sender_places_has_no_generations_to_close(writing):
    writing.receiver.close_generation(writing.sender_id, 1)
    writing.path.commit(1, b"")
    writing.wait(CommitSent)
    assert not any(isinstance(event, GenerationClosed) for event in writing.seen)

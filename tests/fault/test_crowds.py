"""Random histories of several agents and ranks: chunks, aborts, broken lanes, delayed messages, new
sessions, workers and processes that go away. Whatever happens, a page that came back does not
change, committed bytes are right, and every transfer ends.

`PDXFER_HISTORIES=300` plays more of them.
"""

import contextlib
import os
import random

import pytest

from pdxfer import limits
from pdxfer.errors import PdxferError
from pdxfer.fabric.base import Scope
from pdxfer.layout import Rank, token_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import RETURNED_AT_DECODE, RETURNED_AT_PREFILL, State
from tests.support.cluster import Cluster, full

PAGE, PAGES, ROOMS, WAIT_S = 2, 40, 8, 20
SEEDS = int(os.environ.get("PDXFER_HISTORIES", "25"))
SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 2, 1),
    (2, 1, 2, 1),
    (1, 2, 1, 2),
    (1, 2, 2, 2),
    (2, 2, 2, 2),
    (1, 1, 1, 2),
    (2, 1, 2, 2),
]
"""Prefill agents, decode agents, source ranks, destination ranks."""


def rank_layout(rank, ranks):
    """Both heads, or one of them."""
    heads = 2 // ranks
    return token_major(
        layers=range(2),
        kv_heads=heads,
        total_kv_heads=2,
        head_first=rank * heads,
        head_dim=2,
        page_size=PAGE,
        pages=PAGES,
        dtype="uint8",
    )


class Worker:
    """One rank beside a node: its free pages, and its rooms."""

    def __init__(self, node, rank, ranks):
        self.node, self.id = node, rank
        self.layout = rank_layout(rank, ranks)
        node.attach(rank, self.layout, Rank(tp=rank, tp_size=ranks))
        self.free = list(range(1, PAGES))
        self.rooms = {}
        """Room to its pages."""
        self.returned = {}
        """Room to what its pages held when they came back."""
        self.gone = False

    def take(self, count, rng):
        return [self.free.pop(rng.randrange(len(self.free))) for _ in range(count)]

    def cells(self, ids):
        """(position in ids, part, layer, row, head) to bytes, as numpy views."""
        memory, found = self.node.memory[self.id], {}
        heads = range(self.layout.planes[0].head_first, self.layout.planes[0].head_end)
        for index, page in enumerate(ids):
            for row in range(PAGE):
                for part in "kv":
                    for layer in range(2):
                        for head in heads:
                            slot = page * PAGE + row
                            region, at = self.layout.locate(part, layer, slot, head)
                            found[index, part, layer, row, head] = memory[region][at : at + 2]
        return found

    def content(self, ids):
        return {key: bytes(view) for key, view in self.cells(ids).items()}

    def state(self, room):
        shown = self.node.shown.get((self.id, room))
        return None if shown is None else shown.state


class Crowd:
    """One instance a side, spread over agents."""

    def __init__(self, seed, shape, *, scope):
        self.rng = random.Random(seed)
        self.cluster = Cluster(seed, attach_anew=True)
        prefills, decodes, sources, destinations = shape
        self.prefills = [self.cluster.prefill() for _ in range(prefills)]
        self.decodes = [self.cluster.decode(scope=scope) for _ in range(decodes)]
        self.addresses = tuple(f"tcp://p{index}:1" for index in range(prefills))
        self.sources = [Worker(self.prefills[r % prefills], r, sources) for r in range(sources)]
        self.destinations = [
            Worker(self.decodes[r % decodes], r, destinations) for r in range(destinations)
        ]
        self.sent = {}
        """Room to the cells that its sources held."""
        self.unsent = []
        """(worker, room, ids) of second chunks."""
        self.late = []
        """(worker, room) of sends that come later."""
        for decode in self.decodes:
            decode.machine.sources.note_instance(self.addresses)
            for address, prefill in zip(self.addresses, self.prefills, strict=True):
                self.cluster.join(decode, prefill, address)
        self.cluster.run()

    @property
    def now(self):
        return self.cluster.now

    # -- rooms -------------------------------------------------------------------------------
    def start(self, room):
        count = self.rng.randint(1, 4)
        everyone = [w for w in [*self.sources, *self.destinations] if self.alive(w)]
        if any(len(worker.free) < count for worker in everyone):
            return
        self.sent[room] = {}
        for worker in everyone:
            worker.rooms[room] = worker.take(count, self.rng)
            if worker.node.is_prefill:
                self.sent[room].update(worker.content(worker.rooms[room]))
        self.rng.shuffle(everyone)
        for worker in everyone:
            if self.alive(worker):
                if not worker.node.is_prefill:
                    self.receive(worker, room)
                elif self.rng.random() < 0.2:
                    self.late.append((worker, room))
                else:
                    self.send(worker, room)
            self.steps(0, 0, 2, 6, 15)

    def receive(self, worker, room):
        machine, ids = worker.node.machine, worker.rooms[room]
        place = GivenPlaces(full(ids), PAGE * len(ids))
        at_once = self.rng.random() < 0.5
        try:
            machine.receive(
                worker.id,
                room,
                room,
                self.addresses,
                deadline=self.now + WAIT_S,
                now=self.now,
                place=place if at_once else None,
            )
        except PdxferError:  # too much of the pool is quarantined
            worker.free += worker.rooms.pop(room)
            return
        if not at_once:
            machine.place(worker.id, room, place, now=self.now)
        worker.node.pump()

    def send(self, worker, room):
        machine, ids = worker.node.machine, worker.rooms[room]
        machine.open(worker.id, room, room, deadline=self.now + WAIT_S, lease_s=30.0)
        worker.node.pump()
        half = self.rng.randint(0, len(ids) - 1)
        if half:
            self.chunk(worker, room, ids[:half], last=False)
            if self.rng.random() < 0.6:
                self.unsent.append((worker, room, ids[half:]))
                return
        self.chunk(worker, room, ids[half:], last=True)

    def chunk(self, worker, room, ids, *, last):
        if self.alive(worker) and room not in worker.returned:
            worker.node.machine.send(worker.id, room, GivenChunk(full(ids), last=last))
            worker.node.pump()

    # -- what is watched ---------------------------------------------------------------------
    def steps(self, *choices):
        for _ in range(self.rng.choice(choices)):
            self.cluster.step()
            self.watch()

    def watch(self):
        for worker in self.destinations:
            for room, ids in worker.rooms.items():
                state = worker.state(room)
                if room in worker.returned or state not in RETURNED_AT_DECODE:
                    continue
                content = worker.returned[room] = worker.content(ids)
                if state is State.COMMITTED:
                    sent = self.sent[room]
                    assert content == {key: sent[key] for key in content}, "wrong bytes"
        for worker in self.sources:
            for room, ids in worker.rooms.items():
                if room in worker.returned or worker.state(room) not in RETURNED_AT_PREFILL:
                    continue
                worker.returned[room] = {}
                for view in worker.cells(ids).values():
                    view[:] = self.rng.randrange(256)
                worker.free += ids

    # -- disturbances ------------------------------------------------------------------------
    def alive(self, worker):
        return not worker.gone and not worker.node.dead

    def a_room(self, workers):
        rooms = [(w, room) for w in workers for room in w.rooms if self.alive(w)]
        return self.rng.choice(rooms) if rooms else None

    def abort_at_decode(self):
        if found := self.a_room(self.destinations):
            worker, room = found
            worker.node.machine.abort(worker.id, room, "seeded", self.now)
            worker.node.pump()

    def abort_at_prefill(self):
        if found := self.a_room(self.sources):
            worker, room = found
            worker.node.machine.abort(worker.id, room, "seeded")
            worker.node.pump()

    def break_lane(self):
        paths = [p for node in self.prefills if not node.dead for p in node.fabric.paths.values()]
        if paths:
            self.rng.choice(paths).fail("seeded", late_runs=self.rng.choice([0, 1, 100]))

    def delay(self):
        ways = [way for way, queue in self.cluster.network.frames.items() if queue]
        if ways:
            self.cluster.network.cut.add(self.rng.choice(ways))

    def a_session(self):
        """(decode, prefill, address) whose processes live."""
        decode = self.rng.choice(self.decodes)
        index = self.rng.randrange(len(self.prefills))
        return decode, self.prefills[index], self.addresses[index]

    def break_connection(self):
        decode, prefill, _ = self.a_session()
        self.cluster.network.break_connection(
            decode.machine.incarnation, prefill.machine.incarnation
        )

    def beat(self):
        """Heartbeats leave at any time, also ahead of what is sent again."""
        node = self.rng.choice([*self.decodes, *self.decodes, *self.prefills])
        if not node.dead:
            node.heartbeats()

    def break_and_beat(self):
        self.break_connection()
        self.beat()

    def deliver(self):
        self.cluster.network.cut.clear()

    def detach(self):
        worker = self.rng.choice([*self.sources, *self.destinations])
        if not self.alive(worker):
            return
        worker.gone = True
        now = () if worker.node.is_prefill else (self.now,)
        worker.node.machine.detach(worker.id, "seeded", *now)
        worker.node.pump()

    def wait(self):
        self.cluster.pass_time(self.rng.choice([0.5, 1, 5]))
        self.watch()

    def come_late(self):
        if self.late:
            worker, room = self.late.pop(self.rng.randrange(len(self.late)))
            if self.alive(worker):
                self.send(worker, room)

    def next_chunk(self):
        if self.unsent:
            worker, room, ids = self.unsent.pop(self.rng.randrange(len(self.unsent)))
            self.chunk(worker, room, ids, last=True)

    def new_session(self):
        decode, prefill, address = self.a_session()
        if prefill.dead:
            return
        network = self.cluster.network
        ours, theirs = decode.machine.incarnation, prefill.machine.incarnation
        if self.rng.random() < 0.5:
            network.break_connection(ours, theirs)
        if self.rng.random() < 0.3:
            network.leave(prefill, ours, goodbye=self.rng.random() < 0.5)
            self.steps(0, 3, 20)
        network.leave(decode, theirs, goodbye=self.rng.random() < 0.3)
        self.steps(0, 3, 20)
        self.cluster.join(decode, prefill, address)

    def kill(self):
        node = self.rng.choice(self.prefills)
        if node.dead:
            return
        self.cluster.kill(node)
        for decode in self.decodes:
            self.cluster.network.leave(decode, node.machine.incarnation)

    DISTURBANCES = (
        abort_at_decode,
        abort_at_prefill,
        abort_at_prefill,
        break_lane,
        delay,
        deliver,
        break_connection,
        break_and_beat,
        beat,
        new_session,
        detach,
        wait,
        next_chunk,
        next_chunk,
        come_late,
        come_late,
    )

    # -- the history -------------------------------------------------------------------------
    def play(self, *, kill):
        for room in range(1, ROOMS + 1):
            self.start(room)
            self.steps(0, 3, 10, 25)
            for _ in range(self.rng.choice([0, 1, 2])):
                self.rng.choice(self.DISTURBANCES)(self)
                self.steps(0, 3, 10)
            if kill and room == ROOMS // 2:
                self.kill()
        self.deliver()
        while self.late:
            self.come_late()
            self.steps(0, 3, 10)
        while self.unsent:
            self.next_chunk()
        for _ in range(100_000):
            if not self.cluster.step():
                break
            self.watch()
        self.cluster.pass_time(200)
        self.watch()

    def check(self, *, silent):
        ended = {State.COMMITTED, State.FAILED} | (set() if silent else {State.QUARANTINED})
        for worker in self.destinations:
            assert {worker.state(room) for room in worker.rooms} <= ended
            for room, content in worker.returned.items():
                assert worker.content(worker.rooms[room]) == content, f"room {room}: a late write"
            if worker.gone and silent:
                assert worker.id in worker.node.freed
        for node in self.prefills:
            if not node.dead:
                assert not node.machine.sendings
                for peer in node.machine.peers.values():
                    assert not peer.legs
                    assert not peer.asked - peer.unproven
        for worker in self.sources:
            if worker.gone and not worker.node.dead:
                assert worker.id in worker.node.freed

    def close(self):
        for node in self.cluster.nodes.values():
            with contextlib.suppress(OSError):
                node.fabric.close(0)


@pytest.mark.fault
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("scope", list(Scope), ids=lambda scope: scope.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crowds_keep_the_promises(shape, scope, kill, monkeypatch):
    whole = limits.INTERVAL_RUNS
    for seed in range(SEEDS):
        # In every other history each page leaves by itself, so that things happen in between.
        monkeypatch.setattr(limits, "INTERVAL_RUNS", 1 if seed % 2 else whole)
        crowd = Crowd(seed, shape, scope=scope)
        try:
            crowd.play(kill=kill)
            crowd.check(silent=scope is not Scope.NOTHING)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            crowd.close()

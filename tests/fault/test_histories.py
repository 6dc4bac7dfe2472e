"""Random histories of both machines: whatever happens, bytes are right or there is an error, and no
byte lands in a page after it was given back."""

import random

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import PdxferError
from pdxfer.fabric.base import Scope
from pdxfer.layout import token_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import RETURNED_AT_DECODE, State
from tests.support.cluster import ADDRESS, Cluster, full

PAGE, PAGES, ROOMS = 2, 40, 12


def small_layout():
    return token_major(
        layers=range(2), kv_heads=1, head_dim=2, page_size=PAGE, pages=PAGES, dtype="uint8"
    )


class History:
    """Rooms that come, go, abort and die at random; every returned page is watched."""

    def __init__(self, seed, *, scope):
        self.rng = random.Random(seed)
        self.cluster = Cluster(seed)
        self.prefill = self.cluster.prefill()
        self.decode = self.cluster.decode(scope=scope)
        self.prefill.attach(0, small_layout())
        self.decode.attach(0, small_layout())
        self.cluster.join(self.decode, self.prefill)
        self.cluster.run()
        self.free = list(range(1, PAGES))
        self.rooms = {}
        self.returned = {}
        """Slot to (ids, bytes of those pages when they came back)."""

    def bytes_of(self, node, ids):
        layout = small_layout()
        rows = []
        for page in ids:
            for row in range(PAGE):
                for part in "kv":
                    for layer in range(2):
                        region, offset = layout.locate(part, layer, page * PAGE + row, 0)
                        rows.append(node.memory[0][region][offset : offset + 2].copy())
        return np.concatenate(rows)

    def start(self, slot):
        count = self.rng.randint(1, 4)
        if len(self.free) < count:
            return
        ids = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count)]
        source = self.rng.sample(range(1, PAGES), count)
        self.rooms[slot] = (ids, source)
        now = self.cluster.now
        steps = [lambda: self.receive(slot, ids, now), lambda: self.send(slot, source, now)]
        self.rng.shuffle(steps)
        for step in steps:
            step()
            for _ in range(self.rng.randint(0, 6)):
                self.step()

    def receive(self, slot, ids, now):
        try:
            self.decode.machine.receive(0, slot + 1, slot, (ADDRESS,), deadline=now + 20, now=now)
        except PdxferError:
            return
        tokens = PAGE * len(ids)
        self.decode.machine.place(0, slot, GivenPlaces(full(ids), tokens, 0), now=now)
        self.decode.pump()

    def send(self, slot, source, now):
        if self.prefill.dead:
            return
        self.prefill.machine.open(0, slot + 1, slot, deadline=now + 20, lease_s=30.0)
        half = self.rng.randint(0, len(source) - 1)
        if half:
            self.prefill.machine.send(0, slot, GivenChunk(full(source[:half]), last=False))
        self.prefill.machine.send(0, slot, GivenChunk(full(source[half:])))
        self.prefill.pump()

    def step(self):
        self.cluster.step()
        self.watch()

    def watch(self):
        for (_, slot), shown in self.decode.shown.items():
            if shown.state in RETURNED_AT_DECODE and slot not in self.returned:
                ids, source = self.rooms[slot]
                content = self.bytes_of(self.decode, ids)
                self.returned[slot] = (ids, content)
                if shown.state is State.COMMITTED:
                    assert np.array_equal(content, self.bytes_of(self.prefill, source))

    def disturb(self, slot):
        kind = self.rng.choice(["none", "decode", "prefill", "cut", "break", "beat"])
        now = self.cluster.now
        if kind == "decode":
            self.decode.machine.abort(0, slot, "seeded", now)
            self.decode.pump()
        elif kind == "prefill" and not self.prefill.dead:
            self.prefill.machine.abort(0, slot, "seeded")
            self.prefill.pump()
        elif kind == "cut":
            path = self.prefill.fabric.paths.get(self.decode.machine.incarnation)
            if path is not None and self.rng.random() < 0.3:
                path.fail("seeded", late_runs=self.rng.choice([0, 1, 100]))
        elif kind == "break":
            ends = (self.decode.machine.incarnation, self.prefill.machine.incarnation)
            self.cluster.network.break_connection(*ends)
        elif kind == "beat":
            self.decode.heartbeats()

    def play(self, *, kill):
        for slot in range(ROOMS):
            self.start(slot)
            for _ in range(self.rng.randint(0, 20)):
                self.step()
            self.disturb(self.rng.randint(0, slot))
            if kill and slot == ROOMS // 2:
                self.cluster.kill(self.prefill)
                self.cluster.network.leave(self.decode, self.prefill.machine.incarnation)
        for _ in range(100_000):
            if not self.cluster.step():
                break
            self.watch()
        self.cluster.pass_time(limits.NO_PROGRESS_DEADLINE_S + 30)  # nobody attaches anew here
        self.watch()


@pytest.mark.fault
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("scope", list(Scope), ids=lambda scope: scope.value)
@pytest.mark.parametrize("seed", range(60))
def test_returned_pages_never_change(seed, scope, kill):
    history = History(seed, scope=scope)
    history.play(kill=kill)
    for ids, content in history.returned.values():
        assert np.array_equal(history.bytes_of(history.decode, ids), content)
    ended = {State.COMMITTED, State.FAILED, State.QUARANTINED}
    states = [shown.state for shown in history.decode.shown.values()]
    assert set(states) <= ended
    if scope is not Scope.NOTHING:
        assert State.QUARANTINED not in states
    if not history.prefill.dead:
        assert not history.prefill.machine.sendings

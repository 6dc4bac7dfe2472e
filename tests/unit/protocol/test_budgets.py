"""Page ids that decode agents place at a prefill agent: bounded in bytes, not in messages times
their size."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import ResourceError
from pdxfer.layout import Pages, token_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Abort
from tests.support.cluster import ADDRESS, Cluster

PAGES = 1_000
IDS = np.arange(1, PAGES + 1)[::-1].copy()
WIRE_BYTES = 4 * PAGES
HELD_BYTES = 8 * PAGES


class Several:
    """A prefill node, and two decode nodes of one worker each."""

    def __init__(self):
        layout = token_major(
            layers=[0], kv_heads=1, head_dim=1, page_size=1, pages=8 * PAGES, dtype="float8_e4m3fn"
        )
        self.cluster = Cluster(0)
        self.prefill = self.cluster.prefill()
        self.prefill.attach(0, layout)
        self.decodes = [self.cluster.decode() for _ in range(2)]
        for decode in self.decodes:
            decode.attach(0, layout)
            self.cluster.join(decode, self.prefill)
        self.cluster.run()

    def hold(self, room, who=0):
        decode, now = self.decodes[who], self.cluster.now
        slot = room
        receiving = decode.machine.receive(0, room, slot, (ADDRESS,), deadline=now + 60, now=now)
        decode.pump()
        return receiving

    def place(self, room, who=0, first=0):
        decode, now = self.decodes[who], self.cluster.now
        pages = {"full": Pages(IDS + first)}
        decode.machine.place(0, room, GivenPlaces(pages, PAGES, 0), now=now)
        decode.pump()
        self.cluster.run()

    def receive(self, room, who=0, first=0):
        receiving = self.hold(room, who)
        self.place(room, who, first)
        return receiving

    def open(self, room):
        sending = self.prefill.machine.open(
            0, room, room, deadline=self.cluster.now + 60, lease_s=30.0
        )
        self.prefill.pump()
        self.cluster.run()
        return sending

    def peer(self, who=0):
        return self.prefill.machine.peers[self.decodes[who].machine.incarnation]


@pytest.mark.parametrize("in_one", [False, True])
def test_receives_that_wait_have_one_budget_of_bytes_a_session(monkeypatch, in_one):
    monkeypatch.setattr(limits, "PLACED_BYTES_PER_SESSION_MAX", 2 * WIRE_BYTES + 1)
    several = Several()
    kept = [several.receive(1), several.receive(2, first=PAGES)]
    over = several.hold(3)
    if not in_one:
        several.cluster.run()  # the pages come behind their receive
    several.place(3, first=2 * PAGES)
    assert [receiving.state for receiving in kept] == [State.WAITING] * 2
    assert over.state is State.FAILED
    assert isinstance(over.error, ResourceError)
    assert over.error.retryable
    assert "of this decode agent have placed here take 8000 bytes" in str(over.error)
    assert "PLACED_BYTES_PER_SESSION_MAX" in str(over.error)
    several.decodes[0].machine.abort(0, 1, "enough", several.cluster.now)
    several.decodes[0].pump()
    several.cluster.run()
    assert several.peer().ids_bytes == WIRE_BYTES
    assert several.receive(4, first=3 * PAGES).state is State.WAITING


def test_the_reason_of_an_abort_is_kept_up_to_a_length():
    several = Several()
    several.receive(1)
    reason = "x" * (1 << 20)
    abort = Abort(generation=1, reason=reason)
    several.prefill.machine.on_message(several.peer().peer_id, abort, several.cluster.now)
    sending = several.open(1)
    assert sending.state is State.FAILED
    assert len(str(sending.error)) < 2 * limits.REASON_CHARACTERS_MAX


def test_all_decode_agents_of_an_agent_have_one_budget_of_bytes_together(monkeypatch):
    monkeypatch.setattr(limits, "PLACED_BYTES_MAX", 2 * WIRE_BYTES + 1)
    several = Several()
    assert several.receive(1, who=0).state is State.WAITING
    assert several.receive(2, who=1).state is State.WAITING
    over = several.receive(3, who=1, first=PAGES)
    assert over.state is State.FAILED
    assert "of all have placed here" in str(over.error)


def test_pages_of_live_sends_count_until_these_end(monkeypatch):
    monkeypatch.setattr(limits, "PLACED_BYTES_PER_SESSION_MAX", HELD_BYTES + WIRE_BYTES - 1)
    several = Several()
    first = several.open(1)
    several.receive(1)
    assert first.state is State.READY
    assert several.peer().ids_bytes == HELD_BYTES
    second = several.open(2)
    over = several.receive(2, first=PAGES)
    assert (second.state, over.state) == (State.FAILED, State.FAILED)
    assert isinstance(over.error, ResourceError)
    several.prefill.machine.send(0, 1, GivenChunk({"full": Pages(IDS)}, tokens=PAGES))
    several.prefill.pump()
    several.cluster.run()
    assert first.state is State.COMMITTED
    assert several.peer().ids_bytes == 0

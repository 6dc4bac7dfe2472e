"""Both machines against each other over the in-memory lane; every history from a seed."""

import itertools

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import (
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    TransferError,
)
from pdxfer.layout import Pages, Rank, combine, page_major, token_major
from pdxfer.protocol.effects import Tell
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from pdxfer.wire.messages import Abort, Drained
from tests.support.cluster import ADDRESS, Cluster, full

PAGE = 4
SEEDS = range(8)


def layout(builder=page_major, **changes):
    settings = {
        "layers": range(3),
        "kv_heads": 2,
        "head_dim": 8,
        "page_size": PAGE,
        "pages": 16,
        "dtype": "bfloat16",
    }
    return builder(**{**settings, **changes})


class Pair:
    """One prefill and one decode node with a worker each, joined and settled."""

    def __init__(self, seed, source=None, destination=None, *, silent=True, relayout=""):
        self.cluster = Cluster(seed)
        self.prefill = self.cluster.prefill()
        self.decode = self.cluster.decode(silent=silent)
        self.prefill.attach(0, source or layout(), relayout=relayout)
        self.decode.attach(0, destination or layout(), relayout=relayout)
        self.before = [part.copy() for part in self.decode.memory[0]]
        self.cluster.join(self.decode, self.prefill)
        self.cluster.run()

    def receive(self, room=7, ids=None, *, tokens=0, prefix=0, slot=0):
        receiving = self.decode.machine.receive(
            0, room, slot, (ADDRESS,), deadline=self.cluster.now + 60, now=self.cluster.now
        )
        if ids is not None:
            self.place(ids, tokens=tokens, prefix=prefix, slot=slot)
        self.decode.pump()
        return receiving

    def place(self, ids, *, tokens, prefix=0, slot=0):
        self.decode.machine.place(
            0,
            slot,
            GivenPlaces({"full": Pages(ids, prefix // PAGE * PAGE)}, tokens, prefix),
            now=self.cluster.now,
        )
        self.decode.pump()

    def open(self, room=7, slot=0):
        sending = self.prefill.machine.open(
            0, room, slot, deadline=self.cluster.now + 60, lease_s=30.0
        )
        self.prefill.pump()
        return sending

    def send(self, ids, *, tokens=None, layers=None, last=True, aux=b"", slot=0):
        self.prefill.machine.send(
            0, slot, GivenChunk(full(ids), tokens=tokens, layers=layers, last=last, aux=aux)
        )
        self.prefill.pump()

    def at_prefill(self, slot=0):
        return self.prefill.shown[0, slot]

    def at_decode(self, slot=0):
        return self.decode.shown[0, slot]

    def assert_moved(self, source_ids, destination_ids, tokens, prefix=0):
        """Destination pages hold the source's cells; every other byte is as before."""
        expected = [part.copy() for part in self.before]
        source, destination = (
            self.prefill.machine.workers[0].layout,
            self.decode.machine.workers[0].layout,
        )
        first = prefix // PAGE * PAGE
        end = -(-tokens // PAGE) * PAGE
        for token in range(prefix, end):
            from_slot = source_ids[token // PAGE] * PAGE + token % PAGE
            to_slot = destination_ids[(token - first) // PAGE] * PAGE + token % PAGE
            for part in "kv":
                for layer in range(3):
                    for head in range(2):
                        region, offset = source.locate(part, layer, from_slot, head)
                        to_region, to_offset = destination.locate(part, layer, to_slot, head)
                        cell = self.prefill.memory[0][region][offset : offset + 16]
                        expected[to_region][to_offset : to_offset + 16] = cell
        for part, wanted in zip(self.decode.memory[0], expected, strict=True):
            assert np.array_equal(part, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("send_first", [False, True])
def test_pages_cross_and_both_sides_commit(seed, send_first):
    pair = Pair(seed)
    if send_first:
        pair.open()
        pair.send([3, 1, 2], tokens=11, aux=b"first token")
        pair.cluster.run()
        pair.receive(ids=[9, 5, 6], tokens=11)
    else:
        pair.receive(ids=[9, 5, 6], tokens=11)
        pair.cluster.run()
        pair.open()
        pair.send([3, 1, 2], tokens=11, aux=b"first token")
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    assert pair.at_decode().last.aux == b"first token"
    assert pair.at_prefill().states == [
        State.WAITING,
        State.READY,
        State.MOVING,
        State.SENT,
        State.COMMITTED,
    ]
    assert pair.at_prefill().last.prefix_tokens == 0
    pair.assert_moved([3, 1, 2], [9, 5, 6], 11)
    assert not pair.prefill.machine.sendings
    assert not pair.decode.machine.live


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_layers_and_a_late_place(seed):
    pair = Pair(seed, layout(token_major), layout(token_major))
    pair.receive()
    pair.open()
    pair.send([3, 1], last=False)
    pair.send([2], last=False, layers=[0, 1])
    pair.cluster.run()
    assert pair.at_prefill().state is State.WAITING
    pair.place([9, 5, 6], tokens=12)
    pair.send([2], last=True, layers=[2])
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    pair.assert_moved([3, 1, 2], [9, 5, 6], 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prefix_that_decode_has_does_not_travel(seed):
    pair = Pair(seed)
    pair.receive(ids=[5, 6], tokens=11, prefix=6)
    pair.open()
    pair.send([3, 1, 2], tokens=11)
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    assert pair.at_prefill().last.prefix_tokens == 6
    pair.assert_moved([3, 1, 2], [5, 6], 11, prefix=6)


def test_page_major_into_token_major_where_both_allow_it():
    pair = Pair(0, layout(page_major), layout(token_major), relayout="allow")
    pair.receive(ids=[9, 5, 6], tokens=11)
    pair.open()
    pair.send([3, 1, 2], tokens=11)
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    pair.assert_moved([3, 1, 2], [9, 5, 6], 11)


@pytest.mark.parametrize("send_first", [False, True])
def test_a_mismatch_is_the_same_error_on_both_sides(send_first):
    pair = Pair(0, layout(page_major), layout(token_major))
    if send_first:
        pair.open()
        pair.send([1], tokens=4)
    receiving = pair.receive(ids=[1], tokens=4)
    assert isinstance(receiving.error, LayoutMismatchError)
    assert isinstance(receiving.error, RuntimeError)
    assert receiving.state is State.FAILED
    pair.cluster.run()
    if not send_first:
        pair.open()
        pair.cluster.run()
    at_prefill = pair.at_prefill()
    assert at_prefill.state is State.FAILED
    assert str(at_prefill.last.error) == str(receiving.error)
    assert str(receiving.error).startswith(
        "PD KV layout mismatch on the whole-envelope path: prefill has 1 KV region(s) with "
    )
    assert all(
        np.array_equal(a, b) for a, b in zip(pair.before, pair.decode.memory[0], strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_aborts_in_mid_flight_and_nothing_lands_late(seed):
    pair = Pair(seed, layout(token_major), layout(token_major))
    pair.receive(ids=range(1, 15), tokens=56)
    pair.open()
    pair.send(range(1, 15), tokens=56)
    for _ in range(5 + 3 * seed):
        pair.cluster.step()
    pair.decode.machine.abort(0, 0, "the user left", pair.cluster.now)
    pair.decode.pump()
    while pair.at_decode().state not in (State.FAILED, State.COMMITTED):
        assert pair.cluster.step()
    after = [part.copy() for part in pair.decode.memory[0]]
    pair.cluster.run()
    for part, now in zip(after, pair.decode.memory[0], strict=True):
        assert np.array_equal(part, now)
    assert pair.at_decode().last.fence in ("", "drained")
    if pair.at_decode().state is State.FAILED:
        assert isinstance(pair.at_decode().last.error, TransferError)
        assert pair.at_prefill().state is State.FAILED


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_aborts_in_mid_flight(seed):
    pair = Pair(seed)
    pair.receive(ids=range(1, 15), tokens=56)
    pair.open()
    pair.send(range(1, 15), tokens=56)
    for _ in range(4 + seed):
        pair.cluster.step()
    pair.prefill.machine.abort(0, 0, "out of memory")
    pair.prefill.pump()
    pair.cluster.run()
    if pair.at_decode().state is State.COMMITTED:  # the commit had left before the abort
        pair.assert_moved(range(1, 15), range(1, 15), 56)
        return
    assert pair.at_prefill().state is State.FAILED
    assert pair.at_decode().state is State.FAILED
    assert "out of memory" in str(pair.at_decode().last.error)


@pytest.mark.parametrize("silent", [True, False])
def test_a_dead_prefill_agent_is_revoked_or_quarantined(silent):
    pair = Pair(1, silent=silent)
    receiving = pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.cluster.run()
    pair.cluster.kill(pair.prefill)
    pair.cluster.run()
    assert isinstance(pair.at_decode().last.error, PeerError)
    if silent:
        assert pair.at_decode().state is State.FAILED
        assert pair.at_decode().last.fence == "revoked"
        return
    pair.cluster.pass_time(limits.FENCE_DEADLINE_S + 1)
    assert pair.at_decode().state is State.QUARANTINED
    assert pair.at_decode().last.fence == "quarantined"
    pair.cluster.pass_time(3600)
    assert receiving.state is State.QUARANTINED
    pair.decode.machine.sender_dead(pair.prefill.machine.incarnation)
    pair.decode.pump()
    assert pair.at_decode().state is State.FAILED
    assert pair.at_decode().last.fence == "dead"


def test_a_quarantined_page_is_not_placed_again():
    pair = Pair(1, silent=False)
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.cluster.run()
    pair.cluster.kill(pair.prefill)
    pair.cluster.run()
    other = pair.cluster.prefill()
    other.attach(0, layout())
    pair.cluster.join(pair.decode, other)
    pair.cluster.run()
    again = pair.receive(room=8, ids=[5, 6], tokens=8, slot=1)
    assert again.state is State.FAILED
    assert str(again.error) == (
        "page 5 of group full is held by room 7 (generation 1), which may still write it; place "
        "other pages until that transfer has ended"
    )
    assert again.error.fields == {"page": "5", "room": "7", "generation": "1"}
    good = pair.receive(room=9, ids=[6, 7], tokens=8, slot=2)
    assert good.error is None


def test_a_departed_worker_frees_its_memory_only_after_the_proof():
    pair = Pair(1, silent=False)
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.cluster.run()
    pair.cluster.kill(pair.prefill)
    pair.cluster.run()
    pair.decode.machine.detach(0, "killed", pair.cluster.now)
    pair.decode.pump()
    pair.cluster.pass_time(100)
    assert pair.decode.freed == []
    pair.decode.machine.sender_dead(pair.prefill.machine.incarnation)
    pair.decode.pump()
    assert pair.decode.freed == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_prefill_worker_fails_its_room_on_both_sides(seed):
    pair = Pair(seed, layout(token_major), layout(token_major))
    pair.receive(ids=range(1, 15), tokens=56)
    pair.open()
    pair.send(range(1, 8), last=False)
    for _ in range(3 * seed):
        pair.cluster.step()
    pair.prefill.machine.detach(0, "killed")
    pair.prefill.pump()
    pair.cluster.run()
    assert pair.at_decode().state is State.FAILED
    assert pair.prefill.freed == [0]
    assert "went away" in str(pair.at_decode().last.error)


def test_tokens_that_differ_fail_both_sides():
    pair = Pair(0)
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.send([1, 2], tokens=7)
    pair.cluster.run()
    for shown in (pair.at_prefill(), pair.at_decode()):
        assert shown.state is State.FAILED
        assert "tokens differ: prefill=7, decode=8" in str(shown.last.error)


def test_a_missing_layer_is_an_error_not_a_truncation():
    pair = Pair(0, layout(token_major), layout(token_major))
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.send([1, 2], tokens=8, layers=[0, 1])
    pair.cluster.run()
    assert pair.at_decode().state is State.FAILED
    assert "send every page and every layer" in str(pair.at_decode().last.error)


def test_pages_out_of_range_are_refused_on_both_sides():
    pair = Pair(0)
    pair.receive(ids=[0], tokens=4)
    assert pair.at_decode().state is State.FAILED
    assert "page" in str(pair.at_decode().last.error)
    pair.open(room=8, slot=1)
    pair.send([16], tokens=4, slot=1)
    assert pair.at_prefill(1).state is State.FAILED


def test_deadlines_of_what_nobody_came_for():
    pair = Pair(0)
    pair.receive(ids=[4], tokens=4)
    pair.open(room=8, slot=1)
    pair.cluster.pass_time(61)
    assert pair.at_prefill(1).state is State.FAILED
    assert "no receive came for room 8" in str(pair.at_prefill(1).last.error)
    assert pair.at_decode().state is State.FAILED
    assert "0 of 1 prefill workers sent it" in str(pair.at_decode().last.error)
    assert pair.at_decode().last.error.retryable


def test_a_lost_lease_ends_a_matched_send():
    pair = Pair(0)
    pair.receive(ids=[4, 5], tokens=8)
    pair.open()
    pair.cluster.run()
    assert pair.at_prefill().state is State.READY
    pair.cluster.pass_time(31, heartbeats=False)
    assert pair.at_prefill().state is State.FAILED
    assert "lease" in str(pair.at_prefill().last.error)


def test_duplicate_rooms():
    pair = Pair(0)
    pair.receive(ids=[4], tokens=4)
    with pytest.raises(LocalProtocolError, match="duplicate room 7"):
        pair.receive(slot=1)
    pair.open()
    with pytest.raises(LocalProtocolError, match="duplicate room 7"):
        pair.open(slot=1)
    pair.send([1], tokens=4)
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    pair.receive(ids=[4], tokens=4, slot=2)
    pair.open(slot=2)
    pair.send([2], tokens=4, slot=2)
    pair.cluster.run()
    assert pair.at_decode(2).state is State.COMMITTED


@pytest.mark.parametrize("seed", SEEDS)
def test_two_source_ranks_fill_one_destination(seed):
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode()
    half = {"kv_heads": 1, "total_kv_heads": 2}
    for tp in range(2):
        prefill.attach(tp, layout(token_major, head_first=tp, **half), Rank(tp=tp, tp_size=2))
    decode.attach(0, layout(token_major))
    cluster.join(decode, prefill)
    cluster.run()
    decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now)
    decode.machine.place(0, 0, GivenPlaces(full([5, 6]), 8, 0), now=cluster.now)
    decode.pump()
    for tp in range(2):
        prefill.machine.open(tp, 7, 0, deadline=cluster.now + 60, lease_s=30.0)
        aux = b"from rank %d" % tp
        prefill.machine.send(tp, 0, GivenChunk(full([2, 3]), tokens=8, aux=aux))
        prefill.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert decode.shown[0, 0].last.aux == b"from rank 0"
    target = decode.machine.workers[0].layout
    for tp in range(2):
        assert prefill.shown[tp, 0].state is State.COMMITTED
        source = prefill.machine.workers[tp].layout
        for token in range(8):
            region, offset = source.locate("v", 1, (2 * PAGE) + token, tp)
            to_region, to_offset = target.locate("v", 1, (5 * PAGE) + token, tp)
            assert np.array_equal(
                prefill.memory[tp][region][offset : offset + 16],
                decode.memory[0][to_region][to_offset : to_offset + 16],
            )


def test_missing_ranks_wait_and_fail_by_name():
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    part = layout(token_major, kv_heads=1, total_kv_heads=2)
    prefill.attach(0, part, Rank(tp=0, tp_size=2))
    decode.attach(0, layout(token_major))
    cluster.join(decode, prefill)
    cluster.run()
    decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=cluster.now + 5, now=cluster.now)
    decode.pump()
    cluster.pass_time(6)
    error = decode.shown[0, 0].last.error
    assert isinstance(error, PeerError)
    assert error.retryable
    assert "1 of 2 ranks attached" in str(error)


def test_one_send_serves_two_receivers():
    cluster = Cluster(3)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout(token_major))
    for tp in range(2):
        half = layout(token_major, kv_heads=1, total_kv_heads=2, head_first=tp)
        decode.attach(tp, half, Rank(tp=tp, tp_size=2))
    cluster.join(decode, prefill)
    cluster.run()
    prefill.machine.open(0, 7, 0, deadline=cluster.now + 60, lease_s=30.0)
    prefill.machine.send(0, 0, GivenChunk(full([2, 3]), tokens=8))
    prefill.pump()
    for tp in range(2):
        decode.machine.receive(tp, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now)
        pages = full([5 + tp, 9])
        decode.machine.place(tp, 0, GivenPlaces(pages, 8, 0), now=cluster.now)
        decode.pump()
        cluster.run()
        expected = State.READY if tp else State.WAITING
        assert expected in prefill.shown[0, 0].states
    assert [decode.shown[tp, 0].state for tp in range(2)] == [State.COMMITTED] * 2
    assert prefill.shown[0, 0].state is State.COMMITTED


def test_fifteen_thousand_pages_cost_four_bytes_each():
    pages = 15_000
    big = layout(layers=[0], kv_heads=1, head_dim=2, page_size=1, pages=40_000)
    pair = Pair(0, big, big)
    ids = np.random.default_rng(0).permutation(np.arange(1, 40_000))[:pages]
    attached = pair.cluster.network.carried_bytes
    pair.receive(ids=ids, tokens=pages)
    pair.open()
    pair.send(ids[::-1].copy(), tokens=pages)
    pair.cluster.run()
    assert pair.at_decode().state is State.COMMITTED
    assert pair.cluster.network.carried_bytes - attached <= 4 * pages + 4096


def hybrid_layout(builder):
    """A full group, a window group with pages of its own count, recurrent state."""
    full_part = layout(builder, layers=[0, 2])
    window = layout(builder, layers=[1, 3], group="swa", pages=12)
    return combine(full_part, window)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_group_covers_only_a_tail(seed):
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode()
    source, destination = hybrid_layout(token_major), hybrid_layout(token_major)
    prefill.attach(0, source)
    decode.attach(0, destination)
    before = [part.copy() for part in decode.memory[0]]
    cluster.join(decode, prefill)
    cluster.run()
    tokens = 18
    decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now)
    placed = {**full([9, 4, 6, 5, 2]), "swa": Pages(np.array([7, 3]), 3 * PAGE)}
    decode.machine.place(0, 0, GivenPlaces(placed, tokens, 0), now=cluster.now)
    decode.pump()
    prefill.machine.open(0, 7, 0, deadline=cluster.now + 60, lease_s=30.0)
    chunks = [
        ({**full([1, 2, 3])}, False),
        ({**full([4, 5]), "swa": Pages(np.array([8, 9, 10]), 2 * PAGE)}, True),
    ]
    for pages, last in chunks:
        prefill.machine.send(0, 0, GivenChunk(pages, tokens=tokens, last=last))
        prefill.pump()
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    expected = before
    moved = [
        ("full", [0, 2], list(zip([1, 2, 3, 4, 5], [9, 4, 6, 5, 2], strict=True))),
        ("swa", [1, 3], [(9, 7), (10, 3)]),
    ]
    for group, layers, pairs in moved:
        for layer, part, row, head, (a, b) in itertools.product(
            layers, "kv", range(PAGE), range(2), pairs
        ):
            region, offset = source.locate(part, layer, a * PAGE + row, head, group)
            to_region, to_offset = destination.locate(part, layer, b * PAGE + row, head, group)
            cell = prefill.memory[0][region][offset : offset + 16]
            expected[to_region][to_offset : to_offset + 16] = cell
    for part, wanted in zip(decode.memory[0], expected, strict=True):
        assert np.array_equal(part, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_session_of_the_same_lives(seed):
    pair = Pair(seed, layout(token_major), layout(token_major))
    pair.receive(ids=range(1, 15), tokens=56)
    pair.open()
    pair.send(range(1, 15), tokens=56)
    for _ in range(4 * seed):
        pair.cluster.step()
    prefill, decode = pair.prefill.machine, pair.decode.machine
    decode.peer_lost(prefill.incarnation, "silent", pair.cluster.now)
    pair.decode.pump()
    prefill.peer_joined(decode.incarnation)
    pair.prefill.pump()
    for _ in range(seed):
        pair.cluster.step()
    pair.cluster.join(pair.decode, pair.prefill)
    pair.cluster.run()
    pair.cluster.pass_time(1)
    assert pair.at_decode().state in (State.FAILED, State.COMMITTED)
    assert pair.at_prefill().state in (State.FAILED, State.COMMITTED)
    pair.before = [part.copy() for part in pair.decode.memory[0]]
    pair.receive(room=8, ids=[9, 5, 6], tokens=11, slot=1)
    pair.open(room=8, slot=1)
    pair.send([3, 1, 2], tokens=11, slot=1)
    pair.cluster.run()
    assert pair.at_decode(1).state is State.COMMITTED
    pair.assert_moved([3, 1, 2], [9, 5, 6], 11)


def test_what_broke_undrained_is_never_called_drained():
    pair = Pair(0, layout(token_major), layout(token_major))
    pair.receive(ids=range(1, 15), tokens=56)
    pair.open()
    pair.send(range(1, 15), tokens=56)
    while not pair.cluster.hub.ready():
        pair.cluster.step()
    decode, prefill = pair.decode.machine, pair.prefill.machine
    path = pair.prefill.fabric.paths[decode.incarnation]
    path.fail("cut", late_runs=3)
    pair.prefill.take_lane_events()
    prefill.peer_lost(decode.incarnation, "silent")
    pair.prefill.pump()
    assert decode.incarnation not in prefill.peers
    prefill.on_message(decode.incarnation, Abort(generation=1, reason="again"), pair.cluster.now)
    asked = Abort(decode_incarnation=decode.incarnation)
    prefill.on_message(b"n" * 16, asked, pair.cluster.now)
    told = [e.message for e in prefill.take_effects() if isinstance(e, Tell)]
    assert not [message for message in told if isinstance(message, Drained)]


@pytest.mark.parametrize("late", [0, 1])
def test_a_send_that_owes_nothing_ends_even_when_it_comes_after_the_commit(late):
    cluster = Cluster(5)
    prefill, decode = cluster.prefill(), cluster.decode()
    for tp in range(2):  # both hold the one head: the cover takes it from the first
        whole = layout(token_major, kv_heads=1, total_kv_heads=1)
        prefill.attach(tp, whole, Rank(tp=tp, tp_size=2))
    decode.attach(0, layout(token_major, kv_heads=1, total_kv_heads=1))
    cluster.join(decode, prefill)
    cluster.run()
    decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=cluster.now + 60, now=cluster.now)
    decode.machine.place(0, 0, GivenPlaces(full([5, 6]), 8, 0), now=cluster.now)
    decode.pump()
    for tp in (1 - late, late):
        prefill.machine.open(tp, 7, 0, deadline=cluster.now + 60, lease_s=30.0)
        prefill.machine.send(tp, 0, GivenChunk(full([2, 3]), tokens=8))
        prefill.pump()
        cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert [prefill.shown[tp, 0].state for tp in range(2)] == [State.COMMITTED] * 2
    assert not prefill.machine.sendings

"""What workers give with their live transfers: bounded in bytes, not in transfers times chunks."""

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.errors import ResourceError
from pdxfer.layout import Pages, Rank, token_major
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.state import State
from tests.support.cluster import Cluster
from tests.support.transfers import open_room, receive, send

PAGES = 100
RECORD = limits.GIVEN_RECORD_BYTES
GIVEN = 8 * PAGES + RECORD


def agents(workers=2):
    """Ranks of one instance, each with the same heads, at a prefill agent and at a decode agent."""
    layout = token_major(
        layers=[0], kv_heads=1, head_dim=1, page_size=4, pages=4 * PAGES + 1, dtype="float8_e4m3fn"
    )
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    for worker in range(workers):
        prefill.attach(worker, layout, Rank(tp=worker, tp_size=workers))
        decode.attach(worker, layout, Rank(tp=worker, tp_size=workers))
    cluster.join(decode, prefill)
    cluster.run()
    return cluster, prefill, decode


def some(first=0):
    """Pages that no other call of a test names."""
    return np.arange(1 + first, 1 + first + PAGES)


def give(cluster, prefill, slot, worker=0, **changes):
    """A send of its own with one chunk that is not the last; as it is then."""
    room = 7 + slot
    open_room(cluster, prefill, worker, room, slot)
    sending = prefill.machine.sendings[worker, room]
    chunk = GivenChunk(**{"pages": {"full": Pages(some())}, "last": False, **changes})
    prefill.machine.send(worker, slot, chunk)
    prefill.pump()
    return sending


def assert_over(transfer, name):
    assert transfer.state is State.FAILED
    assert isinstance(transfer.error, ResourceError)
    assert transfer.error.retryable
    assert name in str(transfer.error)


def test_what_a_prefill_worker_gives_has_one_budget_of_bytes(monkeypatch):
    monkeypatch.setattr(limits, "GIVEN_BYTES_PER_WORKER_MAX", 2 * GIVEN)
    cluster, prefill, _ = agents()
    kept = [give(cluster, prefill, 0), give(cluster, prefill, 1)]
    assert_over(give(cluster, prefill, 2), "GIVEN_BYTES_PER_WORKER_MAX")
    assert [sending.state for sending in kept] == [State.WAITING] * 2, "the others go on"
    assert give(cluster, prefill, 0, worker=1).state is State.WAITING, "another worker's is its own"
    prefill.machine.abort(0, 1, "enough")
    prefill.pump()
    assert give(cluster, prefill, 3).state is State.WAITING, "what has ended counts no more"


def test_all_workers_of_an_agent_have_one_budget_of_bytes_together(monkeypatch):
    monkeypatch.setattr(limits, "GIVEN_BYTES_MAX", 2 * GIVEN)
    cluster, prefill, _ = agents()
    assert give(cluster, prefill, 0, worker=0).state is State.WAITING
    assert give(cluster, prefill, 0, worker=1).state is State.WAITING
    assert_over(give(cluster, prefill, 1, worker=1), "GIVEN_BYTES_MAX")


def test_chunks_without_pages_and_aux_count_in_the_budget(monkeypatch):
    monkeypatch.setattr(limits, "GIVEN_BYTES_PER_WORKER_MAX", 4 * RECORD)
    cluster, prefill, _ = agents()
    sending = give(cluster, prefill, 0, pages={})
    for _ in range(3):
        prefill.machine.send(0, 0, GivenChunk({}, last=False))
        assert sending.state is State.WAITING
    prefill.machine.send(0, 0, GivenChunk({}, last=False))
    assert_over(sending, "GIVEN_BYTES_PER_WORKER_MAX")
    assert_over(
        give(cluster, prefill, 1, pages={}, aux=bytes(4 * RECORD)), "GIVEN_BYTES_PER_WORKER_MAX"
    )


@pytest.mark.parametrize("name", ["GIVEN_BYTES_PER_WORKER_MAX", "GIVEN_BYTES_MAX"])
def test_what_a_decode_worker_gives_has_one_budget_of_bytes(monkeypatch, name):
    monkeypatch.setattr(limits, name, 2 * GIVEN)
    cluster, _, decode = agents()
    kept = [receive(cluster, decode, 0, 7 + n, some(n * PAGES), n) for n in range(2)]
    over = receive(cluster, decode, 0, 9, some(2 * PAGES), 2)
    assert_over(over, name)
    assert [receiving.state for receiving in kept] == [State.WAITING] * 2
    decode.machine.abort(0, 1, "enough", cluster.now)
    decode.pump()
    cluster.run()
    assert kept[1].state is State.FAILED
    assert receive(cluster, decode, 0, 10, some(2 * PAGES), 3).state is State.WAITING


def test_what_commits_counts_no_more_at_either_side():
    cluster, prefill, decode = agents(workers=1)
    receive(cluster, decode, 0, 7, some())
    open_room(cluster, prefill)
    send(prefill, ids=some())
    assert decode.machine._receives.given.length_bytes == GIVEN
    cluster.run()
    assert decode.shown[0, 0].state is State.COMMITTED
    assert prefill.machine._sends.given.length_bytes == 0
    assert decode.machine._receives.given.length_bytes == 0


def test_the_reason_of_a_workers_abort_is_kept_up_to_a_length():
    cluster, prefill, decode = agents(workers=1)
    sending = give(cluster, prefill, 0)
    receiving = receive(cluster, decode, 0, 99, some())
    reason = "x" * (1 << 20)
    prefill.machine.abort(0, 0, reason)
    decode.machine.abort(0, 0, reason, cluster.now)
    for transfer in (sending, receiving):
        assert len(str(transfer.error)) < 2 * limits.REASON_CHARACTERS_MAX


def test_sends_that_failed_before_their_receivers_came_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr(limits, "FAILED_SENDS_MAX", 2)
    cluster, prefill, _ = agents(workers=1)
    for slot in range(3):
        give(cluster, prefill, slot)
        prefill.machine.abort(0, slot, "enough")
        prefill.pump()
    assert list(prefill.machine._sends.failed) == [(0, 8), (0, 9)], "the oldest gave way"

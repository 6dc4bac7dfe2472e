"""What engines ask of a client, at real agents: nothing blocks, ends are told, failing is fast."""

import contextlib
import time

import numpy as np
import pytest

from pdxfer import embedded
from pdxfer.client import DecodeClient, Pages, PrefillClient, Rank, State
from pdxfer.errors import (
    ConfigError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerError,
    TransferError,
)
from pdxfer.layout import page_major
from tests.unit.client.conftest import SmallCache

WAIT_S = 30


@pytest.fixture(scope="module")
def agents():
    with embedded.prefill_agent() as prefill, embedded.decode_agent() as decode:
        yield prefill, decode


@pytest.fixture
def pair(agents):
    with clients(agents, SmallCache(), SmallCache()) as made:
        yield made


@contextlib.contextmanager
def clients(agents, source, destination, **options):
    prefill, decode = agents
    with (
        PrefillClient(prefill, source, **options) as sender,
        DecodeClient(decode, destination, **options) as receiver,
    ):
        yield sender, receiver


def collect(client, transfers):
    """What `finished` tells of these transfers, until all of them are final."""
    told = []
    deadline = time.monotonic() + WAIT_S
    final = (State.COMMITTED, State.FAILED)
    while not all(each.poll() in final for each in transfers) and time.monotonic() < deadline:
        told += client.finished()
        time.sleep(0.001)
    return told + client.finished()


def test_a_step_asks_for_everything_at_once_and_hears_of_each_end_once(pair):
    sender, receiver = pair
    array = np.frombuffer(sender.cache.shared.buffer, np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 256, array.size)
    rooms = range(1, 8)
    with receiver.together():
        into = [receiver.receive(room, sender.addresses, [room], tag=room) for room in rooms]
    with sender.together():
        out = [sender.send(room, [room + 1], aux=b"x", tag=room) for room in rooms]
    assert sorted(each.tag for each in collect(receiver, into)) == list(rooms)
    assert sorted(each.tag for each in collect(sender, out)) == list(rooms)
    for receiving, sending in zip(into, out, strict=True):
        commit, sent = receiving.wait(WAIT_S), sending.wait(WAIT_S)
        assert commit.aux == b"x"
        assert sending.returned_tokens == 4
        times = (sent.matched_s, sent.first_byte_s, sent.last_byte_s, sent.committed_s)
        assert None not in times
        assert sorted(times) == list(times)
        assert commit.matched_s <= commit.last_byte_s <= commit.committed_s
        item = sender.layout.item_lens[0]
        for cache, page in ((sender, sending.tag + 1), (receiver, receiving.tag)):
            region = np.frombuffer(cache.cache.shared.buffer, np.uint8)
            part = region[page * item : (page + 1) * item]
            if cache is sender:
                wanted = part
        assert np.array_equal(part, wanted)


def test_refusals_are_errors_of_their_transfers(pair):
    sender, _ = pair
    first = sender.open(1, wait=False)
    second = sender.open(1, wait=False)
    with pytest.raises(LocalProtocolError, match="duplicate room 1"):
        second.wait(WAIT_S)
    assert second.pages_returned
    assert first.poll() is State.WAITING
    assert sender.finished() == [second]


def test_pages_come_back_while_the_send_goes_on(pair):
    sender, receiver = pair
    receiving = receiver.receive(1, sender.addresses, [4, 5], tokens=8)
    sending = sender.open(1)
    assert sending.returned_tokens == 0
    sending.send([1], last=False)
    sending.wait_returned(WAIT_S)
    assert sending.returned_tokens == 4
    assert sending.poll() is State.MOVING
    assert not sending.pages_returned
    sending.send([2], tokens=8)
    receiving.wait(WAIT_S)
    sending.wait(WAIT_S)
    assert sending.returned_tokens == 8


def test_connect_has_a_verdict_for_each_pair(agents):
    other = page_major(
        layers=range(2), kv_heads=2, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
    )
    with clients(agents, SmallCache(), SmallCache()) as (sender, receiver):
        connecting = receiver.connect(sender.addresses, wait=False)
        summary = connecting.wait(WAIT_S)
        assert connecting.verdicts == {(Rank(), Rank()): summary}
        assert connecting.error is None
    with clients(agents, SmallCache(), SmallCache(other)) as (sender, receiver):
        connecting = receiver.connect(sender.addresses, wait=False)
        with pytest.raises(LayoutMismatchError):
            connecting.wait(WAIT_S)
        [error] = connecting.verdicts.values()
        assert isinstance(error, LayoutMismatchError)
        assert str(error) == str(connecting.error)
        receiving = receiver.receive(1, sender.addresses, [1], wait=False)
        with pytest.raises(LayoutMismatchError):
            receiving.wait(WAIT_S)


def test_a_receive_fails_fast_where_it_is_asked_to(pair):
    sender, receiver = pair
    receiver.connect(sender.addresses)
    receiving = receiver.receive(1, sender.addresses, [1], must_exist=True)
    with pytest.raises(PeerError) as caught:
        receiving.wait(WAIT_S)
    assert caught.value.retryable
    nobody = receiver.receive(2, "tcp://127.0.0.1:9", [2], unreachable_s=0.2, wait=False)
    with pytest.raises(PeerError) as caught:
        nobody.wait(WAIT_S)
    assert caught.value.retryable


def test_close_lets_transfers_end(agents):
    prefill, decode = agents
    with DecodeClient(decode, SmallCache()) as receiver:
        sender = PrefillClient(prefill, SmallCache())
        sending = sender.send(1, [1])
        receiving = receiver.receive(1, sender.addresses, [2])
        sender.close(drain_s=WAIT_S)
        assert sending.poll() is State.COMMITTED
        assert receiving.wait(WAIT_S).length_bytes > 0


def test_a_request_without_tokens_commits_and_carries_aux(pair):
    sender, receiver = pair
    before = bytes(receiver.cache.shared.buffer)
    receiving = receiver.receive(3, sender.addresses, [], tokens=0)
    sending = sender.send(3, [], tokens=0, aux=b"nothing else")
    commit = receiving.wait(WAIT_S)
    assert (commit.aux, commit.length_bytes) == (b"nothing else", 0)
    assert sending.wait(WAIT_S).length_bytes == 0
    assert bytes(receiver.cache.shared.buffer) == before


def test_a_page_too_many_is_trimmed_at_both_sides(pair):
    sender, receiver = pair
    np.frombuffer(sender.cache.shared.buffer, np.uint8)[:] = 7
    item = sender.layout.item_lens[0]
    receiving = receiver.receive(3, sender.addresses, [1, 2, 3], tokens=8, trim=True)
    sender.send(3, [4, 5, 6], tokens=8, trim=True)
    assert receiving.wait(WAIT_S).length_bytes == 2 * item
    region = np.frombuffer(receiver.cache.shared.buffer, np.uint8)
    assert (region[item : 3 * item] == 7).all()
    assert (region[3 * item :] == 0).all()


def test_pages_that_say_they_begin_at_token_0_do_so_behind_a_prefix_too(pair):
    sender, receiver = pair
    np.frombuffer(sender.cache.shared.buffer, np.uint8)[:] = 7
    item = sender.layout.item_lens[0]
    receiving = receiver.receive(3, sender.addresses, Pages([1, 2], 0), tokens=8, prefix_tokens=4)
    sender.send(3, [4, 5], tokens=8)
    assert receiving.wait(WAIT_S).length_bytes == item
    region = np.frombuffer(receiver.cache.shared.buffer, np.uint8)
    assert (region[2 * item : 3 * item] == 7).all()
    assert (region[: 2 * item] == 0).all()


def test_null_pages_are_skipped_at_both_sides(pair):
    sender, receiver = pair
    item = sender.layout.item_lens[0]
    source = np.frombuffer(sender.cache.shared.buffer, np.uint8).reshape(-1, item)
    source[:] = np.arange(len(source))[:, None]
    receiving = receiver.receive(3, sender.addresses, [0, 9, 0, 8], tokens=16, null_page=0)
    sending = sender.send(3, [0, 2, 3, 4], tokens=16, null_page=0)
    assert receiving.wait(WAIT_S).length_bytes == 2 * item
    sending.wait(WAIT_S)
    assert sending.returned_tokens == 16
    arrived = np.frombuffer(receiver.cache.shared.buffer, np.uint8).reshape(-1, item)
    assert {page: int(row[0]) for page, row in enumerate(arrived) if row.any()} == {9: 2, 8: 4}


def test_a_page_that_prefill_skips_and_decode_names_fails_both_with_its_tokens(pair):
    sender, receiver = pair
    receiving = receiver.receive(3, sender.addresses, [9, 8], tokens=8)
    sending = sender.send(3, [2, 0], tokens=8, null_page=0)
    for transfer in (receiving, sending):
        with pytest.raises(TransferError, match=r"tokens \[4, 8\) of group full"):
            transfer.wait(WAIT_S)
    assert receiving.pages_returned


def test_a_rank_that_is_attached_already_is_refused_with_the_way_out(agents, pair):
    with pytest.raises(ConfigError, match=r"rank tp=0 .* process \d+: close .* rank= or instance="):
        PrefillClient(agents[0], SmallCache())

"""A chunk that is begun once, at real agents: no byte goes before its layer is done."""

import threading
import time

import numpy as np
import pytest

from pdxfer import embedded, limits
from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient, State
from pdxfer.errors import ConfigError, LocalProtocolError, PeerError, TransferError
from pdxfer.layout import token_major
from tests.unit.client.conftest import SmallCache

WAIT_S = 20
LAYERS = 4
PAGES = 3


class Event:
    """A GPU event as a worker has it: done when it is set; says on which thread it was asked."""

    def __init__(self):
        self.done = threading.Event()
        self.threads = set()

    def query(self):
        self.threads.add(threading.current_thread().name)
        return self.done.is_set()


class Broken:
    def query(self):
        raise RuntimeError("the device is gone")


def cache():
    return SmallCache(
        token_major(
            layers=range(LAYERS), kv_heads=1, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
        )
    )


@pytest.fixture(scope="module")
def agents():
    with embedded.prefill_agent() as prefill, embedded.decode_agent() as decode:
        yield prefill, decode


@pytest.fixture
def pair(agents):
    with (
        PrefillClient(agents[0], cache()) as sender,
        DecodeClient(agents[1], cache()) as receiver,
    ):
        yield sender, receiver


def region_of(client, layer, part="k"):
    region, _ = client.layout.locate(part, layer, 4, 0)
    shared = client.cache.memory[region]
    whole = np.frombuffer(client.cache.shared.buffer, np.uint8)
    at = sum(each.length_bytes for each in client.cache.memory[:region])
    return whole[at : at + shared.length_bytes]


def arrived(client):
    """Layers of which some byte has come."""
    return {
        layer
        for layer in range(LAYERS)
        if region_of(client, layer).any() or region_of(client, layer, "v").any()
    }


def fill(client, layer):
    for part in "kv":
        region_of(client, layer, part)[:] = layer + 1


def until(true, timeout_s=WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def begin(pair, room, **options):
    sender, receiver = pair
    receiving = receiver.receive(room, sender.addresses, [9, 8, 7], tokens=12)
    sending = sender.open(room)
    sending.begin([1, 2, 3], tokens=12, **options)
    until(lambda: sending.poll() in (State.READY, State.MOVING))
    return receiving, sending


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_no_byte_of_a_layer_goes_before_it_is_done(pair, order):
    sender, receiver = pair
    for layer in range(LAYERS):
        fill(sender, layer)
    receiving, sending = begin(pair, 1, aux=b"token")
    time.sleep(0.05)
    assert arrived(receiver) == set()
    for count, layer in enumerate(order, 1):
        sending.layer_done(layer)
        until(lambda now=layer: now in arrived(receiver))
        time.sleep(0.02)
        assert arrived(receiver) == set(order[:count])
        assert (receiving.poll() is State.COMMITTED) <= (count == LAYERS)
    commit = receiving.wait(WAIT_S)
    assert commit.aux == b"token"
    assert commit.length_bytes == LAYERS * 2 * PAGES * 4 * 16
    sending.wait_returned(WAIT_S)
    assert sending.wait(WAIT_S).length_bytes == commit.length_bytes
    assert sending.returned_tokens == 12


def test_what_is_written_before_its_layer_is_done_is_what_arrives(pair):
    sender, receiver = pair
    receiving, sending = begin(pair, 2)
    for layer in range(LAYERS):
        fill(sender, layer)
        sending.layer_done(layer)
    receiving.wait(WAIT_S)
    page = region_of(receiver, 0).size // 16
    for layer in range(LAYERS):
        for part in "kv":
            found = region_of(receiver, layer, part)
            assert (found[7 * page : 10 * page] == layer + 1).all()


def test_a_layer_is_done_once(pair):
    _, sending = begin(pair, 3)
    sending.layer_done(1)
    with pytest.raises(LocalProtocolError, match="layer 1 is done already"):
        sending.layer_done(1)
    with pytest.raises(LocalProtocolError, match="layer 9 is done already, or nothing was begun"):
        sending.layer_done(9)
    with pytest.raises(LocalProtocolError, match=r"layers \[0, 2, 3\] .* are not done"):
        sending.send([4], last=True)
    sending.abort()


def test_a_layer_is_done_of_what_was_begun(pair):
    sending = pair[0].open(4)
    with pytest.raises(LocalProtocolError, match="nothing was begun"):
        sending.layer_done(0)
    sending.abort()


def test_chunks_follow_each_other(pair):
    sender, receiver = pair
    receiving = receiver.receive(5, sender.addresses, [9, 8, 7], tokens=12)
    sending = sender.open(5)
    sending.begin([1, 2], last=False)
    for layer in range(LAYERS):
        sending.layer_done(layer)
    sending.wait_returned(WAIT_S)
    assert sending.returned_tokens == 8
    sending.begin([3], tokens=12)
    for layer in reversed(range(LAYERS)):
        sending.layer_done(layer)
    assert receiving.wait(WAIT_S).length_bytes == LAYERS * 2 * PAGES * 4 * 16


def test_an_embedded_agent_waits_for_the_event_off_its_loop(pair):
    sender, receiver = pair
    for layer in range(LAYERS):
        fill(sender, layer)
    receiving, sending = begin(pair, 6)
    events = [Event() for _ in range(LAYERS)]
    for layer, event in enumerate(events):
        sending.layer_done(layer, event)
    time.sleep(0.05)
    assert arrived(receiver) == set()
    for layer in (3, 1, 0, 2):
        assert events[layer].threads == {"pdxfer-events"}
        events[layer].done.set()
        until(lambda now=layer: now in arrived(receiver))
    receiving.wait(WAIT_S)


def test_an_event_that_cannot_be_asked_ends_its_transfer(pair):
    receiving, sending = begin(pair, 7)
    sending.layer_done(0, Broken())
    with pytest.raises(TransferError, match=r"layer 0 cannot be asked.*the device is gone"):
        sending.wait(WAIT_S)
    with pytest.raises(TransferError):
        receiving.wait(WAIT_S)


def test_a_layer_that_is_never_done_ends_by_the_no_progress_deadline(pair, monkeypatch):
    monkeypatch.setattr(limits, "NO_PROGRESS_DEADLINE_S", 0.5)
    _, sending = begin(pair, 8)
    sending.layer_done(2)
    with pytest.raises(PeerError, match=r"layers \[0, 1, 3\] .* not told done"):
        sending.wait(WAIT_S)
    sending.layer_done(0)
    assert sending.poll() is State.FAILED


def test_a_daemon_cannot_see_an_event(agents):
    with PrefillClient(agents[0].socket_path, cache()) as sender:
        sending = sender.open(9)
        sending.begin([1], tokens=4)
        with pytest.raises(ConfigError, match="a daemon cannot see a GPU event"):
            sending.layer_done(0, Event())
        sending.layer_done(0)
        sending.abort()


async def test_on_a_loop(agents):
    async with (
        AsyncPrefillClient(agents[0], cache()) as sender,
        AsyncDecodeClient(agents[1], cache()) as receiver,
    ):
        receiving = await receiver.receive(10, sender.addresses, [9, 8, 7], tokens=12)
        sending = await sender.open(10)
        await sending.begin([1, 2, 3], tokens=12)
        event = Event()
        event.done.set()
        for layer in range(LAYERS):
            sending.layer_done(layer, event if layer else None)
        assert (await receiving.wait(WAIT_S)).length_bytes == LAYERS * 2 * PAGES * 4 * 16

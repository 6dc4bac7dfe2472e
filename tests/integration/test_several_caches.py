"""Several caches of one process, a layout each: a client each at one agent, an instance each."""

import contextlib

import numpy as np
import pytest

from pdxfer import embedded
from pdxfer.client import DecodeClient, PrefillClient
from pdxfer.errors import LayoutMismatchError
from pdxfer.launch.daemons import DaemonPair
from tests.support.caches import SeededCache, expect, small, small_token_major

pytestmark = pytest.mark.ucx
WAIT_S = 20
TOKENS = 75
LAYOUTS = {
    "model": small(),
    "draft": small_token_major(layers=range(1), kv_heads=1),
}
PAGES = {
    "model": (np.array([9, 3, 12, 30, 7]), np.array([5, 40, 2, 33, 21])),
    "draft": (np.array([8, 2, 5, 31, 6]), np.array([1, 41, 12, 3, 20])),
}


@contextlib.contextmanager
def agents(kind):
    """Where clients of each role attach."""
    if kind == "daemons":
        with DaemonPair("tcp") as pair:
            yield pair.prefill.socket, pair.decode.socket
        return
    configs = [
        embedded.AgentConfig(role=role, socket_path="", lanes=("tcp",))
        for role in ("prefill", "decode")
    ]
    with embedded.both_agents(*configs) as both:
        yield both.prefill, both.decode


@pytest.fixture(params=["daemons", "embedded"])
def clients(request):
    """By cache: its prefill client, its decode client, and what they attach."""
    with agents(request.param) as (prefill, decode), contextlib.ExitStack() as stack:
        made = {}
        for name, layout in LAYOUTS.items():
            source, destination = SeededCache(layout, 1), SeededCache(layout, 2)
            made[name] = (
                stack.enter_context(PrefillClient(prefill, source, instance=name)),
                stack.enter_context(DecodeClient(decode, destination, instance=name)),
                source,
                destination,
            )
        yield made


def test_one_request_moves_in_every_cache_by_the_same_room(clients):
    """Whole pools: what belongs to one cache changes nothing of the other."""
    before = {name: parts[3].snapshot() for name, parts in clients.items()}
    for room in (1, 2):
        receivings = [
            receiver.receive(room, sender.addresses, PAGES[name][1], tokens=TOKENS)
            for name, (sender, receiver, *_) in clients.items()
        ]
        for name, (sender, *_) in reversed(clients.items()):
            sender.send(room, PAGES[name][0], tokens=TOKENS)
        for receiving in receivings:
            receiving.wait(WAIT_S)
    for name, (_, _, source, destination) in clients.items():
        expect(source, destination, before[name], *PAGES[name], TOKENS)


def test_a_cache_is_not_taken_for_the_other(clients):
    [sender, *_], [_, receiver, *_] = clients["model"], clients["draft"]
    with pytest.raises(LayoutMismatchError):
        receiver.connect(sender.addresses)


def test_a_client_that_closes_leaves_the_other_caches_alone(clients):
    sender, receiver, source, destination = clients["model"]
    for client in clients["draft"][:2]:
        client.close()
    before = destination.snapshot()
    receiving = receiver.receive(1, sender.addresses, PAGES["model"][1], tokens=TOKENS)
    sender.send(1, PAGES["model"][0], tokens=TOKENS)
    receiving.wait(WAIT_S)
    expect(source, destination, before, *PAGES["model"], TOKENS)

"""Rooms on an in-memory cluster, in one line each."""

from __future__ import annotations

from pdxfer.layout import Rank, token_major
from pdxfer.protocol.effects import Tell
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from tests.support.cluster import ADDRESS, Cluster, full

PAGE = 4


def layout(**changes):
    """A small token-major layout: 3 layers, 2 heads of 8, 16 pages."""
    settings = {
        "layers": range(3),
        "kv_heads": 2,
        "head_dim": 8,
        "page_size": PAGE,
        "pages": 16,
        "dtype": "bfloat16",
    }
    return token_major(**{**settings, **changes})


def part(rank, of=2):
    """One of two heads, at one of two ranks."""
    return layout(kv_heads=1, total_kv_heads=2, head_first=rank), Rank(tp=rank, tp_size=of)


def pair(seed=0, **options):
    """One worker a side, joined."""
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode(**options)
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    return cluster, prefill, decode


def two_to_one(seed=0):
    """Two source ranks at one agent, one destination worker."""
    cluster = Cluster(seed)
    prefill, decode = cluster.prefill(), cluster.decode()
    for tp in range(2):
        prefill.attach(tp, *part(tp))
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    return cluster, prefill, decode


def one_to_two_agents(seed=0):
    """A source worker, and the two ranks of a decode instance, each beside its own agent."""
    cluster = Cluster(seed)
    prefill, decodes = cluster.prefill(), [cluster.decode(), cluster.decode()]
    prefill.attach(0, layout())
    for tp, decode in enumerate(decodes):
        decode.attach(tp, *part(tp))
        cluster.join(decode, prefill)
    cluster.run()
    return cluster, prefill, decodes


def receive(cluster, node, worker=0, room=7, ids=(5, 6), slot=0, wait_s=60.0, prefill=(ADDRESS,)):
    """Receive a room into pages."""
    receiving = node.machine.receive(
        worker, room, slot, prefill, deadline=cluster.now + wait_s, now=cluster.now
    )
    tokens = PAGE * len(ids)
    node.machine.place(worker, slot, GivenPlaces(full(ids), tokens, 0), now=cluster.now)
    node.pump()
    return receiving


def open_room(cluster, node, worker=0, room=7, slot=0, wait_s=60.0):
    """Open a room."""
    node.machine.open(worker, room, slot, deadline=cluster.now + wait_s, lease_s=30.0)
    node.pump()


def send(node, worker=0, ids=(2, 3), slot=0, last=True, tokens=None):
    """Send a chunk; with the last one the tokens of its pages."""
    if tokens is None and last:
        tokens = PAGE * len(ids)
    node.machine.send(worker, slot, GivenChunk(full(ids), tokens=tokens, last=last))
    node.pump()


def told(machine):
    """What the machine tells its peers, as (peer, message); its other effects are dropped."""
    return [(e.peer, e.message) for e in machine.take_effects() if isinstance(e, Tell)]

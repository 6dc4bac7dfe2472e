"""One page from client to client, through two real daemons: from `send` to the decode's commit.

Both workers run in this file; the prefill worker starts a transfer when decode has placed its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import limits, memory
from pdxfer.bench.buffers import now_ns
from pdxfer.bench.cases import one_page
from pdxfer.client import DecodeClient, PrefillClient, State
from pdxfer.launch.channel import Channel, Event, number, numbers, text, texts
from pdxfer.launch.child import Child, child_main
from pdxfer.launch.daemons import DaemonPair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange

_MODULE = "pdxfer.bench.one_page"
_PAGE = 1


@dataclass(frozen=True)
class Cache:
    """What a client takes."""

    layout: KVLayout
    memory: Sequence[MemoryRange]


def client_latency_us(lane: str, rounds: int) -> list[float]:
    """Start two daemons and two workers; one latency a round, in order."""
    with (
        DaemonPair(lane) as daemons,
        Child("prefill", _MODULE, role="prefill", socket=daemons.prefill.socket) as prefill,
        Child("decode", _MODULE, role="decode", socket=daemons.decode.socket) as decode,
    ):
        addresses = prefill.receive("ready", limits.CHILD_START_TIMEOUT_S)["addresses"]
        decode.receive("ready", limits.CHILD_START_TIMEOUT_S)
        decode.send(prefill=addresses, rounds=rounds)
        prefill.send(rounds=rounds)
        starts = numbers(prefill.receive("timed"), "times")
        ends = numbers(decode.receive("timed"), "times")
    return [(end - start) / 1e3 for start, end in zip(starts, ends, strict=True)]


def run(channel: Channel, options: Event) -> None:
    """A worker of either role, for one series."""
    layout = one_page()
    with memory.allocate(layout.regions[0].length_bytes) as shared:
        cache = Cache(layout, [shared.range()])
        if text(options, "role") == "prefill":
            _prefill(channel, PrefillClient(text(options, "socket"), cache))
        else:
            _decode(channel, DecodeClient(text(options, "socket"), cache))


def _prefill(channel: Channel, client: PrefillClient) -> None:
    channel.send(event="ready", addresses=list(client.addresses))
    rounds = number(channel.receive(None), "rounds")
    page = np.array([_PAGE])
    tokens = client.layout.groups[0].page_size
    times = []
    for room in range(1, rounds + 1):
        sending = client.open(room)
        sending.wait(limits.CHILD_STEP_TIMEOUT_S, until=State.READY)
        times.append(now_ns())
        sending.send(page, tokens=tokens)
        sending.wait(limits.CHILD_STEP_TIMEOUT_S)
    channel.send(event="timed", times=times)
    _wait_for_end(channel)
    client.close()


def _decode(channel: Channel, client: DecodeClient) -> None:
    channel.send(event="ready")
    order = channel.receive(None)
    prefill = tuple(texts(order, "prefill"))
    client.connect(prefill)
    page = np.array([_PAGE])
    tokens = client.layout.groups[0].page_size
    times = []
    for room in range(1, number(order, "rounds") + 1):
        client.receive(room, prefill, page, tokens=tokens).wait(limits.CHILD_STEP_TIMEOUT_S)
        times.append(now_ns())
    channel.send(event="timed", times=times)
    _wait_for_end(channel)
    client.close()


def _wait_for_end(channel: Channel) -> None:
    """Stay attached until the other worker is done too."""
    while True:
        channel.receive(None)


if __name__ == "__main__":
    child_main(run)

"""Small rooms beside a huge one: what one room of a million scattered pages costs the others.

Two daemons serve two pairs of workers, each worker in a process of its own. The small pair moves a
page a room, one room after the other; after a while the huge room starts beside it.
"""

from __future__ import annotations

import numpy as np

from pdxfer import limits, memory
from pdxfer.bench.buffers import now_ns
from pdxfer.bench.cases import one_page
from pdxfer.bench.one_page import Cache
from pdxfer.client import DecodeClient, PrefillClient
from pdxfer.launch.channel import Channel, Event, number, numbers, text, texts
from pdxfer.launch.child import Child, child_main
from pdxfer.launch.daemons import DaemonPair
from pdxfer.layout import KVLayout, page_major

_MODULE = "pdxfer.bench.crowded"
_SMALL_ROOMS = 400
_WAIT_S = 120.0


def huge(pages: int) -> KVLayout:
    """Pages of 256 bytes."""
    return page_major(
        layers=range(1), kv_heads=1, head_dim=64, page_size=2, pages=pages + 1, dtype="uint8"
    )


def measure(lane: str, pages: int) -> dict[str, list[float]]:
    """Milliseconds of each small room, alone and beside the huge one, and of the huge room."""
    with DaemonPair(lane) as daemons:
        sockets = {"prefill": daemons.prefill.socket, "decode": daemons.decode.socket}
        with (
            _child("prefill", "small", sockets, pages) as small_prefill,
            _child("decode", "small", sockets, pages) as small,
            _child("prefill", "huge", sockets, pages) as huge_prefill,
            _child("decode", "huge", sockets, pages) as large,
        ):
            everyone = (small_prefill, small, huge_prefill, large)
            addresses = {}
            for child in everyone:
                ready = child.receive("ready", limits.CHILD_START_TIMEOUT_S)
                addresses[child] = texts(ready, "addresses")
            for child in (small_prefill, small):
                child.send(prefill=addresses[small_prefill], rounds=_SMALL_ROOMS)
            alone = numbers(small.receive("timed"), "times")
            small_prefill.receive("timed")
            for child in (huge_prefill, large):
                child.send(prefill=addresses[huge_prefill], rounds=1)
            beside: list[int] = []
            for child in (small_prefill, small):
                child.send(prefill=addresses[small_prefill], rounds=4 * _SMALL_ROOMS)
            beside = numbers(small.receive("timed"), "times")
            small_prefill.receive("timed")
            took = numbers(large.receive("timed"), "times")
    return {
        "alone": [each / 1e6 for each in alone],
        "beside": [each / 1e6 for each in beside],
        "huge": [each / 1e6 for each in took],
    }


def _child(role: str, size: str, sockets: dict[str, str], pages: int) -> Child:
    return Child(f"{size}-{role}", _MODULE, role=role, socket=sockets[role], size=size, pages=pages)


def run(channel: Channel, options: Event) -> None:
    """A worker of either role and size, for as many series as it is told."""
    pages = number(options, "pages")
    is_huge = text(options, "size") == "huge"
    layout = huge(pages) if is_huge else one_page()
    ids = np.random.default_rng(1).permutation(pages) + 1 if is_huge else np.array([1])
    client_of = PrefillClient if text(options, "role") == "prefill" else DecodeClient
    with memory.allocate(layout.regions[0].length_bytes) as shared:
        cache = Cache(layout, [shared.range()])
        with client_of(text(options, "socket"), cache, instance=text(options, "size")) as client:
            addresses = list(client.addresses) if isinstance(client, PrefillClient) else []
            channel.send(event="ready", addresses=addresses)
            room = 0
            while True:
                order = channel.receive(None)
                times = []
                for _ in range(number(order, "rounds")):
                    room += 1
                    times.append(_one_room(client, room, tuple(texts(order, "prefill")), ids))
                channel.send(event="timed", times=times)


def _one_room(
    client: PrefillClient | DecodeClient, room: int, prefill: tuple[str, ...], ids: object
) -> int:
    began = now_ns()
    if isinstance(client, PrefillClient):
        client.send(room, ids).wait(_WAIT_S)
    else:
        client.receive(room, prefill, ids).wait(_WAIT_S)
    return now_ns() - began


def table(found: dict[str, list[float]]) -> str:
    """A line for each series."""
    return "\n".join(
        f"{name:>7}: {len(times):5} rooms, median {np.median(times):8.2f} ms, p99 "
        f"{np.percentile(times, 99):8.2f} ms, worst {max(times):8.2f} ms"
        for name, times in found.items()
    )


if __name__ == "__main__":
    child_main(run)

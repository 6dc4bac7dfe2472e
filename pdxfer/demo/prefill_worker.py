"""The prefill worker: reads prompts, fills pages, sends them in chunks."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client import PrefillClient
from pdxfer.demo import paging
from pdxfer.demo.attach import attach
from pdxfer.demo.model import load
from pdxfer.demo.options import WorkerOptions
from pdxfer.demo.prompts import CHUNK_TOKENS, send_ranges
from pdxfer.demo.rank_pools import RankPools
from pdxfer.launch.channel import Channel, Event, number, numbers
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.demo.model import DemoModel

_PAGE_SEED = 1


def run(channel: Channel, event: Event) -> None:
    """Serve requests until the parent closes the channel."""
    options = WorkerOptions.from_event(event["options"])
    model = load(options.model, options.seed, options.dtype, options.folder)
    pools = RankPools(model.geometry, options.side, options.tokens_max, options.model_name)
    with ExitStack() as stack:
        clients = attach(PrefillClient, options, pools, stack)
        channel.send(event="ready", addresses=list(clients[0].addresses))
        while True:
            _serve(channel, channel.receive(None), clients, pools, model)


def _serve(
    channel: Channel,
    request: Event,
    clients: Sequence[PrefillClient],
    pools: RankPools,
    model: DemoModel,
) -> None:
    room, prompt = number(request, "room"), numbers(request, "tokens")
    pages = pools.pick_pages(len(prompt), _PAGE_SEED + room)
    start_ns = time.monotonic_ns()
    cache, first = model.prefill(prompt, CHUNK_TOKENS)
    pools.scatter(cache, pages)
    digest = paging.digest(cache)
    channel.send(event="computed", seconds=(time.monotonic_ns() - start_ns) / 1e9)

    sendings = [client.open(room) for client in clients]
    first_send_ns = last_send_ns = time.monotonic_ns()
    ranges = send_ranges(len(pages))
    for part in ranges:
        last = part is ranges[-1]
        last_send_ns = time.monotonic_ns()
        for sending in sendings:
            sending.send(
                pages[part],
                tokens=len(prompt) if last else None,
                last=last,
                aux=struct.pack("<q", first) if last else b"",
            )
    for sending in sendings:
        sending.wait(limits.CHILD_STEP_TIMEOUT_S)
    channel.send(
        event="sent",
        first_send_ns=first_send_ns,
        last_send_ns=last_send_ns,
        pages=len(pages),
        sends=len(ranges) * len(sendings),
        digest=digest,
    )


if __name__ == "__main__":
    child_main(run)

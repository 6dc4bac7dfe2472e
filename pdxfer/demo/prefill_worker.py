"""The prefill worker: reads prompts, fills pages, sends them in chunks."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client import PrefillClient
from pdxfer.demo import paging
from pdxfer.demo.attach import agent_for, make_pool
from pdxfer.demo.model import load
from pdxfer.demo.options import WorkerOptions
from pdxfer.demo.prompts import CHUNK_TOKENS, send_ranges
from pdxfer.launch.channel import Channel, Event, number, numbers
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from pdxfer.demo.model import DemoModel
    from pdxfer.pool import PageMajorPool

_PAGE_SEED = 1


def run(channel: Channel, event: Event) -> None:
    """Serve requests until the parent closes the channel."""
    options = WorkerOptions.from_event(event["options"])
    model = load(options.model, options.seed, options.dtype, options.folder)
    pool, cache = make_pool(model, options)
    with ExitStack() as stack:
        client = PrefillClient(agent_for("prefill", options, stack), cache)
        stack.callback(client.close)
        channel.send(event="ready", addresses=list(client.addresses))
        while True:
            _serve(channel, channel.receive(None), client, pool, model)


def _serve(
    channel: Channel, request: Event, client: PrefillClient, pool: PageMajorPool, model: DemoModel
) -> None:
    room, prompt = number(request, "room"), numbers(request, "tokens")
    group = pool.layout.groups[0]
    pages = paging.pick_pages(
        group.pages, group.reserved_pages, -(-len(prompt) // group.page_size), _PAGE_SEED + room
    )
    start_ns = time.monotonic_ns()
    cache, first = model.prefill(prompt, CHUNK_TOKENS)
    paging.scatter(cache, pool, pages, group.page_size)
    digest = paging.digest(cache)
    channel.send(event="computed", seconds=(time.monotonic_ns() - start_ns) / 1e9)

    sending = client.open(room)
    first_send_ns = last_send_ns = time.monotonic_ns()
    ranges = send_ranges(len(pages))
    for part in ranges:
        last = part is ranges[-1]
        last_send_ns = time.monotonic_ns()
        sending.send(
            pages[part],
            tokens=len(prompt) if last else None,
            last=last,
            aux=struct.pack("<q", first) if last else b"",
        )
    sending.wait(limits.CHILD_STEP_TIMEOUT_S)
    channel.send(
        event="sent",
        first_send_ns=first_send_ns,
        last_send_ns=last_send_ns,
        pages=len(pages),
        sends=len(ranges),
        digest=digest,
    )


if __name__ == "__main__":
    child_main(run)

"""The decode worker: gives pages, waits for the commit, continues from what arrived."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client import DecodeClient
from pdxfer.demo import paging
from pdxfer.demo.attach import agent_for, make_pool
from pdxfer.demo.model import load
from pdxfer.demo.options import WorkerOptions
from pdxfer.demo.prompts import ANSWER_TOKENS
from pdxfer.launch.channel import Channel, Event, number, texts
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.demo.model import DemoModel
    from pdxfer.pool import PageMajorPool

_PAGE_SEED = 1001
"""Far from the prefill worker's seeds: the same request lies on other pages here."""


def run(channel: Channel, event: Event) -> None:
    """Serve requests until the parent closes the channel."""
    options = WorkerOptions.from_event(event["options"])
    model = load(options.model, options.seed, options.dtype, options.folder)
    pool, cache = make_pool(model, options)
    with ExitStack() as stack:
        client = DecodeClient(agent_for("decode", options, stack), cache)
        stack.callback(client.close)
        channel.send(event="ready")
        prefill = tuple(texts(channel.receive(None), "prefill"))
        client.connect(prefill)
        channel.send(event="connected")
        while True:
            _serve(channel, channel.receive(None), client, prefill, pool, model)


def _serve(
    channel: Channel,
    request: Event,
    client: DecodeClient,
    prefill: Sequence[str],
    pool: PageMajorPool,
    model: DemoModel,
) -> None:
    room, tokens = number(request, "room"), number(request, "token_count")
    group = pool.layout.groups[0]
    pages = paging.pick_pages(
        group.pages, group.reserved_pages, -(-tokens // group.page_size), _PAGE_SEED + room
    )
    receiving = client.receive(room, prefill, pages, tokens=tokens)
    channel.send(event="receiving")
    commit = receiving.wait(limits.CHILD_STEP_TIMEOUT_S)
    commit_ns = time.monotonic_ns()
    cache = paging.gather(pool, model.new_cache(), pages, tokens, model.geometry.layers)
    digest = paging.digest(cache)
    (first,) = struct.unpack("<q", commit.aux)
    channel.send(
        event="committed",
        commit_ns=commit_ns,
        length_bytes=commit.length_bytes,
        runs=commit.runs,
        lane=commit.lane,
        digest=digest,
    )
    answer = model.decode(cache, first, ANSWER_TOKENS)
    channel.send(event="answer", tokens=answer)


if __name__ == "__main__":
    child_main(run)

"""The decode worker: gives pages, waits for the commit, continues from what arrived."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client import DecodeClient
from pdxfer.demo import paging
from pdxfer.demo.attach import attach
from pdxfer.demo.model import load
from pdxfer.demo.options import WorkerOptions
from pdxfer.demo.prompts import ANSWER_TOKENS
from pdxfer.demo.rank_pools import RankPools
from pdxfer.launch.channel import Channel, Event, number, texts
from pdxfer.launch.child import child_main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.demo.model import DemoModel

_PAGE_SEED = 1001
"""Far from the prefill worker's seeds: the same request lies on other pages here."""


def run(channel: Channel, event: Event) -> None:
    """Serve requests until the parent closes the channel."""
    options = WorkerOptions.from_event(event["options"])
    model = load(options.model, options.seed, options.dtype, options.folder)
    pools = RankPools(model.geometry, options.side, options.tokens_max, options.model_name)
    with ExitStack() as stack:
        clients = attach(DecodeClient, options, pools, stack)
        channel.send(event="ready")
        prefill = tuple(texts(channel.receive(None), "prefill"))
        for client in clients:
            client.connect(prefill)
        channel.send(event="connected")
        while True:
            _serve(channel, channel.receive(None), clients, prefill, pools, model)


def _serve(
    channel: Channel,
    request: Event,
    clients: Sequence[DecodeClient],
    prefill: Sequence[str],
    pools: RankPools,
    model: DemoModel,
) -> None:
    room, tokens = number(request, "room"), number(request, "token_count")
    pages = pools.pick_pages(tokens, _PAGE_SEED + room)
    receivings = [client.receive(room, prefill, pages, tokens=tokens) for client in clients]
    channel.send(event="receiving")
    commits = [receiving.wait(limits.CHILD_STEP_TIMEOUT_S) for receiving in receivings]
    commit_ns = time.monotonic_ns()
    caches = [
        pools.gather(model.new_cache(), pages, tokens, replica) for replica in range(pools.replicas)
    ]
    channel.send(
        event="committed",
        commit_ns=commit_ns,
        length_bytes=sum(commit.length_bytes for commit in commits),
        runs=sum(commit.runs for commit in commits),
        lane=commits[0].lane,
        digests=[paging.digest(cache) for cache in caches],
    )
    (first,) = struct.unpack("<q", commits[0].aux)
    answer = model.decode(caches[0], first, ANSWER_TOKENS)
    channel.send(event="answer", tokens=answer)


if __name__ == "__main__":
    child_main(run)

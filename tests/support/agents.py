"""A prefill and a decode agent on one loop, over the in-memory lane, with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np

from pdxfer.agent.config import AgentConfig
from pdxfer.agent.decode import DecodeAgent
from pdxfer.agent.prefill import PrefillAgent
from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient
from pdxfer.fabric.base import Scope
from pdxfer.fabric.inproc import Hub, InprocFabric
from tests.support.caches import SeededCache, expect, small_token_major

WAIT_S = 20.0
TOKENS = 75
SOURCE_PAGES = np.array([9, 3, 12, 30, 7])
DESTINATION_PAGES = np.array([5, 40, 2, 33, 21])


class Both:
    """A prefill and a decode agent on this loop; `step` moves one piece of work of the lane."""

    def __init__(self, folder, lanes=("inproc",), *, silent=True, at_prefill=None):
        self.hub = Hub()
        self.rng = random.Random(0)
        self.fabrics = {}

        def fabric(role):
            def make(lane):
                if role == "prefill" and at_prefill is not None and lane != "inproc":
                    at_prefill(lane)
                made = InprocFabric(
                    self.hub,
                    self.agents[role].incarnation,
                    scope=Scope.SENDER if silent else Scope.NOTHING,
                )
                made.lane = lane
                self.fabrics[role] = made
                return made

            return make

        self.agents = {}
        for role, agent in (("prefill", PrefillAgent), ("decode", DecodeAgent)):
            config = AgentConfig(role=role, socket_path=str(folder / role), lanes=lanes)
            self.agents[role] = agent(config, fabric(role))

    @contextlib.asynccontextmanager
    async def workers(self):
        """Both agents serving, a client and a token-major cache at each."""
        source = SeededCache(small_token_major(), 1)
        destination = SeededCache(small_token_major(), 2)
        try:
            for agent in self.agents.values():
                await agent.start()
            async with (
                AsyncPrefillClient(self.agents["prefill"].config.socket_path, source) as sender,
                AsyncDecodeClient(self.agents["decode"].config.socket_path, destination) as reader,
            ):
                yield sender, reader, source, destination
        finally:
            for agent in self.agents.values():
                await agent.stop("the test is over")

    @property
    def path(self):
        """The path from prefill to decode."""
        return self.fabrics["prefill"].paths[self.agents["decode"].incarnation]

    @contextlib.asynccontextmanager
    async def moving(self):
        """The lane moves by itself inside the block."""

        async def move():
            while True:
                while self.hub.step(self.rng):
                    pass
                await asyncio.sleep(0.002)

        task = asyncio.create_task(move())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def until(holds):
    """Wait until something of the outside holds."""
    for _ in range(int(WAIT_S / 0.005)):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {WAIT_S} s")


async def begin(sender, reader, room):
    receiving = await reader.receive(room, sender.addresses, DESTINATION_PAGES, tokens=TOKENS)
    sending = await sender.send(room, SOURCE_PAGES, tokens=TOKENS)
    return sending, receiving


async def cross(both, sender, reader, source, destination, room):
    before = destination.snapshot()
    async with both.moving():
        sending, receiving = await begin(sender, reader, room)
        await receiving.wait(WAIT_S)
        await sending.wait(WAIT_S)
    expect(source, destination, before, SOURCE_PAGES, DESTINATION_PAGES, TOKENS)

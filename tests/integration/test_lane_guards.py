"""Guards of real agents over the in-memory lane: each test fails where its guard is left out."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, State
from pdxfer.errors import PdxferError
from tests.support.agents import WAIT_S, Both, begin, cross, until
from tests.support.caches import SeededCache, small_token_major


def mappings(cache):
    """How often this process maps the memory of a cache: its own mapping, and the agent's."""
    inode = os.fstat(cache.memory[0].fd).st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len([line for line in lines if line.split()[4] == str(inode)])


async def test_an_abort_ahead_of_the_end_of_a_broken_path_is_not_called_drained(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pdxfer.limits.FENCE_DEADLINE_S", 0.5)
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, _, destination):
        sending, receiving = await begin(sender, reader, 1)
        await until(both.hub.ready)
        fabric = both.fabrics["prefill"]
        take, fabric.take_events = fabric.take_events, list  # the agent does not hear of the lane
        both.path.fail("cut", late_runs=3)
        receiving.abort("enough")
        await until(lambda: sending.poll() is not State.MOVING)
        assert sending.poll() is State.FENCING
        fabric.take_events = take
        await until(lambda: receiving.poll() is not State.FENCING)
        assert receiving.poll() is State.QUARANTINED
        before = destination.snapshot()
        async with both.moving():
            await until(lambda: not both.hub.late)
        late = zip(before, destination.regions, strict=True)
        assert any(not np.array_equal(was, now) for was, now in late), "they landed this late"
        assert not receiving.pages_returned


@pytest.mark.parametrize("proof", ["drained", "dead"])
async def test_memory_of_a_decode_worker_that_went_stays_mapped_until_the_proof(tmp_path, proof):
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        prefill, decode = both.agents["prefill"], both.agents["decode"]
        cache = SeededCache(small_token_major(), 3)
        socket = decode.config.socket_path
        async with AsyncDecodeClient(socket, cache, instance="leaver") as leaver:
            await leaver.connect(sender.addresses, timeout_s=WAIT_S)
            registered = len(both.fabrics["decode"]._regions)
            await leaver.receive(2, sender.addresses, [5, 6], tokens=32)
            await sender.send(2, [1, 2], tokens=32)
            await until(both.hub.ready)
            if proof == "dead":
                both.path.fail("cut", late_runs=3)
        await until(lambda: len(decode.machine.workers) == 1)
        assert mappings(cache) == 2, "writes may still land"
        if proof == "dead":
            async with both.moving():
                await until(lambda: not both.hub.late)
            await asyncio.sleep(0.2)
            assert mappings(cache) == 2, "the end of the lane proves nothing here"
            assert len(both.fabrics["decode"]._regions) == registered
            decode.machine.sender_dead(prefill.incarnation)
            decode.pump()
        async with both.moving():
            await until(lambda: mappings(cache) == 1)
        assert len(both.fabrics["decode"]._regions) < registered


async def test_memory_of_a_prefill_worker_that_went_stays_mapped_until_the_lane_is_done(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        prefill, cache = both.agents["prefill"], SeededCache(small_token_major(), 3)
        socket = prefill.config.socket_path
        async with AsyncPrefillClient(socket, cache, instance="leaver") as leaver:
            addresses = [f"{address}#leaver" for address in sender.addresses]
            receiving = await reader.receive(2, addresses, [5, 6], tokens=32)
            await leaver.send(2, [1, 2], tokens=32)
            await until(both.hub.ready)
            registered = len(both.fabrics["prefill"]._regions)
        await until(lambda: len(prefill.machine.workers) == 1)
        assert both.hub.ready()
        assert mappings(cache) == 2, "the lane may still read it"
        assert len(both.fabrics["prefill"]._regions) == registered
        async with both.moving():
            await until(lambda: mappings(cache) == 1)
            with pytest.raises(PdxferError):
                await receiving.wait(WAIT_S)
        assert len(both.fabrics["prefill"]._regions) < registered
        await cross(both, sender, reader, source, destination, 3)


async def test_memory_is_deregistered_before_it_is_unmapped(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, source, destination):
        await cross(both, sender, reader, source, destination, 1)
        cache, mapped = SeededCache(small_token_major(), 3), []
        socket, fabric = both.agents["decode"].config.socket_path, both.fabrics["decode"]
        async with AsyncDecodeClient(socket, cache, instance="leaver") as leaver:
            await leaver.connect(sender.addresses, timeout_s=WAIT_S)
            deregister = fabric.deregister

            def note(region):
                mapped.append(mappings(cache))
                deregister(region)

            fabric.deregister = note
        await until(lambda: mappings(cache) == 1)
        assert mapped == [2] * len(cache.memory)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_agent_that_stops_closes_its_lanes_before_it_unmaps(tmp_path, role):
    both = Both(tmp_path)
    mapped = []
    async with both.workers() as (sender, reader, source, destination):
        cache = source if role == "prefill" else destination
        await cross(both, sender, reader, source, destination, 1)
        fabric = both.fabrics[role]
        close = fabric.close

        def note(deadline_s):
            mapped.append(mappings(cache))
            close(deadline_s)

        fabric.close = note
        await begin(sender, reader, 2)
        await until(both.hub.ready)
        await both.agents[role].stop("told to")
    assert mapped == [2]
    assert mappings(cache) == 1

"""The process of a neighbour has ended: each agent ends at once what it had with that life."""

import asyncio

import pytest

from pdxfer.client import State
from pdxfer.errors import PdxferError, PeerError
from tests.support.agents import WAIT_S, Both, begin, until


@pytest.mark.parametrize("silent", [True, False])
async def test_prefill_ends_its_sends_when_the_process_of_decode_has_ended(tmp_path, silent):
    both = Both(tmp_path, silent=silent)
    async with both.workers() as (sender, reader, _, _):
        sending, _ = await begin(sender, reader, 2)
        await until(both.hub.ready)
        prefill, peer = both.agents["prefill"], both.agents["decode"].incarnation
        prefill._on_neighbour_dead(peer)
        async with both.moving():
            with pytest.raises(PdxferError, match=r"the process of decode agent .* has ended"):
                await sending.wait(WAIT_S)
        assert sending.poll() is State.FAILED
        assert peer not in prefill.neighbours.peers


@pytest.mark.parametrize(("silent", "fence"), [(True, "revoked"), (False, "dead")])
async def test_decode_ends_its_receives_when_the_process_of_prefill_has_ended(
    tmp_path, silent, fence
):
    """Where the receiver can end the lane, that end is the proof: bytes may still be on the way."""
    both = Both(tmp_path, silent=silent)
    async with both.workers() as (sender, reader, _, _):
        _, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        decode, peer = both.agents["decode"], both.agents["prefill"].incarnation
        decode._on_neighbour_dead(peer)
        with pytest.raises(PeerError, match="its process has ended"):
            await receiving.wait(WAIT_S)
        assert receiving.poll() is State.FAILED
        assert receiving.error.fields["fence"] == fence


async def test_the_process_is_watched_while_anything_of_it_is_quarantined(tmp_path, monkeypatch):
    """Also after its session is over, as that of a process that was stopped and is killed later."""
    monkeypatch.setattr("pdxfer.limits.FENCE_DEADLINE_S", 0.3)
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, _, _):
        _, receiving = await begin(sender, reader, 2)
        await until(both.hub.ready)
        decode, prefill = both.agents["decode"], both.agents["prefill"]
        peer = prefill.incarnation
        monkeypatch.setattr(prefill.machine, "on_message", lambda *_: None)  # it hears no abort
        decode._link_to(peer).end("the test says so")
        await until(lambda: receiving.poll() is State.QUARANTINED)
        await asyncio.sleep(0.3)  # several ticks
        assert decode.neighbours.pidfd(peer) >= 0
        decode._on_neighbour_dead(peer)
        await until(lambda: receiving.poll() is State.FAILED)
        assert receiving.error.fields["fence"] == "dead"

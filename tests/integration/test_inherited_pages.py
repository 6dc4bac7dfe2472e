"""A worker comes back to its agent with pages that an earlier life of that agent had told."""

import asyncio

import msgspec
import numpy as np
import pytest

from pdxfer.client import AsyncDecodeClient, State
from pdxfer.errors import ConfigError, PdxferError
from pdxfer.local.messages import HeldTransfer, WritersEnded
from pdxfer.wire.messages import GroupPages
from pdxfer.wire.pages import pack_ids
from tests.support.agents import Both, until
from tests.support.caches import SeededCache, small_token_major

LIFE, OTHER = b"o" * 16, b"x" * 16
NOWHERE = "tcp://127.0.0.1:9"


def held(prefill, writers, *, ids=(5, 6), slot=100, sequence=1, room=9):
    encoding, packed = pack_ids(np.array(ids))
    return HeldTransfer(
        transfer=slot,
        sequence=sequence,
        life=LIFE,
        room=room,
        groups={"full": GroupPages(first_token=0, encoding=encoding, ids=packed)},
        prefill=list(prefill),
        writers=writers,
    )


class Returning(AsyncDecodeClient):
    """A client that hands over what an agent that died has left it."""

    def hand_over(self, *transfers):
        self._attach = msgspec.structs.replace(self._attach, held=list(transfers))
        return self


async def come_back(both, *transfers):
    cache = SeededCache(small_token_major(), 3)
    client = Returning(both.agents["decode"].config.socket_path, cache, instance="back")
    return await client.hand_over(*transfers).__aenter__()


async def refused(client, prefill):
    async def receive():
        await (await client.receive(1, prefill, [6], tokens=16)).wait(20)

    with pytest.raises(ConfigError, match=r"page 6 .* held by room 9 "):
        await receive()


async def accepted(client, prefill):
    receiving = await client.receive(2, prefill, [6], tokens=16)
    await asyncio.sleep(0.05)
    assert receiving.error is None
    receiving.abort()


async def test_the_prefill_life_that_was_told_says_that_it_has_nothing_left(tmp_path):
    both = Both(tmp_path)
    async with both.workers() as (sender, _, _, _):
        prefill = both.agents["prefill"]
        client = await come_back(both, held(sender.addresses, [prefill.incarnation]))
        await until(lambda: client.board.state(100, 1) is State.FAILED)
        await accepted(client, sender.addresses)
        client.close()


async def test_another_life_of_that_prefill_agent_proves_nothing_and_pages_stay_held(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pdxfer.limits.FENCE_DEADLINE_S", 0.2)
    both = Both(tmp_path)
    async with both.workers() as (sender, reader, _, _):
        await reader.connect(sender.addresses, timeout_s=20)
        client = await come_back(both, held(sender.addresses, [OTHER]))
        await refused(client, sender.addresses)
        await until(lambda: client.board.state(100, 1) is State.QUARANTINED)
        await refused(client, sender.addresses)
        client.channel.post(WritersEnded(transfer=100, sequence=1))
        await until(lambda: client.board.state(100, 1) is State.FAILED)
        await accepted(client, sender.addresses)
        client.close()


async def test_a_worker_speaks_of_what_it_has_inherited_only(tmp_path):
    """Its word that writers have ended frees no page of a transfer of this agent."""
    both = Both(tmp_path, silent=False)
    async with both.workers() as (sender, reader, _, _):
        async with both.moving():
            await reader.connect(sender.addresses, timeout_s=20)
        receiving = await reader.receive(4, sender.addresses, [5, 6], tokens=32)
        await sender.send(4, [1], tokens=32, last=False)
        await until(both.hub.ready)
        receiving.abort()
        reader.channel.post(WritersEnded(transfer=receiving.slot, sequence=receiving.sequence))
        await asyncio.sleep(0.2)
        assert receiving.poll() is State.FENCING


@pytest.mark.parametrize(
    "transfers",
    [
        [held([NOWHERE], [OTHER], ids=(1 << 20,))],
        [held([NOWHERE], [OTHER]), held([NOWHERE], [OTHER], slot=101, room=10)],
        [held([NOWHERE], [OTHER]), held([NOWHERE], [OTHER], ids=(7,), room=10)],
        [held([NOWHERE], [OTHER], sequence=2)],
        [held([], [OTHER])],
    ],
    ids=["page", "pages twice", "slot twice", "sequence", "no address"],
)
async def test_what_cannot_be_held_is_refused_with_the_attach(tmp_path, transfers):
    both = Both(tmp_path)
    async with both.workers():
        with pytest.raises(PdxferError):
            await come_back(both, *transfers)
        await until(lambda: len(both.agents["decode"].machine.workers) == 1)

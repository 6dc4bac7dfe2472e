"""A fake agent, a small cache, and clients of both; async tests run under asyncio and uvloop."""

import asyncio

import pytest
import uvloop

from pdxfer import memory
from pdxfer.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient
from pdxfer.layout import page_major
from tests.support.fake_agent import FakeAgent


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class SmallCache:
    """Two layers, 15 usable pages of 4 tokens, in shared memory."""

    def __init__(self, layout=None):
        self.layout = layout or page_major(
            layers=range(2), kv_heads=1, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
        )
        total = sum(region.length_bytes for region in self.layout.regions)
        self.shared = memory.allocate(total)
        offsets = [
            sum(region.length_bytes for region in self.layout.regions[:index])
            for index in range(len(self.layout.regions))
        ]
        self.memory = tuple(
            self.shared.range(offset, region.length_bytes)
            for offset, region in zip(offsets, self.layout.regions, strict=True)
        )


@pytest.fixture
def cache():
    made = SmallCache()
    yield made
    made.shared.close()


@pytest.fixture
def prefill_agent(tmp_path):
    with FakeAgent(tmp_path / "prefill.sock", "prefill") as agent:
        yield agent


@pytest.fixture
def decode_agent(tmp_path):
    with FakeAgent(tmp_path / "decode.sock", "decode") as agent:
        yield agent


@pytest.fixture
def prefill(prefill_agent, cache):
    with PrefillClient(prefill_agent.socket_path, cache) as client:
        yield client


@pytest.fixture
def decode(decode_agent, cache):
    with DecodeClient(decode_agent.socket_path, cache) as client:
        yield client


@pytest.fixture
async def async_prefill(prefill_agent, cache):
    async with AsyncPrefillClient(prefill_agent.socket_path, cache) as client:
        yield client


@pytest.fixture
async def async_decode(decode_agent, cache):
    async with AsyncDecodeClient(decode_agent.socket_path, cache) as client:
        yield client

"""Pools that an engine made, on both sides of a transfer between embedded agents."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer import embedded  # noqa: E402
from pdxfer.client import DecodeClient, PrefillClient  # noqa: E402
from pdxfer.pool import EnginePool  # noqa: E402
from tests.unit.pool.test_engine_pools import hnd, two_halves, unified  # noqa: E402


def by_slot(pool, layer):
    k, v = pool.k_buffer[layer], pool.v_buffer[layer]
    if k.ndim == 4:
        k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (k, v))
    return torch.cat([k, v], dim=2).contiguous().view(torch.uint8)


@pytest.mark.parametrize("there", [two_halves, hnd, unified])
def test_an_engines_pool_is_the_cache_of_a_client(there):
    theirs, others = two_halves(), there()
    source, destination = EnginePool(theirs), EnginePool(others)
    for tensor in (*others.k_buffer, *others.v_buffer):
        tensor.zero_()
    with (
        embedded.prefill_agent() as prefill_agent,
        embedded.decode_agent() as decode_agent,
        PrefillClient(prefill_agent, source, relayout="allow") as prefill,
        DecodeClient(decode_agent, destination, relayout="allow") as decode,
    ):
        receiving = decode.receive(7, prefill.addresses, [3, 5], tokens=8)
        prefill.send(7, [6, 2], tokens=8)
        receiving.wait(timeout_s=30.0)
    for layer in range(3):
        given, got = by_slot(theirs, layer), by_slot(others, layer)
        assert torch.equal(got[12:16], given[24:28])
        assert torch.equal(got[20:24], given[8:12])
        assert not got[:12].any()
        assert not got[24:].any()

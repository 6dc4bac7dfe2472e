"""A request of more than a million pages, from the machine of one side to that of the other."""

import numpy as np
import pytest

from pdxfer.layout import Pages, token_major
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.state import State
from tests.support.cluster import ADDRESS, Cluster

PAGES = (1 << 20) + 4_097


@pytest.mark.parametrize("scattered", [False, True])
def test_more_than_a_million_pages_are_placed(scattered):
    layout = token_major(
        layers=[0], kv_heads=1, head_dim=1, page_size=1, pages=PAGES + 1, dtype="float8_e4m3fn"
    )
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout)
    decode.attach(0, layout)
    cluster.join(decode, prefill)
    cluster.run()
    now = cluster.now
    source = np.arange(1, PAGES + 1)
    destination = source[::-1].copy() if scattered else source
    receiving = decode.machine.receive(0, 7, 0, (ADDRESS,), deadline=now + 60, now=now)
    decode.machine.place(0, 0, GivenPlaces({"full": Pages(destination)}, PAGES, 0), now=now)
    decode.pump()
    sending = prefill.machine.open(0, 7, 0, deadline=now + 60, lease_s=30.0)
    prefill.pump()
    cluster.run()
    assert sending.state is receiving.state is State.READY
    [leg] = sending.legs.values()
    assert np.array_equal(leg.pages["full"].ids, destination)
    if scattered:
        return  # a million writes, one by one, are for the lanes' own tests
    pages = {"full": Pages(source)}
    prefill.machine.send(0, 0, GivenChunk(pages, tokens=PAGES))
    prefill.pump()
    cluster.run()
    assert receiving.state is State.COMMITTED
    for given, region in zip(prefill.memory[0], decode.memory[0], strict=True):
        assert np.array_equal(region[1:], given[1:])

"""An engine's own tensors at a daemon: adopted where they are, or made in a memfd."""

import mmap
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.client import DecodeClient, PrefillClient  # noqa: E402
from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.launch.daemons import DaemonPair  # noqa: E402
from pdxfer.memory.tensors import shared_tensors  # noqa: E402
from tests.support.caches import SeededCache, expect, small, small_token_major  # noqa: E402

pytestmark = pytest.mark.ucx
PAGE = mmap.PAGESIZE
WAIT_S = 20
TOKENS = 75
SOURCE_PAGES = np.array([9, 3, 12, 30, 7])
DESTINATION_PAGES = np.array([5, 40, 2, 33, 21])


class EngineCache(SeededCache):
    """A region a tensor; the bytes are seen through the tensors."""

    def __init__(self, layout, tensors, ranges):
        self.layout, self.memory = layout, ranges
        self.regions = [tensor.numpy() for tensor in tensors]


def engine_tensors(layout):
    """What an engine's code would make, without a word of shared memory."""
    tensors = [torch.zeros(region.length_bytes, dtype=torch.uint8) for region in layout.regions]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index + 1)
    return tensors


def adopted(tensor):
    """The range of a tensor after the pages that it lies in were adopted."""
    first = tensor.data_ptr() // PAGE * PAGE
    end = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE) * PAGE
    shared = memory.adopt(first, end - first, owner=tensor)
    return shared.range(tensor.data_ptr() - first, tensor.nbytes)


def crosses(daemons, cache):
    """One request into the cache by daemons: every byte of it is as it must be."""
    source, before = SeededCache(cache.layout, 1), cache.snapshot()
    with (
        PrefillClient(daemons.prefill.socket, source) as sender,
        DecodeClient(daemons.decode.socket, cache) as receiver,
    ):
        receiving = receiver.receive(1, sender.addresses, DESTINATION_PAGES, tokens=TOKENS)
        sender.send(1, SOURCE_PAGES, tokens=TOKENS)
        receiving.wait(WAIT_S)
        expect(source, cache, before, SOURCE_PAGES, DESTINATION_PAGES, TOKENS)


@pytest.fixture(scope="module")
def daemons():
    with DaemonPair("tcp") as pair:
        yield pair


def test_a_daemon_receives_into_a_plain_torch_tensor_that_was_adopted(daemons):
    layout = small(pages=2560)  # 40 MiB: glibc gives more than 32 MiB a mapping of its own,
    taken = []  # where its heap has no free piece of that size
    while _in_heap(tensor := engine_tensors(layout)[0]):
        taken.append(tensor)
        assert len(taken) < 40
    place = tensor.data_ptr()
    crosses(daemons, EngineCache(layout, [tensor], [adopted(tensor)]))
    assert tensor.data_ptr() == place


def _in_heap(tensor):
    lines = Path("/proc/self/maps").read_text().splitlines()
    parts = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return any(int(first, 16) <= tensor.data_ptr() < int(end, 16) for first, end in parts)


@pytest.mark.parametrize("layout", [small, small_token_major])
def test_a_daemon_receives_into_tensors_made_in_a_memfd(daemons, layout):
    layout = layout()
    with shared_tensors() as made:
        tensors = engine_tensors(layout)
    crosses(daemons, EngineCache(layout, tensors, made.ranges(tensors)))


def test_without_either_a_daemon_refuses_the_tensor_by_remedy(daemons):
    layout = small()
    [tensor] = engine_tensors(layout)
    part = memory.MemoryRange(tensor.data_ptr(), tensor.nbytes, tensor)
    text = r"not in a memfd.*pdxfer\.memory\.adopt"
    with pytest.raises(ConfigError, match=text):
        DecodeClient(daemons.decode.socket, EngineCache(layout, [tensor], [part]))

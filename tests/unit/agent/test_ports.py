"""What an agent maps of the memory that a worker hands over."""

import fcntl
import os
from types import SimpleNamespace

import pytest

from pdxfer import memory
from pdxfer.agent.ports import WorkerPort
from pdxfer.errors import ConfigError
from pdxfer.layout import page_major
from pdxfer.local.messages import AttachWorker, MemoryInfo
from pdxfer.wire.messages import RankInfo

LAYOUT = page_major(
    layers=range(2), kv_heads=2, head_dim=8, page_size=4, pages=16, dtype="bfloat16"
)
NEEDED = LAYOUT.regions[0].length_bytes
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def port():
    port = WorkerPort(SimpleNamespace(pid=-1), os.urandom(16))
    yield port
    port.release_memory()
    port.close()


def attach(port, fd, *, length_bytes=NEEDED, offset_bytes=0):
    message = AttachWorker(
        instance="",
        rank=RankInfo(tp=0, tp_size=1),
        layout=LAYOUT.to_wire(),
        relayout="",
        ignore_parts=[],
        memory=[
            MemoryInfo(
                kind="memfd", length_bytes=length_bytes, offset_bytes=offset_bytes, fd_index=0
            )
        ],
    )
    return port.attach(0, message, [fd])


@pytest.fixture
def sparse():
    """32 TiB, of which the first half MiB is there."""
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 32 << 40)
    os.pwrite(fd, b"x" * (1 << 19), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    yield fd
    os.close(fd)


def test_only_what_the_layout_uses_of_a_memfd_is_mapped(port, sparse):
    worker = attach(port, sparse, length_bytes=32 << 40)
    [mapped] = port._mapped.values()
    assert mapped.length_bytes == NEEDED
    assert [region.length_bytes for region in worker.regions] == [NEEDED]


def test_a_layout_in_the_hole_of_a_sparse_memfd_is_refused(port, sparse):
    with pytest.raises(ConfigError, match="the cache's memfd is sparse"):
        attach(port, sparse, offset_bytes=31 << 40)
    assert port._mapped == {}


def test_a_layout_at_an_offset_is_mapped_up_to_its_end(port):
    with memory.allocate(4 * NEEDED) as shared:
        worker = attach(port, shared.fd, offset_bytes=NEEDED)
        [mapped] = port._mapped.values()
        assert mapped.length_bytes == 2 * NEEDED
        assert worker.regions[0].address == mapped.address + NEEDED


@pytest.mark.parametrize(
    ("length_bytes", "offset_bytes"), [(NEEDED - 1, 0), (NEEDED, -1), (NEEDED, 1 << 62)]
)
def test_memory_that_the_layout_does_not_fit_in_is_refused(port, length_bytes, offset_bytes):
    with memory.allocate(NEEDED) as shared, pytest.raises(ConfigError, match="layout needs"):
        attach(port, shared.fd, length_bytes=length_bytes, offset_bytes=offset_bytes)
    assert port._mapped == {}

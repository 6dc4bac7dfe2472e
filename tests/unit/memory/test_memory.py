"""Shared memory: sealed, present, never closed under an array."""

import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from pdxfer import limits, memory
from pdxfer.errors import ConfigError, ResourceError


def sealed_fd(length, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def test_has_the_exact_length_and_zero_bytes():
    with memory.allocate(6912) as shared:
        assert shared.length_bytes == len(shared.buffer) == os.fstat(shared.fd).st_size == 6912
        assert bytes(shared.buffer) == bytes(6912)
        assert shared.address == np.frombuffer(shared.buffer, np.uint8).ctypes.data


@pytest.mark.parametrize("resize", [1, 4096 * 3])
def test_size_is_sealed(resize):
    with memory.allocate(8192) as shared, pytest.raises(PermissionError):
        os.ftruncate(shared.fd, resize)


def test_seals_cannot_be_added_later():
    with memory.allocate(8192) as shared, pytest.raises(PermissionError):
        fcntl.fcntl(shared.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_every_page_is_present_and_progress_is_told_in_slices(monkeypatch):
    monkeypatch.setattr(limits, "PREFAULT_SLICE_BYTES", 2 * mmap.PAGESIZE)
    told = []
    length = 5 * mmap.PAGESIZE
    with memory.allocate(length, progress=lambda done, total: told.append((done, total))) as shared:
        assert told == [(2 * 4096, length), (4 * 4096, length), (length, length)]
        # Blocks of the file, not of the mapping: memory is really there, not only promised.
        assert os.fstat(shared.fd).st_blocks * 512 == length


def test_older_kernel_is_prefaulted_by_writing(monkeypatch):
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    with memory.allocate(3 * mmap.PAGESIZE) as shared:
        assert os.fstat(shared.fd).st_blocks * 512 == 3 * mmap.PAGESIZE


def test_is_not_inherited_by_fork():
    with memory.allocate(4096) as shared:
        smaps = Path("/proc/self/smaps").read_text()
        block = smaps[smaps.index(f"{shared.address:x}-") :].split("VmFlags:")[1].split("\n")[0]
        assert "dc" in block.split()


@pytest.mark.parametrize("length", [0, -1])
def test_refuses_an_empty_length(length):
    with pytest.raises(ConfigError, match=f"length_bytes={length}"):
        memory.allocate(length)


def test_too_much_memory_is_a_typed_error_and_leaves_nothing():
    before = open_fds()
    with pytest.raises(ResourceError, match="length_bytes="):
        memory.allocate(1 << 62)
    assert open_fds() == before


def test_failing_progress_leaves_nothing():
    before = open_fds()

    def fail(done, total):
        raise KeyError(done)

    with pytest.raises(KeyError):
        memory.allocate(4096, progress=fail)
    assert open_fds() == before


def test_close_under_an_array_raises_and_changes_nothing():
    shared = memory.allocate(4096)
    array = np.frombuffer(shared.buffer, np.uint8)
    with pytest.raises(BufferError):
        shared.close()
    array[7] = 3
    assert shared.buffer[7] == 3
    assert os.fstat(shared.fd).st_size == 4096
    del array
    shared.close()
    shared.close()
    assert shared.fd == -1


def test_close_under_a_tensor_raises_and_the_tensor_stays_good():
    torch = pytest.importorskip("torch")
    shared = memory.allocate(4096)
    tensor = torch.from_numpy(np.frombuffer(shared.buffer, np.uint8)).view(torch.bfloat16)[8:]
    with pytest.raises(BufferError):
        shared.close()
    tensor.fill_(1.5)
    assert tensor.sum() == 1.5 * 2040
    del tensor
    shared.close()


def test_an_array_outlives_its_memory_object():
    shared = memory.allocate(4096)
    array = np.frombuffer(shared.buffer, np.uint8)
    before = open_fds()
    del shared
    gc.collect()
    array[:] = 5
    assert array.sum() == 5 * 4096
    assert len(open_fds()) == len(before) - 1


def test_range_tells_address_and_offset():
    with memory.allocate(4096) as shared:
        part = shared.range(1024, 512)
        assert part == memory.MemoryRange(shared.address + 1024, 512, shared, shared.fd, 1024)
        assert shared.range().length_bytes == 4096


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 2), (0, 4097), (4096, None), (5, 0), (1, 4096)]
)
def test_range_outside_is_refused(offset, length):
    with memory.allocate(4096) as shared, pytest.raises(ConfigError, match="4096 bytes"):
        shared.range(offset, length)


def test_both_mappings_are_the_same_memory():
    with memory.allocate(8192) as worker:
        with memory.map_sealed(worker.fd, 8192) as agent:
            assert agent.fd != worker.fd
            worker.buffer[8191] = 77
            assert agent.buffer[8191] == 77
            agent.buffer[0] = 78
            assert worker.buffer[0] == 78
        assert os.fstat(worker.fd).st_size == 8192


def test_agents_mapping_outlives_the_workers():
    worker = memory.allocate(4096)
    agent = memory.map_sealed(worker.fd, 4096)
    worker.close()
    agent.buffer[1] = 1
    agent.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_map_refuses_missing_seals(seals):
    fd = sealed_fd(4096, seals)
    try:
        with pytest.raises(
            ConfigError, match=r"seals=.*pdxfer\.memory\.allocate.*pdxfer\.embedded"
        ):
            memory.map_sealed(fd, 4096)
    finally:
        os.close(fd)


def test_map_refuses_what_is_no_memfd(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(4096))
    with plain.open("r+b") as file, pytest.raises(ConfigError, match=r"memory\.allocate"):
        memory.map_sealed(file.fileno(), 4096)
    reader, writer = os.pipe()
    try:
        with pytest.raises(ConfigError, match="memfd"):
            memory.map_sealed(reader, 4096)
    finally:
        os.close(reader)
        os.close(writer)


def test_map_refuses_a_size_that_is_not_there():
    with memory.allocate(4096) as shared:
        for length in (4097, 0, -5):
            with pytest.raises(ConfigError, match=f"4096 bytes, the layout needs {length}"):
                memory.map_sealed(shared.fd, length)


def test_map_refuses_memory_sealed_against_writing():
    fd = sealed_fd(4096, 0xF)
    try:
        with pytest.raises(ConfigError, match="writable"):
            memory.map_sealed(fd, 4096)
    finally:
        os.close(fd)

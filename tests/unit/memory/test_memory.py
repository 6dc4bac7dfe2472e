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
from pdxfer.memory import available
from pdxfer.memory import shared as shared_memory


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
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 9999)
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


@pytest.mark.parametrize("length", [1 << 63, 1 << 64, 1 << 200])
def test_lengths_beyond_any_file_are_typed_too(length):
    with pytest.raises(ResourceError, match=f"length_bytes={length}: cannot allocate"):
        memory.allocate(length)


@pytest.mark.parametrize("length", [True, False, np.bool_(True), 4096.0, "4096", b"1"])
def test_lengths_that_are_no_ints_are_refused(length):
    with memory.allocate(8192) as shared:
        for call in (
            lambda: memory.allocate(length),
            lambda: memory.map_sealed(shared.fd, length),
            lambda: shared.range(0, length),
            lambda: shared.range(length, 1),
        ):
            with pytest.raises(ConfigError, match=r"_bytes=.* is no (whole )?number of bytes"):
                call()


def test_lengths_of_numpy_are_taken():
    with memory.allocate(np.int64(8192)) as shared, memory.map_sealed(shared.fd, np.uint32(4096)):
        part = shared.range(np.int32(8), np.int16(16))
        assert (part.offset_bytes, part.length_bytes) == (8, 16)
        assert type(part.length_bytes) is int


class TestAvailable:
    @pytest.fixture
    def kernel(self, tmp_path, monkeypatch):
        """Stands for /proc and the cgroup hierarchy: (own cgroup, files by folder)."""

        def says(meminfo, own="", groups=None):
            (tmp_path / "meminfo").write_text(meminfo)
            (tmp_path / "own").write_text(own)
            for folder, files in (groups or {}).items():
                (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
                for name, text in files.items():
                    (tmp_path / "groups" / folder / f"memory.{name}").write_text(text)
            monkeypatch.setattr(available, "_MEMINFO", tmp_path / "meminfo")
            monkeypatch.setattr(available, "_OWN_CGROUP", tmp_path / "own")
            monkeypatch.setattr(available, "_CGROUPS", tmp_path / "groups")

        return says

    def test_the_kernel_says_what_is_available(self):
        assert 1 << 20 < memory.available_bytes() < 1 << 50

    def test_more_is_refused_before_anything_is_made(self, monkeypatch):
        monkeypatch.setattr(available, "available_bytes", lambda: 8191)
        monkeypatch.setattr(os, "memfd_create", None)
        with pytest.raises(ResourceError) as raised:
            memory.allocate(8192)
        assert str(raised.value) == (
            "length_bytes=8192: cannot allocate shared memory: 8192 bytes are needed, 8191 are "
            "available. Make the cache smaller, end what else uses memory, or raise the memory "
            "limit of the container"
        )
        assert raised.value.fields == {"length_bytes": "8192", "available_bytes": "8191"}

    def test_all_there_is_may_be_taken(self, monkeypatch):
        monkeypatch.setattr(available, "available_bytes", lambda: 8192)
        memory.allocate(8192).close()

    def test_of_the_host(self, kernel):
        kernel("MemTotal: 9 kB\nMemAvailable:    5 kB\nSwapFree: 7 kB\n")
        assert memory.available_bytes() == 5 * 1024

    def test_of_the_tightest_cgroup_around(self, kernel):
        files = {"current": "900", "stat": "anon 5\ninactive_file 30\nactive_file 4\nshmem 77\n"}
        groups = {
            "": {"current": "1"},
            "pod": {"max": "1000\n", **files},
            "pod/worker": {"max": "max\n", **files},
            "other": {"max": "1\n", **files},
        }
        kernel("MemAvailable: 5 kB\n", "4:memory:/v1\n0::/pod/worker\n", groups)
        assert memory.available_bytes() == 1000 - 900 + 34

    def test_a_limit_that_is_passed_leaves_nothing(self, kernel):
        files = {"max": "800\n", "current": "900", "stat": "inactive_file 30\n"}
        kernel("MemAvailable: 5 kB\n", "0::/\n", {"": files})
        assert memory.available_bytes() == 0

    def test_without_cgroups_of_version_2_the_host_decides(self, kernel):
        kernel("MemAvailable: 5 kB\n", "4:memory:/other\n0::/../there\n")
        assert memory.available_bytes() == 5 * 1024

    def test_a_kernel_that_does_not_say(self, kernel, tmp_path, monkeypatch):
        kernel("MemTotal: 9 kB\n")
        with pytest.raises(ConfigError, match="does not say how much memory is available"):
            memory.allocate(1)
        monkeypatch.setattr(available, "_MEMINFO", tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
            memory.allocate(1)
        monkeypatch.setattr(available, "_OWN_CGROUP", tmp_path / "nowhere")
        assert list(available._cgroups_available_bytes()) == []


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


def test_a_sparse_memfd_of_32_tib_is_refused_by_what_is_present_of_it():
    fd = sealed_fd(32 << 40, shared_memory.SEALS)
    try:
        with pytest.raises(ConfigError, match="is sparse: 0 bytes of it are present") as raised:
            memory.map_sealed(fd, 32 << 40)
        assert raised.value.fields == {"present_bytes": "0", "needed_bytes": str(32 << 40)}
    finally:
        os.close(fd)


def test_map_refuses_memory_sealed_against_writing():
    fd = sealed_fd(4096, 0)
    os.pwrite(fd, bytes(4096), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)
    try:
        with pytest.raises(ConfigError, match="writable"):
            memory.map_sealed(fd, 4096)
    finally:
        os.close(fd)

"""A memfd put under memory that exists: contents stay, and what may not be shared is refused."""

import ctypes
import faulthandler
import gc
import mmap
import os
import signal
import weakref

import numpy as np
import pytest

from pdxfer import memory
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.memory import adopted, available
from pdxfer.memory.mappings import flags_of, mappings

PAGE = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Anonymous:
    """Pages of one private anonymous mapping, with a wall of no access on either side."""

    def __init__(self, pages):
        whole = np.frombuffer(mmap.mmap(-1, (pages + 2) * PAGE, PRIVATE), np.uint8)
        self.bytes = whole[PAGE:-PAGE]
        self.address = self.bytes.ctypes.data
        self.length_bytes = pages * PAGE
        for wall in (whole[:PAGE], whole[-PAGE:]):
            protect(wall.ctypes.data, PAGE, mmap.PROT_READ)
        self.bytes[:] = np.random.default_rng(pages).integers(0, 256, self.length_bytes)


def libc(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def protect(address, length_bytes, access):
    libc("mprotect", ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), access)


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def refused(address, length_bytes, *words):
    """It is refused by these words, and nothing has changed."""
    before, fds = list(mappings(0)), open_fds()
    with pytest.raises(ConfigError) as raised:
        memory.adopt(address, length_bytes)
    for word in words:
        assert word in str(raised.value)
    found = [mapping for mapping in mappings(0) if mapping.first <= address < mapping.end]
    assert found == [each for each in before if each.first <= address < each.end]
    assert open_fds() == fds


def in_child(function):
    """How a forked child ended that calls `function`: its exit code, or minus its signal."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_contents_and_address_stay_and_the_agent_sees_what_is_written():
    pages = Anonymous(5)
    before = pages.bytes.copy()
    with memory.adopt(pages.address, pages.length_bytes) as shared:
        assert (shared.address, shared.length_bytes) == (pages.address, pages.length_bytes)
        np.testing.assert_array_equal(pages.bytes, before)
        with memory.map_sealed(shared.fd, shared.length_bytes) as agent:
            seen = np.frombuffer(agent.buffer, np.uint8)
            np.testing.assert_array_equal(seen, before)
            seen[PAGE + 3] = 200
            pages.bytes[2 * PAGE] = 201
            assert (pages.bytes[PAGE + 3], seen[2 * PAGE]) == (200, 201)
            del seen
        part = shared.range(64, PAGE)
        assert (part.address, part.offset_bytes, part.fd) == (pages.address + 64, 64, shared.fd)


def test_pages_beside_what_is_adopted_are_not_touched():
    pages = Anonymous(5)
    before = pages.bytes.copy()
    with memory.adopt(pages.address + PAGE, 2 * PAGE) as shared:
        end = pages.address + 5 * PAGE
        found = [(each.first, each.mode) for each in mappings(pages.address) if each.first < end]
        assert found == [
            (pages.address, "rw-p"),
            (pages.address + PAGE, "rw-s"),
            (pages.address + 3 * PAGE, "rw-p"),
        ]
        np.testing.assert_array_equal(pages.bytes, before)
        assert os.fstat(shared.fd).st_blocks * 512 == 2 * PAGE


def test_numbers_of_numpy_are_taken():
    pages = Anonymous(1)
    memory.adopt(np.uint64(pages.address), np.int32(PAGE)).close()


def test_a_closed_or_forgotten_result_leaves_the_memory_where_it_is():
    pages = Anonymous(2)
    before = pages.bytes.copy()
    fds = open_fds()
    shared = memory.adopt(pages.address, pages.length_bytes)
    shared.close()
    shared.close()
    assert shared.fd == -1
    assert open_fds() == fds
    del shared
    gc.collect()
    np.testing.assert_array_equal(pages.bytes, before)
    pages.bytes[:] = 7


def test_the_owner_lives_as_long_as_a_range():
    class Owner:
        pass

    pages, alive = Anonymous(1), []
    owner = Owner()
    weakly = weakref.ref(owner, alive.append)
    part = memory.adopt(pages.address, PAGE, owner=owner).range()
    del owner
    gc.collect()
    assert weakly() is not None
    del part
    gc.collect()
    assert weakly() is None


def test_memory_that_was_never_touched_is_present_afterwards():
    length = 64 * PAGE
    raw = mmap.mmap(-1, length, PRIVATE)
    address = np.frombuffer(raw, np.uint8).ctypes.data
    with memory.adopt(address, length) as shared:
        assert os.fstat(shared.fd).st_blocks * 512 == length
        assert bytes(raw) == bytes(length)


def test_a_child_forked_before_keeps_its_own_contents():
    pages = Anonymous(2)
    pages.bytes[0] = 1
    go_reader, go_writer = os.pipe()

    def child():
        os.read(go_reader, 1)
        same = pages.bytes[0] == 1
        pages.bytes[1] = 99
        os._exit(0 if same else 1)

    pid = os.fork()
    if pid == 0:
        child()
    pages.bytes[1] = 5
    shared = memory.adopt(pages.address, pages.length_bytes)
    pages.bytes[0] = 2
    os.write(go_writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pages.bytes[1] == 5
    shared.close()
    os.close(go_reader)
    os.close(go_writer)


def test_a_child_forked_later_faults_where_it_touches_it():
    pages = Anonymous(2)
    with memory.adopt(pages.address, pages.length_bytes):
        assert in_child(lambda: ctypes.memset(pages.address, 1, 1)) == -signal.SIGSEGV
        assert in_child(lambda: None) == 0
        assert "dc" in flags_of(pages.address)
    assert pages.bytes[0] != 1 or pages.bytes[1] != 1


@pytest.mark.parametrize("off", [1, 64, PAGE - 1])
def test_an_address_inside_a_page_is_refused(off):
    pages = Anonymous(3)
    refused(
        pages.address + off,
        PAGE,
        f"address={pages.address + off:#x} is not the start of a page",
        f"The next one starts at {pages.address + PAGE:#x}",
    )


@pytest.mark.parametrize("length", [0, -PAGE, 1, PAGE + 1])
def test_a_length_that_is_no_whole_pages_is_refused(length):
    refused(Anonymous(2).address, length, f"length_bytes={length} is no whole number of pages")


@pytest.mark.parametrize("address", [0, -PAGE])
def test_an_address_that_no_memory_has_is_refused(address):
    refused(address, PAGE, f"address={address:#x} is not the start of a page")


@pytest.mark.parametrize("value", [True, 4096.0, "4096", None])
def test_numbers_that_are_no_ints_are_refused(value):
    pages = Anonymous(1)
    for call in (lambda: memory.adopt(value, PAGE), lambda: memory.adopt(pages.address, value)):
        with pytest.raises(ConfigError, match=r"no (whole )?number of bytes"):
            call()


def test_a_mapping_of_a_file_is_refused(tmp_path):
    path = tmp_path / "cache"
    path.write_bytes(bytes(PAGE))
    with path.open("r+b") as file:
        array = np.frombuffer(mmap.mmap(file.fileno(), PAGE, mmap.MAP_PRIVATE), np.uint8)
    refused(array.ctypes.data, PAGE, f"a mapping of the file {path}", "pdxfer.memory.allocate")


@pytest.mark.parametrize("kind", ["anonymous", "memfd"])
def test_a_shared_mapping_is_refused(kind):
    made = memory.allocate(PAGE).buffer if kind == "memfd" else mmap.mmap(-1, PAGE)
    refused(np.frombuffer(made, np.uint8).ctypes.data, PAGE, "a shared mapping", "already")


def test_what_is_adopted_already_is_refused():
    pages = Anonymous(1)
    with memory.adopt(pages.address, PAGE):
        refused(pages.address, PAGE, "a shared mapping (/memfd:pdxfer (deleted)) already")


def test_locked_memory_is_refused():
    pages = Anonymous(3)
    place = (ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.length_bytes))
    libc("mlock", *place)
    refused(pages.address, pages.length_bytes, "it is locked (adopt it first, then lock it)")
    libc("munlock", *place)
    memory.adopt(pages.address, pages.length_bytes).close()


def test_what_is_kept_from_children_as_registered_memory_is_refused():
    pages = Anonymous(1)
    place = ctypes.c_void_p(pages.address), ctypes.c_size_t(PAGE)
    libc("madvise", *place, mmap.MADV_DONTFORK)
    refused(pages.address, PAGE, "as what a device has registered is")


def test_a_flag_of_the_kernel_that_is_not_known_is_refused():
    pages = Anonymous(1)
    libc("madvise", ctypes.c_void_p(pages.address), ctypes.c_size_t(PAGE), 18)  # WIPEONFORK
    refused(pages.address, PAGE, "the kernel marks it wf (VmFlags)")


def test_a_hole_is_refused():
    pages = Anonymous(3)
    libc("munmap", ctypes.c_void_p(pages.address + PAGE), ctypes.c_size_t(PAGE))
    refused(pages.address, 3 * PAGE, f"ends at {pages.address + PAGE:#x}, {2 * PAGE} bytes short")
    refused(pages.address + PAGE, PAGE, f"nothing is mapped at {pages.address + PAGE:#x}")


@pytest.mark.parametrize("access", [mmap.PROT_READ, 7], ids=["r--", "rwx"])
def test_several_mappings_are_refused(access):
    pages = Anonymous(3)
    protect(pages.address + PAGE, PAGE, access)
    refused(pages.address, 3 * PAGE, f"ends at {pages.address + PAGE:#x}")
    refused(pages.address + PAGE, PAGE, "not rw-")


def test_more_than_the_mapping_has_is_refused():
    pages = Anonymous(2)
    refused(pages.address, 3 * PAGE, f"ends at {pages.address + 2 * PAGE:#x}, {PAGE} bytes short")


@pytest.mark.parametrize("name", ["[heap]", "[stack]"])
def test_memory_that_is_given_out_again_is_refused(name):
    place = next(mapping for mapping in mappings(0) if mapping.name == name)
    refused(place.end - PAGE, PAGE, f"it lies in {name}")


def test_too_little_memory_is_a_typed_error_and_changes_nothing(monkeypatch):
    pages, fds = Anonymous(2), open_fds()
    monkeypatch.setattr(available, "available_bytes", lambda: PAGE)
    with pytest.raises(ResourceError, match="8192 bytes are needed, 4096 are available"):
        memory.adopt(pages.address, pages.length_bytes)
    assert open_fds() == fds


@pytest.mark.parametrize("step", ["_fill", "_put_under"])
def test_a_step_that_fails_changes_nothing(monkeypatch, step):
    pages, fds = Anonymous(2), open_fds()
    before = pages.bytes.copy()

    def fails(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(adopted, step, fails)
    with pytest.raises(ResourceError, match="cannot put shared memory there: Cannot allocate"):
        memory.adopt(pages.address, pages.length_bytes)
    assert open_fds() == fds
    np.testing.assert_array_equal(pages.bytes, before)
    assert next(mappings(pages.address)).mode == "rw-p"


def test_a_page_that_goes_away_meanwhile_is_an_error(monkeypatch):
    pages = Anonymous(3)
    monkeypatch.setattr(adopted, "_check_mapping", lambda *_: None)
    libc("munmap", ctypes.c_void_p(pages.address + PAGE), ctypes.c_size_t(PAGE))
    refused(pages.address, 3 * PAGE, "a page of it cannot be read")


def test_a_torch_tensor_is_adopted_and_stays_the_same_tensor():
    torch = pytest.importorskip("torch")
    # Larger than what glibc ever takes from its heap (32 MiB).
    tensor = torch.arange(10 << 20, dtype=torch.int32)
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // PAGE * PAGE
    with memory.adopt(first, length, owner=tensor) as shared:
        assert torch.equal(tensor, torch.arange(10 << 20, dtype=torch.int32))
        with memory.map_sealed(shared.fd, length) as agent:
            offset = tensor.data_ptr() + 4 * 50_000 - first
            np.frombuffer(agent.buffer, np.int32, 1, offset)[0] = -5
        assert tensor[50_000] == -5
    del tensor, shared
    gc.collect()
    torch.empty(1 << 22).fill_(1)

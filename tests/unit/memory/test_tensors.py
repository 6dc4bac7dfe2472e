"""Tensors that lie in a memfd from the start: what is made so, and what is left to torch."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from pdxfer import memory  # noqa: E402
from pdxfer.errors import ConfigError, ResourceError  # noqa: E402
from pdxfer.memory import available  # noqa: E402
from pdxfer.memory import tensors as memory_tensors  # noqa: E402
from pdxfer.memory.mappings import flags_of  # noqa: E402
from pdxfer.memory.tensors import shared_tensors  # noqa: E402

PAGE = mmap.PAGESIZE
LIKE = torch.arange(24, dtype=torch.float16).reshape(2, 3, 4).permute(2, 0, 1)
MAKERS = {
    "empty": lambda: torch.empty(3, 5),
    "empty_strided": lambda: torch.empty_strided((3, 5), (7, 1), dtype=torch.int16),
    "zeros": lambda: torch.zeros((2, 1000), dtype=torch.bfloat16),
    "zeros_of_one_byte": lambda: torch.zeros(5, dtype=torch.float8_e4m3fn),
    "ones": lambda: torch.ones(4, dtype=torch.int64),
    "full": lambda: torch.full((2, 2), 7),
    "full_of_halves": lambda: torch.full((2, 2), fill_value=0.5, dtype=torch.float64),
    "new_empty": lambda: LIKE.new_empty((3,)),
    "new_empty_strided": lambda: LIKE.new_empty_strided((3, 2), (1, 3)),
    "new_zeros": lambda: LIKE.new_zeros((3, 2), dtype=torch.uint8),
    "new_ones": lambda: LIKE.new_ones((3,)),
    "new_full": lambda: LIKE.new_full((3,), 9),
    "empty_like": lambda: torch.empty_like(LIKE),
    "zeros_like": lambda: torch.zeros_like(LIKE),
    "ones_like": lambda: torch.ones_like(LIKE, dtype=torch.bool),
    "full_like": lambda: torch.full_like(LIKE, -2),
    "a_scalar": lambda: torch.zeros(()),
    "named_device": lambda: torch.zeros(3, device="cpu"),
    "pinned_not": lambda: torch.zeros(3, pin_memory=False),
}


def agent_sees(made):
    """All bytes of the memfd, as a daemon maps them."""
    with memory.map_sealed(made.fd, made.length_bytes) as mapped:
        return bytes(mapped.buffer)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_made_in_shared_memory_as_torch_makes_it(make):
    plain = make()
    with shared_tensors() as made:
        tensor = make()
    assert tensor.dtype == plain.dtype
    assert (tensor.shape, tensor.stride()) == (plain.shape, plain.stride())
    if "empty" not in str(make.__code__.co_names):
        assert torch.equal(tensor.float(), plain.float())
    part = made.range(tensor)
    assert (part.address, part.fd) == (tensor.data_ptr(), made.fd)
    tensor.fill_(1)
    seen = agent_sees(made)[part.offset_bytes : part.offset_bytes + part.length_bytes]
    assert seen == ctypes.string_at(part.address, part.length_bytes)
    assert any(seen)


def test_all_lie_in_one_sealed_memfd_each_in_pages_of_its_own():
    with shared_tensors() as made:
        tensors = [torch.zeros(PAGE + 1, dtype=torch.uint8), torch.full((2, 2), 5), torch.zeros(9)]
    ranges = made.ranges(tensors)
    assert [part.offset_bytes for part in ranges] == [0, 2 * PAGE, 3 * PAGE]
    assert [part.length_bytes for part in ranges] == [PAGE + 1, 32, 36]
    assert os.fstat(made.fd).st_size == made.length_bytes == 4 * PAGE
    assert os.fstat(made.fd).st_blocks * 512 == 4 * PAGE
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, PAGE)
    assert "dc" in flags_of(ranges[0].address)


def test_a_view_lies_where_its_tensor_does():
    with shared_tensors() as made:
        whole = torch.zeros(4, 8, dtype=torch.int16)
    part, inner = made.range(whole), made.range(whole[1:3, 2:])
    assert inner.address == part.address + 2 * 10
    assert (inner.offset_bytes, inner.length_bytes) == (20, 2 * 14)


def test_what_is_not_made_anew_on_the_host_is_left_to_torch():
    with shared_tensors() as made:
        shared = torch.zeros(8)
        others = [
            torch.arange(8),
            torch.tensor([1.0, 2.0]),
            shared + 1,
            shared.clone(),
            torch.zeros(8, device="meta"),
            torch.zeros(0),
        ]
    assert made.length_bytes == PAGE
    for other in [*others, torch.zeros(8)]:
        with pytest.raises(ConfigError, match=r"does not lie in this shared memory.*memory\.adopt"):
            made.range(other)


def test_other_threads_are_left_to_torch():
    tensors = []
    with shared_tensors() as made:
        thread = threading.Thread(target=lambda: tensors.append(torch.zeros(8)))
        thread.start()
        thread.join()
    assert made.length_bytes == 0
    with pytest.raises(ConfigError, match="does not lie"):
        made.range(tensors[0])


def test_ranges_are_asked_for_behind_the_block():
    with shared_tensors() as made:
        tensor = torch.zeros(8)
        with pytest.raises(ConfigError, match="has not ended"):
            made.range(tensor)
    assert made.range(tensor).length_bytes == 32


def test_a_block_that_fails_is_sealed_and_ends():
    made = tensor = None

    def fails():
        nonlocal made, tensor
        with shared_tensors() as made:
            tensor = torch.zeros(8)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert made.range(tensor).length_bytes == 32
    with pytest.raises(ConfigError, match="does not lie"):
        made.range(torch.zeros(8))


def test_too_little_memory_is_a_typed_error_and_the_rest_stays(monkeypatch):
    with shared_tensors() as made:
        tensor = torch.ones(8)
        monkeypatch.setattr(available, "available_bytes", lambda: 100)
        with pytest.raises(ResourceError, match="400 bytes are needed, 100 are available"):
            torch.zeros(100)
        monkeypatch.undo()

        def fails(*_):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(memory_tensors, "map_present", fails)
        with pytest.raises(ResourceError, match="a tensor of 400 bytes: cannot allocate shared"):
            torch.zeros(100)
    assert torch.equal(tensor, torch.ones(8))
    assert made.length_bytes == os.fstat(made.fd).st_size == PAGE


def test_tensors_outlive_the_block_and_the_memfd_goes_with_the_last_range():
    with shared_tensors() as made:
        tensor = torch.full((1000,), 3)
    fd, part = made.fd, made.range(tensor)
    del made
    gc.collect()
    assert os.fstat(part.fd).st_size == 2 * PAGE
    del part
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert torch.equal(tensor, torch.full((1000,), 3))


def test_memory_loads_no_torch():
    code = "import sys, pdxfer.memory.tensors, pdxfer.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Whether there is a GPU, and why not; errors of CUDA as ours."""

import subprocess
import sys

import numpy as np
import pytest

import pdxfer.cuda.library as loader
from pdxfer.cuda import CudaError, DeviceMemory, Event, Stream, cuda_available, load_cuda
from pdxfer.errors import ConfigError, ResourceError, from_wire
from tests.support.cuda_on_host import HostDevice


@pytest.fixture
def device(monkeypatch):
    device = HostDevice(monkeypatch)
    yield device
    device.restore()


def test_a_device_is_described(device):
    assert cuda_available() == (True, "1 GPU, driver for CUDA 13.1, built with CUDA 13.0")
    device["device_count"] = 8
    assert cuda_available()[1].startswith("8 GPUs")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (35, "no NVIDIA driver, or one older than CUDA 13.0 needs (cudaErrorOfTest, 35)"),
        (100, "no CUDA device is visible (cudaErrorOfTest, 100)"),
        (999, "as the test wants (cudaErrorOfTest, 999)"),
    ],
)
def test_no_driver_and_no_device_are_no_gpu(device, number, reason):
    device["device_count_result"] = number
    assert cuda_available() == (False, f"no GPU: {reason}")
    with pytest.raises(ResourceError, match="no GPU") as caught:
        DeviceMemory(8)
    assert caught.value.fields == {"cuda_error": f"cudaErrorOfTest ({number})"}


def test_a_driver_without_devices_is_no_gpu(device):
    device["device_count"] = 0
    assert cuda_available() == (False, "no GPU: no CUDA device is visible (cudaSuccess, 0)")


def test_a_gpu_that_appears_is_found(device):
    device["device_count_result"] = 100
    assert not cuda_available()[0]
    device["device_count_result"] = 0
    assert cuda_available()[0]
    assert load_cuda() is load_cuda()


def test_a_build_without_the_library_is_no_gpu(monkeypatch):
    monkeypatch.setattr(loader, "_loaded", None)
    monkeypatch.setattr(loader, "_find", lambda: None)
    available, reason = cuda_available()
    assert not available
    assert reason.startswith("no GPU: this build of pdxfer has no libpdx_cuda.so")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_broken_library_is_no_gpu(monkeypatch, tmp_path, content):
    path = tmp_path / loader.LIBRARY_NAME
    path.write_bytes(content)
    monkeypatch.setattr(loader, "_loaded", None)
    monkeypatch.setattr(loader, "_find", lambda: path)
    available, reason = cuda_available()
    assert not available
    assert reason.startswith(f"no GPU: {path} cannot be loaded: ")


def test_another_interface_is_no_gpu(device):
    device["abi_version"] = loader.ABI_VERSION + 1
    available, reason = cuda_available()
    assert not available
    assert "has interface 2, this pdxfer needs 1" in reason


def test_this_builds_library_answers_without_an_error():
    available, reason = cuda_available()
    assert available or reason.startswith("no GPU: ")


def test_importing_loads_neither_cuda_nor_torch():
    program = (
        "import sys, pdxfer.cuda.library as loader; import pdxfer.cuda; "
        "assert loader._loaded is None and 'torch' not in sys.modules; "
        "assert 'pdx_cuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_error_of_a_call_is_typed(device):
    memory = DeviceMemory(8)
    device["result"] = 700
    with pytest.raises(CudaError, match=r"CUDA fill: as the test wants") as caught:
        memory.fill(0)
    assert (caught.value.number, caught.value.retryable) == (700, False)
    sent = from_wire(caught.value.to_wire())
    assert type(sent) is ResourceError
    assert str(sent) == str(caught.value)
    device["result"] = 0
    memory.close()


def test_an_error_of_earlier_work_comes_out_of_its_event(device):
    with Event() as event:
        event.record()
        assert event.reached()
        device["event_reached"] = 0
        assert not event.reached()
        device["result"] = 719
        with pytest.raises(CudaError, match="errors of earlier work"):
            event.reached()
        device["result"] = 0


def test_no_memory_left_is_worth_a_retry(device):
    load_cuda()
    device["result"] = 2
    with pytest.raises(CudaError) as caught:
        DeviceMemory(8)
    assert caught.value.retryable
    assert device["allocations"] == 0


@pytest.mark.parametrize("make", [lambda: DeviceMemory(8), Stream, Event])
def test_what_is_closed_is_given_back_once(device, make):
    with make() as owned:
        assert device["allocations"] == 1
    owned.close()
    assert device["allocations"] == 0
    with pytest.raises(ConfigError, match="is closed"):
        _ = owned.address if isinstance(owned, DeviceMemory) else owned.handle


def test_copies_stay_inside_their_memory(device):
    with pytest.raises(ConfigError, match="length_bytes is 0"):
        DeviceMemory(0)
    with DeviceMemory(16) as memory:
        words = np.arange(2, dtype=np.int64)
        memory.upload(words)
        back = np.zeros_like(words)
        memory.download(back)
        np.testing.assert_array_equal(back, words)
        for offset in (-1, 1):
            with pytest.raises(ConfigError, match="16 bytes at offset"):
                memory.upload(words, offset_bytes=offset)
        with pytest.raises(ConfigError, match="not C-contiguous"):
            memory.upload(np.zeros((2, 2), np.int8)[:, 0])
        back.flags.writeable = False
        with pytest.raises(ConfigError, match="read-only"):
            memory.download(back)

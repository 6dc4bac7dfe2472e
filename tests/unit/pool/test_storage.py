"""Memory of pools: alignment of what is viewed, and registration with a GPU."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError, ResourceError  # noqa: E402
from pdxfer.layout import StateTensor, state_entries, token_major  # noqa: E402
from pdxfer.memory import available  # noqa: E402
from pdxfer.pool import MLAPool, PageMajorPool, StatePool  # noqa: E402
from pdxfer.pool.storage import Storage  # noqa: E402

LAYOUT = token_major(
    layers=[0], kv_heads=1, head_dim=8, page_size=2, pages=3, dtype="bfloat16", reserved_pages=0
)


class FakeRuntime:
    """Stands for the CUDA runtime: remembers what is registered."""

    def __init__(self, status=0):
        self.status = status
        self.registered = {}

    def cudaHostRegister(self, address, length, flags):
        if self.status == 0:
            self.registered[address] = length
        return self.status

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_host_memory_is_registered_until_it_is_closed(runtime):
    storage = Storage(LAYOUT, align_bytes=1, pin=True)
    assert storage.pinned
    assert runtime.registered == {storage.raw.data_ptr(): storage.length_bytes}
    held = storage.raw
    with pytest.raises(BufferError):
        storage.close()
    assert runtime.registered == {storage.raw.data_ptr(): storage.length_bytes}
    del held
    storage.close()
    storage.close()
    assert runtime.registered == {}


def test_memory_is_unregistered_with_its_last_owner(runtime):
    storage = Storage(LAYOUT, pin=True)
    del storage
    assert runtime.registered == {}


def test_a_failed_registration_is_said(runtime):
    runtime.status = 2
    with pytest.raises(ResourceError, match="cannot pin 4192 bytes of host memory: CUDA error 2"):
        Storage(LAYOUT, pin=True)


def test_a_device_without_room_is_said(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 4192 bytes")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ResourceError, match=r"4192 bytes on device=cuda: tried to .* smaller"):
        Storage(LAYOUT, device="cuda")


def test_a_host_without_room_is_said(monkeypatch):
    monkeypatch.setattr(available, "available_bytes", lambda: 4096)
    with pytest.raises(ResourceError, match="4192 bytes are needed, 4096 are available"):
        Storage(LAYOUT)


def test_without_a_gpu_nothing_is_registered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    storage = Storage(LAYOUT, pin=True)
    assert not storage.pinned
    storage.close()


def test_tensors_must_begin_at_whole_elements():
    odd = [
        StateTensor("conv.0", (3,), "bfloat16"),
        StateTensor("temporal", (2,), "float32"),
    ]
    with pytest.raises(ConfigError, match="state tensor temporal begins at byte 6"):
        StatePool(size=2, tensors=odd, layer_ids=[0], arrangement="unified_entries")
    layout = state_entries(layers=[0], tensors=odd, slots=3)
    storage = Storage(layout)
    with pytest.raises(ConfigError, match=r"no multiples of the 4 bytes of torch\.float32"):
        storage.cells(layout.planes[1], 3, torch.float32)
    storage.close()


@pytest.mark.parametrize("device", ["nowhere", None, 5, ["cpu"]])
def test_what_is_no_device_is_refused_by_name(device):
    with pytest.raises(ConfigError) as raised:
        Storage(LAYOUT, device=device)
    assert f"device={device!r}: must be the name of a device of torch" in str(raised.value)


def test_a_device_object_is_its_name():
    with_name, with_object = Storage(LAYOUT), Storage(LAYOUT, device=torch.device("cpu"))
    for storage in (with_name, with_object):
        assert storage.device == "cpu"
        assert all(part.fd >= 0 for part in storage.ranges())
        storage.close()


@pytest.mark.parametrize("given", [bytes(4096), 5, [1]])
def test_what_is_no_memory_is_refused_by_name(given):
    with pytest.raises(ConfigError) as raised:
        Storage(LAYOUT, memory=given)
    text = f"memory is {type(given).__name__}; it must be what pdxfer.memory.allocate gives"
    assert text in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "torch.bfloat16", None, 5])
@pytest.mark.parametrize("kind", [PageMajorPool, MLAPool])
def test_a_dtype_by_name_is_refused_with_those_of_torch(kind, dtype):
    shape = {"size": 8, "page_size": 4, "layer_num": 1, "dtype": dtype}
    widths = {PageMajorPool: {"head_num": 1, "head_dim": 8}}
    with pytest.raises(ConfigError) as raised:
        kind(**shape, **widths.get(kind, {"kv_lora_rank": 8, "qk_rope_head_dim": 8}))
    assert f"dtype={dtype!r}: must be one of torch.float32, torch.bfloat16," in str(raised.value)

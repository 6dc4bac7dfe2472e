"""A refused write has written nothing: whatever is wrong, wherever in the call it is."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.errors import ConfigError  # noqa: E402
from pdxfer.pool import HostPool, MLAPool, MXFP8Pool, ShapeError, SlotError, SparsePool  # noqa: E402
from tests.support.pools import FAMILIES, KINDS, assert_memory, fill, snapshot  # noqa: E402

LOC = torch.tensor([8, 5])


def rows_of(pool, count=2):
    """Arguments of `set_kv_buffer` behind the slots."""
    if isinstance(pool, MLAPool):
        return [torch.ones(count, 1, pool.kv_cache_dim)]
    given = [
        torch.ones(count, pool.head_num, dim).to(pool.dtype)
        for dim in (pool.head_dim, pool.v_head_dim)
    ]
    if isinstance(pool, MXFP8Pool):
        given += [torch.ones(*rows.shape[:2], rows.shape[2] // 32).byte() for rows in given]
    return given


def wrong_rows(pool):
    """Each argument in turn with one row too few, one head too many, another width."""
    good = rows_of(pool)
    for at, rows in enumerate(good):
        for bad in (rows[:1], rows.repeat(1, 2, 1), rows[:, :, :0]):
            yield [*good[:at], bad, *good[at + 1 :]]


def wrong_copies(copied):
    """Each unit of each layer in turn with a row too few, another width, another dtype."""
    yield copied[:-1]
    for layer, chunks in enumerate(copied):
        tensors = chunks[0] if isinstance(chunks[0], list) else [chunks[0]]
        for at, rows in enumerate(tensors):
            for bad in (rows[:1], rows[:, :, :-1], rows.double()):
                chunk = [*tensors[:at], bad, *tensors[at + 1 :]]
                whole = chunk if isinstance(chunks[0], list) else chunk[0]
                yield [*copied[:layer], [whole], *copied[layer + 1 :]]


@pytest.fixture(params=KINDS, ids="-".join)
def pool(request, make):
    family, kind = request.param
    made = make(FAMILIES[family][kind])
    fill(made)
    return made


def test_rows(pool):
    before = snapshot(pool)
    layer = pool.layout.layers[0]
    for rows in wrong_rows(pool):
        with pytest.raises(ShapeError):
            pool.set_kv_buffer(layer, LOC, *rows)
        with pytest.raises(ShapeError):
            pool.set_kv_buffer_prefix_valid(layer, LOC[None], torch.tensor([2]), *rows)
    for slots in (torch.tensor([8, pool.slots]), torch.tensor([-1, 8])):
        with pytest.raises(SlotError):
            pool.set_kv_buffer(layer, slots, *rows_of(pool))
        with pytest.raises(SlotError):
            pool.set_kv_buffer_prefix_valid(layer, slots[None], torch.tensor([2]), *rows_of(pool))
    for unknown in (-1, 99):
        with pytest.raises(ConfigError, match=f"layer {unknown} is not in this pool"):
            pool.set_kv_buffer(unknown, LOC, *rows_of(pool))
    assert_memory(pool, before)


def test_index_keys(make):
    pool = make(FAMILIES["sparse"]["page"])
    fill(pool)
    before = snapshot(pool)
    assert isinstance(pool, SparsePool)
    for keys in (torch.ones(1, 1, 12), torch.ones(2, 2, 12), torch.ones(2, 1, 11)):
        with pytest.raises(ShapeError):
            pool.set_index_k_buffer(5, LOC, keys)
    with pytest.raises(SlotError):
        pool.set_index_k_buffer(5, LOC + 20, torch.ones(2, 1, 12))
    assert_memory(pool, before)


def test_copies(pool):
    before = snapshot(pool)
    copied = pool.get_cpu_copy(LOC)
    for wrong in wrong_copies(list(copied)):
        with pytest.raises(ShapeError):
            pool.load_cpu_copy(wrong, LOC)
    with pytest.raises(SlotError):
        pool.load_cpu_copy(copied, torch.tensor([8, pool.slots]))
    with pytest.raises(ShapeError):
        pool.load_cpu_copy(copied, LOC[:1])
    assert_memory(pool, before)


def test_moves(pool):
    before = snapshot(pool)
    beyond = torch.tensor([8, pool.slots])
    for target, source in ((LOC, LOC[:1]), (beyond, LOC), (LOC, beyond)):
        with pytest.raises(ConfigError):
            pool.move_kv_cache(target, source)
        with pytest.raises(ConfigError):
            pool.move_pages(target, source)
    with pytest.raises(ConfigError, match="no group 'swa'; there are full"):
        pool.move_pages(LOC, LOC, group="swa")
    assert_memory(pool, before)


def test_host_pools(pool, make):
    host = make(HostPool, pool, pages=8)
    fill(host)
    before = snapshot(pool), snapshot(host)
    good = torch.tensor([0, 5])
    for here, there in (
        (good, LOC[:1]),
        (good, torch.tensor([8, pool.slots])),
        (torch.tensor([0, host.slots]), LOC),
        (good.bool(), LOC),
    ):
        with pytest.raises(ConfigError):
            host.backup_from_device_all_layer(pool, here, there)
        with pytest.raises(ConfigError):
            host.load_to_device_per_layer(pool, here, there, 0)
    for wrong in wrong_copies(list(host.get_cpu_copy(good))):
        with pytest.raises(ShapeError):
            host.load_cpu_copy(wrong, good)
    assert_memory(pool, before[0])
    assert_memory(host, before[1])

"""Descriptors, gather and scatter on a device against the plan and numpy.

Each test runs with the CPU as the device, and on a GPU where there is one.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from pdxfer.cuda import (
    DeviceMemory,
    DeviceOutline,
    Event,
    PinnedMemory,
    Staging,
    Stream,
    cuda_available,
    descriptors,
    gather,
    scatter,
    synchronize,
    upload_outline,
    upload_regions,
    upload_runs,
)
from pdxfer.errors import ConfigError
from pdxfer.layout import Pages, head_major, page_major, plan, token_major, unified_entries
from tests.support.cuda_on_host import HostDevice

HEADS = {"layers": range(4), "kv_heads": 2, "head_dim": 24, "dtype": "bfloat16"}
TOKENS = 192


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "gpu":
        available, reason = cuda_available()
        if not available:
            pytest.skip(reason)
        yield "gpu"
        return
    host = HostDevice(monkeypatch)
    before = host["allocations"]
    yield "cpu"
    assert host["allocations"] == before  # nothing is kept


@pytest.fixture
def stream(device):
    with Stream() as stream:
        yield stream.handle
        synchronize(stream.handle)


class Pool:
    """Regions on the device with random bytes, and the same bytes here."""

    def __init__(self, lengths, random, stream):
        self.bytes = [random.integers(0, 256, length, np.uint8) for length in lengths]
        self.memories = [DeviceMemory(length) for length in lengths]
        for memory, content in zip(self.memories, self.bytes, strict=True):
            memory.upload(content, stream=stream)
        self.regions = upload_regions(
            [(memory.address, memory.length_bytes) for memory in self.memories], stream=stream
        )

    def download(self, stream):
        found = [np.empty_like(content) for content in self.bytes]
        for memory, content in zip(self.memories, found, strict=True):
            memory.download(content, stream=stream)
        return found

    def close(self):
        for memory in (*self.memories, self.regions.memory):
            memory.close()


def layout(build, page_size):
    return build(**HEADS, page_size=page_size, pages=TOKENS // page_size + 3)


def request(page_size, random):
    ids = random.permutation(np.arange(1, TOKENS // page_size + 3))[: TOKENS // page_size]
    return {"full": Pages(ids)}


def unmerged(compiled, source, destination, ranges, layers):
    """The plan's runs, no page's merged with the next one's: one batch a page pair does it."""
    rows = []
    size = min(compiled.source.groups[0].page_size, compiled.destination.groups[0].page_size)
    first, end = ranges["full"]
    cuts = [first, *range(first - first % size + size, end, size), end]
    for begin, stop in itertools.pairwise(cuts):
        part = compiled.batches(source, destination, {"full": (begin, stop)}, layers=layers)
        rows.append(part.runs)
    return np.concatenate(rows)


def in_order(runs):
    return runs[np.lexsort(runs.T[::-1])]


PAIRS = [
    (page_major, 16, token_major, 16),
    (token_major, 8, page_major, 32),
    (page_major, 32, unified_entries, 8),
    (head_major, 16, head_major, 16),
    (page_major, 8, page_major, 8),
]


@pytest.mark.parametrize("layers", [None, [2]])
@pytest.mark.parametrize("tokens", [(0, TOKENS), (16, 77)])
@pytest.mark.parametrize(("source", "source_size", "destination", "destination_size"), PAIRS)
def test_descriptors_are_the_runs_of_the_plan(
    stream, source, source_size, destination, destination_size, tokens, layers
):
    random = np.random.default_rng(5)
    compiled = plan(
        layout(source, source_size), layout(destination, destination_size), relayout="allow"
    )
    mine, theirs = request(source_size, random), request(destination_size, random)
    outline = compiled.outline(mine, theirs, {"full": tokens}, layers=layers)
    on_device = upload_outline(outline, stream=stream)
    with on_device.memory, (made := descriptors(on_device, stream=stream)).memory:
        runs, offsets = made.download(stream=stream)
        made.check(stream=stream)
    expected = unmerged(compiled, mine, theirs, {"full": tokens}, layers)
    np.testing.assert_array_equal(in_order(runs), in_order(expected))
    np.testing.assert_array_equal(offsets, np.cumsum(runs[:, 4]) - runs[:, 4])
    assert outline.length_bytes == int(runs[:, 4].sum()) > 0


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("source", "source_size", "destination", "destination_size"), PAIRS)
def test_a_request_crosses_through_staging(
    stream, source, source_size, destination, destination_size, pinned
):
    random = np.random.default_rng(6)
    compiled = plan(
        layout(source, source_size), layout(destination, destination_size), relayout="allow"
    )
    mine, theirs = request(source_size, random), request(destination_size, random)
    tokens = {"full": (16, 173)}
    pools = [
        Pool([region.length_bytes for region in side.regions], random, stream)
        for side in (compiled.source, compiled.destination)
    ]
    on_device = upload_outline(compiled.outline(mine, theirs, tokens), stream=stream)
    runs = descriptors(on_device, stream=stream)
    memory = (PinnedMemory if pinned else DeviceMemory)(runs.length_bytes)
    with on_device.memory, runs.memory, memory:
        staging = Staging(memory.address, memory.length_bytes)
        gather(runs, pools[0].regions, staging, stream=stream)
        scatter(runs, pools[1].regions, staging, stream=stream)
        runs.check(stream=stream)
        for row in compiled.batches(mine, theirs, tokens).runs.tolist():
            pools[1].bytes[row[2]][row[3] : row[3] + row[4]] = pools[0].bytes[row[0]][
                row[1] : row[1] + row[4]
            ]
        for pool in pools:  # and nothing else has changed
            for found, expected in zip(pool.download(stream), pool.bytes, strict=True):
                np.testing.assert_array_equal(found, expected)
            pool.close()


def scattered_runs(random, region_bytes, count, longest):
    """Runs at any alignment, none of which touches another at the destination."""
    lengths = random.integers(0, longest, count)
    gaps = random.integers(0, 3, count)
    starts = np.cumsum(lengths + gaps) - lengths
    assert starts[-1] + lengths[-1] <= region_bytes
    sources = [random.integers(0, region_bytes - length + 1) for length in lengths]
    regions = random.integers(0, 2, (2, count))
    runs = np.stack([regions[0], sources, regions[1], starts, lengths], axis=1).astype(np.int64)
    return random.permutation(runs)


@pytest.mark.parametrize(("count", "longest"), [(3000, 200), (20, 150_000)])
def test_runs_of_any_alignment_pass_in_parts(stream, count, longest):
    random = np.random.default_rng(7)
    pool = Pool([4_000_001, 3_500_000], random, stream)
    rows = scattered_runs(random, 3_500_000, count, longest)
    runs = upload_runs(rows, stream=stream)
    half = count // 2
    lengths = rows[:, 4]
    with (
        runs.memory,
        DeviceMemory(max(1, int(lengths.sum()))) as memory,
        Event() as gathered,
        Stream() as other,
    ):
        expected = np.concatenate(
            [pool.bytes[row[0]][row[1] : row[1] + row[4]] for row in rows.tolist()]
        )
        first_byte = 0
        for part in (range(half), range(half, count)):
            length = int(lengths[part.start : part.stop].sum())
            staging = Staging(memory.address, length, first_byte)
            gather(runs, pool.regions, staging, rows=part, stream=stream)
            found = np.empty(length, np.uint8)
            memory.download(found, stream=stream)
            np.testing.assert_array_equal(found, expected[first_byte : first_byte + length])
            first_byte += length
        # Another stream scatters what this one gathers.
        staging = Staging(memory.address, memory.length_bytes)
        gather(runs, pool.regions, staging, stream=stream)
        gathered.record(stream)
        gathered.block(other.handle)
        scatter(runs, pool.regions, staging, stream=other.handle)
        runs.check(stream=other.handle)
        assert gathered.reached()
    at = 0
    for row in rows.tolist():
        pool.bytes[row[2]][row[3] : row[3] + row[4]] = expected[at : at + row[4]]
        at += row[4]
    for found, content in zip(pool.download(stream), pool.bytes, strict=True):
        np.testing.assert_array_equal(found, content)
    pool.close()


def test_an_id_that_changed_is_not_followed(stream):
    random = np.random.default_rng(8)
    compiled = plan(layout(page_major, 16), layout(token_major, 16), relayout="allow")
    outline = compiled.outline(request(16, random), request(16, random), {"full": (0, TOKENS)})
    on_device = upload_outline(outline, stream=stream)
    bad = outline.destination_ids.copy()
    bad[3] = 1 << 40
    with on_device.memory, DeviceMemory(bad.nbytes) as ids:
        ids.upload(bad, stream=stream)
        changed: DeviceOutline = dataclasses.replace(on_device, destination_ids=ids.address)
        with (made := descriptors(changed, stream=stream)).memory:
            runs, _ = made.download(stream=stream)
            first = int(np.flatnonzero(runs[:, 4] == 0)[0])
            with pytest.raises(ConfigError, match=f"run {first} of {outline.rows}"):
                made.check(stream=stream)


@pytest.mark.parametrize(
    "row", [[2, 0, 2, 0, 8], [0, 99, 0, 99, 8], [-1, 0, -1, 0, 1], [0, -8, 0, -8, 8]]
)
@pytest.mark.parametrize("move", [gather, scatter])
def test_a_run_that_leaves_its_region_is_not_copied(stream, move, row):
    random = np.random.default_rng(9)
    pool = Pool([100, 100], random, stream)
    runs = upload_runs(np.array([[0, 0, 0, 0, 8], row], np.int64), stream=stream)
    with runs.memory, DeviceMemory(64) as memory:
        memory.fill(7, stream=stream)
        move(runs, pool.regions, Staging(memory.address, 64), stream=stream)
        with pytest.raises(ConfigError, match="run 1 of 2"):
            runs.check(stream=stream)
        staged = np.empty(64, np.uint8)
        memory.download(staged, stream=stream)
    expected = [content.copy() for content in pool.bytes]
    if move is scatter:
        expected[0][:8] = 7
    else:
        np.testing.assert_array_equal(staged[:8], pool.bytes[0][:8])
        staged = staged[8:]
    assert (staged == 7).all()
    for found, content in zip(pool.download(stream), expected, strict=True):
        np.testing.assert_array_equal(found, content)
    pool.close()


def test_staging_that_is_too_small_is_not_overrun(stream):
    random = np.random.default_rng(10)
    pool = Pool([100], random, stream)
    runs = upload_runs(np.array([[0, 0, 0, 0, 40], [0, 40, 0, 40, 40]], np.int64), stream=stream)
    with runs.memory, DeviceMemory(80) as memory:
        memory.fill(7, stream=stream)
        gather(runs, pool.regions, Staging(memory.address, 60), stream=stream)
        with pytest.raises(ConfigError, match="run 1 of 2"):
            runs.check(stream=stream)
        staged = np.empty(80, np.uint8)
        memory.download(staged, stream=stream)
    np.testing.assert_array_equal(staged[:40], pool.bytes[0][:40])
    assert (staged[40:] == 7).all()
    pool.close()


def test_nothing_to_do_is_nothing_done(stream):
    compiled = plan(layout(page_major, 16), layout(page_major, 16))
    pages = {"full": Pages([1])}
    on_device = upload_outline(compiled.outline(pages, pages, {"full": (0, 0)}), stream=stream)
    pool = Pool([8], np.random.default_rng(11), stream)
    with on_device.memory, (made := descriptors(on_device, stream=stream)).memory:
        gather(made, pool.regions, Staging(0, 0), stream=stream)
        made.check(stream=stream)
    pool.close()


def test_wrong_arguments_are_refused(stream):
    with pytest.raises(ConfigError, match=r"must be int64 \[n, 5\]"):
        upload_runs(np.zeros((3, 4), np.int64))
    with pytest.raises(ConfigError, match="negative"):
        upload_runs(np.array([[0, 0, 0, 0, -1]], np.int64))
    with pytest.raises(ConfigError, match="over 63 bits"):
        upload_runs(np.array([[0, 0, 0, 0, (1 << 62)]] * 2, np.int64))
    with pytest.raises(ConfigError, match="address space"):
        upload_regions([((1 << 64) - 8, 16)])
    runs = upload_runs(np.array([[0, 0, 0, 0, 8]], np.int64), stream=stream)
    regions = upload_regions([(0, 0)], stream=stream)
    with runs.memory, regions.memory:
        for rows in (range(2), range(-1, 1), range(0, 1, 2)):
            with pytest.raises(ConfigError, match="rows are"):
                gather(runs, regions, Staging(0, 0), rows=rows)
        for staging in (Staging(0, -1), Staging(0, 8, -1), Staging(0, 8, 1 << 63)):
            with pytest.raises(ConfigError, match="staging holds"):
                gather(runs, regions, staging)
        other = dataclasses.replace(regions, device=1)
        with pytest.raises(ConfigError, match="device 0, regions on 1"):
            scatter(runs, other, Staging(0, 0))

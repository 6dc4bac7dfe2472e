"""Every method of every pool against a loop over `layout.locate`, whole memory compared.

PDXFER_PROPERTY_EXAMPLES sets how many cases are drawn for each method.
"""

import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pdxfer.layout import plan  # noqa: E402
from pdxfer.layout.builders import table  # noqa: E402
from pdxfer.pool import HostPool  # noqa: E402
from pdxfer.pool.kv import KVPool  # noqa: E402
from tests.support.pools import (  # noqa: E402
    FAMILIES,
    KINDS,
    assert_memory,
    copied_rows,
    fill,
    parts_of_layer,
    random_rows,
    read_row,
    snapshot,
    write_row,
)

EXAMPLES = max(int(os.environ.get("PDXFER_PROPERTY_EXAMPLES", "250")) // 6, 20)
drawn = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)


@st.composite
def two_of_a_family(draw):
    family = draw(st.sampled_from(sorted(FAMILIES)))
    names = st.sampled_from(sorted(FAMILIES[family]))
    return FAMILIES[family][draw(names)], FAMILIES[family][draw(names)]


def make(kind):
    family, name = kind
    return closing(FAMILIES[family][name]())


def slots_to_write(rng, pool):
    return rng.permutation(pool.slots)[: rng.integers(0, min(pool.slots, 20) + 1)]


@drawn
@given(two_of_a_family(), seeds)
def test_a_copy_of_any_slots_loads_into_another_layout(pair, seed):
    rng = np.random.default_rng(seed)
    with closing(pair[0]()) as source, closing(pair[1]()) as target:
        source.cpu_offloading_chunk_size = int(rng.integers(1, 30))
        fill(source, seed)
        fill(target, seed + 1)
        before = snapshot(source)
        count = int(rng.integers(0, 40))
        loc = rng.integers(0, source.slots, count)
        copied = source.get_cpu_copy(torch.from_numpy(loc))

        assert len(copied) == len(source.layout.layers)
        for number, layer in enumerate(source.layout.layers):
            lengths = [len(chunk) if isinstance(chunk, torch.Tensor) else len(chunk[0])
                       for chunk in copied[number]]  # fmt: skip
            assert sum(lengths) == count
            assert all(length == source.cpu_offloading_chunk_size for length in lengths[:-1])
            for unit, parts in enumerate(parts_of_layer(source.layout, layer)):
                rows = [read_row(before, source.layout, parts, layer, int(s)) for s in loc]
                assert copied_rows(copied, number, unit) == rows
        assert_memory(source, before)

        expected = snapshot(target)
        to = rng.integers(0, target.slots, count)
        target.load_cpu_copy(copied, torch.from_numpy(to))
        for layer in target.layout.layers:
            for parts in parts_of_layer(target.layout, layer):
                for from_slot, to_slot in zip(loc.tolist(), to.tolist(), strict=True):
                    row = read_row(before, source.layout, parts, layer, from_slot)
                    write_row(expected, target.layout, parts, layer, to_slot, row)
        assert_memory(target, expected)


@drawn
@given(kinds, seeds)
def test_moved_rows_and_pages_may_overlap(kind, seed):
    rng = np.random.default_rng(seed)
    with make(kind) as pool:
        fill(pool, seed)
        before = snapshot(pool)
        count = int(rng.integers(0, 20))
        source = rng.integers(0, pool.slots, count)
        target = rng.integers(0, pool.slots, count)
        pool.move_kv_cache(torch.from_numpy(target), torch.from_numpy(source))
        expected = [region.copy() for region in before]
        move(pool.layout, before, expected, source.tolist(), target.tolist())
        assert_memory(pool, expected)

        pages = pool.layout.groups[0].pages
        page_size = pool.layout.groups[0].page_size
        count = int(rng.integers(0, pages + 1))
        source, target = rng.integers(0, pages, count), rng.integers(0, pages, count)
        pool.move_pages(torch.from_numpy(target), torch.from_numpy(source))
        before = [region.copy() for region in expected]
        rows = np.arange(page_size)
        move(
            pool.layout,
            before,
            expected,
            (source[:, None] * page_size + rows).reshape(-1).tolist(),
            (target[:, None] * page_size + rows).reshape(-1).tolist(),
        )
        assert_memory(pool, expected)


def move(layout, before, after, source, target):
    for layer in layout.layers:
        for parts in parts_of_layer(layout, layer):
            for from_slot, to_slot in zip(source, target, strict=True):
                row = read_row(before, layout, parts, layer, from_slot)
                write_row(after, layout, parts, layer, to_slot, row)


@drawn
@given(kinds, seeds)
def test_prefix_valid_writes_the_first_rows_of_each_request(kind, seed):
    rng = np.random.default_rng(seed)
    with make(kind) as pool:
        fill(pool, seed)
        expected = snapshot(pool)
        layer = int(rng.choice(pool.layout.layers))
        batch, block = int(rng.integers(0, 4)), int(rng.integers(0, 5))
        loc = rng.permutation(pool.slots)[: batch * block].reshape(batch, block)
        lens = rng.integers(-1, block + 2, batch)
        committed = np.arange(block)[None, :] < lens[:, None]
        garbage = np.where(committed, loc, rng.integers(-(2**40), 2**40, loc.shape))
        rows, scales = rows_for(rng, pool, layer, batch * block)
        given_rows = [row.clone() for row in rows + scales]
        pool.set_kv_buffer_prefix_valid(
            layer, torch.from_numpy(garbage), torch.from_numpy(lens), *rows, *scales
        )
        assert all(map(torch.equal, as_bytes(given_rows), as_bytes(rows + scales)))
        for unit, parts in enumerate(parts_of_layer(pool.layout, layer)[: len(rows + scales)]):
            stored = (rows + scales)[unit]
            for at in np.flatnonzero(committed):
                slot = int(loc.reshape(-1)[at])
                write_row(
                    expected,
                    pool.layout,
                    parts,
                    layer,
                    slot,
                    as_bytes([stored[at]])[0].numpy().tobytes(),
                )
        assert_memory(pool, expected)


def rows_for(rng, pool, layer, count):
    """Rows (K and V, or whole ones), and their scales where the pool keeps them."""
    units = parts_of_layer(pool.layout, layer)
    found = [pool.rows(unit, layer) for unit in units]
    dtype = getattr(torch, pool.layout.dtype)
    if not isinstance(pool, KVPool):
        return [random_rows(rng, (count, 1, found[0].width), dtype)], []
    rows = [random_rows(rng, (count, part.heads, part.width), dtype) for part in found[:2]]
    scales = [
        torch.from_numpy(rng.integers(0, 255, (count, part.heads, part.width), np.uint8))
        for part in found[2:]
        if part.part.endswith("scale")
    ]
    return rows, scales


def as_bytes(tensors):
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


@drawn
@given(kinds, st.sampled_from(table.names(table.HOST)), seeds)
def test_host_pool_takes_and_gives_back_any_slots(kind, arrangement, seed):
    rng = np.random.default_rng(seed)
    with make(kind) as device:
        groups = 2 if arrangement == "page_unified" and rng.integers(2) and even(device) else 1
        with closing(host_of(device, arrangement, groups, rng)) as host:
            fill(device, seed)
            fill(host, seed + 1)
            held, expected = snapshot(device), snapshot(host)
            here = slots_to_write(rng, host)
            there = rng.integers(0, device.slots, len(here))
            host.backup_from_device_all_layer(
                device, torch.from_numpy(here), torch.from_numpy(there), "kernel"
            )
            across(device.layout, held, there, host.layout, expected, here, host.layout.layers)
            assert_memory(host, expected)
            assert_memory(device, held)

            number = int(rng.integers(0, len(host.layout.layers)))
            to = slots_to_write(rng, device)
            source = rng.integers(0, host.slots, len(to))
            host.load_to_device_per_layer(
                device, torch.from_numpy(source), torch.from_numpy(to), number, "direct"
            )
            layers = [host.layout.layers[number]]
            across(host.layout, expected, source, device.layout, held, to, layers)
            assert_memory(device, held)
            assert_memory(host, expected)


def even(pool):
    return all(plane.heads % 2 == 0 for plane in pool.layout.planes)


def host_of(device, arrangement, groups, rng):
    page_size = device.layout.groups[0].page_size
    tiles = any(plane.row_kind == "tile" for plane in device.layout.planes)
    return HostPool(
        device,
        layout=arrangement,
        page_size=page_size if tiles else int(rng.choice([1, 2, page_size])),
        pages=int(rng.integers(1, 6)),
        head_groups=groups,
    )


def across(from_layout, from_memory, from_slots, to_layout, to_memory, to_slots, layers):
    for layer in layers:
        for parts in parts_of_layer(to_layout, layer):
            for from_slot, to_slot in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
                row = read_row(from_memory, from_layout, parts, layer, from_slot)
                write_row(to_memory, to_layout, parts, layer, to_slot, row)


@drawn
@given(kinds, st.sampled_from(table.names(table.HOST)), seeds)
def test_a_plan_into_a_host_pool_moves_what_a_backup_does(kind, arrangement, seed):
    rng = np.random.default_rng(seed)
    with make(kind) as device:
        groups = 2 if arrangement == "page_unified" and even(device) else 1
        page_size = device.layout.groups[0].page_size
        host = HostPool(device, layout=arrangement, pages=4, head_groups=groups)
        with closing(host):
            fill(device, seed)
            fill(host, seed + 1)
            expected, source = snapshot(host), snapshot(device)
            group = device.layout.groups[0]
            theirs = rng.permutation(np.arange(group.reserved_pages, group.pages))[:2]
            mine = rng.permutation(4)[: len(theirs)]
            runs = plan(device.layout, host.layout, relayout="allow").runs(theirs, mine)
            memory = [part.copy() for part in expected]
            for from_region, from_offset, to_region, to_offset, length in runs.tolist():
                block = source[from_region][from_offset : from_offset + length]
                memory[to_region][to_offset : to_offset + length] = block
            rows = np.arange(page_size)
            host.backup_from_device_all_layer(
                device,
                torch.from_numpy((mine[:, None] * page_size + rows).reshape(-1)),
                torch.from_numpy((theirs[:, None] * page_size + rows).reshape(-1)),
            )
            assert_memory(host, memory)


@drawn
@given(kinds, st.sampled_from(table.names(table.HOST)), seeds)
def test_flat_pages_and_addresses_name_every_byte_of_a_page_once(kind, arrangement, seed):
    rng = np.random.default_rng(seed)
    with make(kind) as device:
        groups = 2 if arrangement == "page_unified" and even(device) else 1
        with closing(HostPool(device, layout=arrangement, pages=4, head_groups=groups)) as host:
            fill(host, seed)
            memory = snapshot(host)
            page_size = host.page_size
            page, other = (int(number) for number in rng.permutation(4)[:2])
            flat = host.get_data_page(page * page_size)
            content = flat.view(torch.uint8).numpy().tobytes()
            assert content == flat_page(host.layout, memory, page)

            addresses, lengths = host.get_page_buffer_meta(
                torch.arange(page * page_size, (page + 1) * page_size)
            )
            assert sorted(places_of_page(host.layout, page)) == sorted(
                place for at, length in zip(addresses, lengths, strict=True)
                for place in places_of_range(host, at, length)
            )  # fmt: skip

            host.set_from_flat_data_page(other * page_size, flat)
            expected = [region.copy() for region in memory]
            pairs = zip(
                ordered_places(host.layout, page), ordered_places(host.layout, other), strict=True
            )
            for (region, source), (to_region, target) in pairs:
                expected[to_region][target] = memory[region][source]
            assert_memory(host, expected)
            assert len(host.get_dummy_flat_data_page()) == len(flat)


def ordered_places(layout, page):
    """(region, offset) of every byte of a page, in the order of a flat page: part by part, and
    inside of a part by address."""
    names = dict.fromkeys(plane.part for plane in layout.planes)
    units = [("latent", "rope")] if "latent" in names else [(name,) for name in names]
    found = []
    page_size = layout.groups[0].page_size
    for unit in units:
        places = set()
        for plane in (plane for plane in layout.planes if plane.part in unit):
            for slot in range(page * page_size, (page + 1) * page_size):
                for region, offset, length in row_bytes(layout, plane, slot):
                    places.update((region, offset + at) for at in range(length))
        found += sorted(places)
    return found


def row_bytes(layout, plane, slot):
    for head in range(plane.head_first, plane.head_end):
        region, offset = layout.locate(plane.part, plane.layer, slot, head)
        yield region, offset, plane.cell_bytes


def places_of_page(layout, page):
    return ordered_places(layout, page)


def flat_page(layout, memory, page):
    return bytes(int(memory[region][offset]) for region, offset in ordered_places(layout, page))


def places_of_range(host, address, length):
    for region, part in enumerate(host.memory):
        if part.address <= address < part.address + part.length_bytes:
            first = address - part.address
            return [(region, first + at) for at in range(length)]
    raise AssertionError(f"address {address} is in no region")

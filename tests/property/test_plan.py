"""Every plan against a copy cell by cell, written from the address formula (`locate`) alone.

A model's cache is drawn as bytes by (group, part, layer, token, head). Source pools hold it where
their layouts say; after the runs of all source workers the destination pool must hold it where its
layout says, and every other byte must be what it was.

PDXFER_PROPERTY_EXAMPLES sets how many pairs are drawn.
"""

import itertools
import os
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdxfer.layout import (
    KVLayout,
    Pages,
    Rank,
    combine,
    cover,
    head_major,
    mla,
    page_major,
    plan,
    token_major,
    unified_entries,
)

EXAMPLES = int(os.environ.get("PDXFER_PROPERTY_EXAMPLES", "250"))
BUILDERS = {
    "token_major": token_major,
    "head_major": head_major,
    "page_major": page_major,
    "unified_entries": unified_entries,
}
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


@dataclass
class GroupModel:
    """One group of the drawn model and request."""

    name: str
    layers: tuple[int, ...]
    parts: dict[str, int]  # cell bytes
    heads: int
    content: dict[tuple[str, int], np.ndarray]  # [tokens, heads, cell bytes]
    first: int
    end: int


@dataclass
class Side:
    """One instance: a layout a rank, the page size and first token of each group."""

    ranks: list[Rank]
    layouts: list[KVLayout]
    page_sizes: dict[str, int]
    first_tokens: dict[str, int]


@dataclass
class Case:
    groups: dict[str, GroupModel]
    source: Side
    destination: Side
    receiver: int
    layers: list[int] | None
    batch_bytes: int
    seed: int


page_sizes = st.one_of(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.integers(1, 64))


@st.composite
def group_models(draw, name, dtype, family, layers):
    size = ITEM[dtype]
    if family == "mla":
        parts = {"latent": 16 * draw(st.integers(1, 3)), "rope": 16 * draw(st.integers(1, 2))}
        heads = 1
    else:
        widths = st.sampled_from([4, 8, 16]) if size > 1 else st.sampled_from([3, 8, 16, 32])
        width = draw(widths)
        parts = {"k": width * size, "v": draw(st.one_of(st.just(width), widths)) * size}
        heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    first = draw(st.one_of(st.just(0), st.integers(0, 90)))
    end = first + draw(st.integers(1, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content = {
        (part, layer): rng.integers(0, 256, (end + 64, heads, cell), dtype=np.uint8)
        for part, cell in parts.items()
        for layer in layers
    }
    return GroupModel(name, layers, parts, heads, content, first, end)


def heads_of_rank(total, tp, tp_size):
    """The usual split of KV heads over attention TP, replicated where there are too few."""
    if tp_size <= total:
        return tp * total // tp_size, (tp + 1) * total // tp_size - tp * total // tp_size
    return tp * total // tp_size, 1


@st.composite
def sides(draw, groups, dtype, family, tp_sizes, stages):
    tp_size = draw(st.sampled_from(tp_sizes))
    all_layers = sorted({layer for group in groups.values() for layer in group.layers})
    pp_size = draw(st.sampled_from([n for n in stages if n <= len(all_layers)]))
    cuts = [len(all_layers) * n // pp_size for n in range(pp_size + 1)]
    sizes = {name: draw(page_sizes) for name in groups}
    firsts = {}
    for name, group in groups.items():
        aligned = group.first // sizes[name] * sizes[name]
        back = draw(st.integers(0, aligned // sizes[name]))
        firsts[name] = draw(
            st.one_of(
                st.just(aligned), st.just(aligned - back * sizes[name]), st.integers(0, group.first)
            )
        )
    pages = {
        name: -(-(group.end + 64 - firsts[name]) // sizes[name]) + draw(st.integers(3, 6))
        for name, group in groups.items()
    }
    layouts, ranks = [], []
    arrangement = {}
    for name, group in groups.items():
        names = sorted(BUILDERS)
        if family == "mla":
            names.remove("head_major")
        per_rank = {heads_of_rank(group.heads, tp, tp_size)[1] for tp in range(tp_size)}
        rows = [n * cell for n in per_rank for cell in group.parts.values()]
        if family != "mla" and any(row % 16 for row in rows):
            names.remove("unified_entries")
        arrangement[name] = draw(st.sampled_from(names))
    for pp in range(pp_size):
        stage = set(all_layers[cuts[pp] : cuts[pp + 1]])
        for tp in range(tp_size):
            parts = [
                build(group, arrangement[name], sizes[name], pages[name], dtype, tp, tp_size, held)
                for name, group in groups.items()
                if (held := [layer for layer in group.layers if layer in stage])
            ]
            layouts.append(combine(*parts))
            ranks.append(Rank(tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size))
    return Side(ranks, layouts, sizes, firsts)


def build(group, arrangement, page_size, pages, dtype, tp, tp_size, layers):
    shape = {
        "layers": layers,
        "page_size": page_size,
        "pages": pages,
        "dtype": dtype,
        "group": group.name,
    }
    size = ITEM[dtype]
    if "latent" in group.parts:
        return mla(
            kv_lora_rank=group.parts["latent"] // size,
            qk_rope_head_dim=group.parts["rope"] // size,
            arrangement=arrangement,
            **shape,
        )
    first, heads = heads_of_rank(group.heads, tp, tp_size)
    return BUILDERS[arrangement](
        kv_heads=heads,
        head_first=first,
        total_kv_heads=group.heads,
        head_dim=group.parts["k"] // size,
        v_head_dim=group.parts["v"] // size,
        **shape,
    )


@st.composite
def cases(draw):
    family = draw(st.sampled_from(["kv", "kv", "kv", "mla"]))
    dtype = draw(st.sampled_from(sorted(ITEM)))
    layers = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))
    names = draw(st.sampled_from([["full"], ["full"], ["full", "swa"]]))
    groups = {}
    for number, name in enumerate(names):
        held = tuple(layers[number :: len(names)])
        if held:
            groups[name] = draw(group_models(name, dtype, family, held))
    tp_sizes, stages = [1, 2, 4], [1, 1, 2]
    source = draw(sides(groups, dtype, family, tp_sizes, stages))
    destination = draw(sides(groups, dtype, family, tp_sizes, stages))
    return Case(
        groups=groups,
        source=source,
        destination=destination,
        receiver=draw(st.integers(0, len(destination.layouts) - 1)),
        layers=draw(
            st.one_of(st.none(), st.lists(st.sampled_from(layers), min_size=1, unique=True))
        ),
        batch_bytes=draw(st.sampled_from([1, 100, 4096, 16 << 20])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def memory_of(layout, rng):
    return [rng.integers(0, 256, region.length_bytes, np.uint8) for region in layout.regions]


def page_lists(side, layout, groups, rng):
    """Distinct ids for every page that a request may touch; sometimes neighbours."""
    lists = {}
    for name, group in groups.items():
        spec = layout.group_by_name.get(name)
        if spec is None:
            continue
        size, first = side.page_sizes[name], side.first_tokens[name]
        count = -(-(group.end - first) // size)
        ids = np.arange(spec.reserved_pages, spec.pages)
        if rng.integers(3):
            ids = rng.permutation(ids)
        lists[name] = Pages(ids[:count], first)
    return lists


def moved_end(case, name):
    """The rule for the end of a range: a whole page where pages hold the same tokens."""
    group = case.groups[name]
    size = case.source.page_sizes[name]
    first = case.source.first_tokens[name]
    if size != case.destination.page_sizes[name]:
        return group.end
    if (first - case.destination.first_tokens[name]) % size:
        return group.end
    return first + -(-(group.end - first) // size) * size


def cells(layout, pages, case, name, first, end, layers=None):
    """(region, offset, bytes that belong there) of every cell of a token range."""
    group = case.groups[name]
    size = layout.group_by_name[name].page_size
    ids, begin = pages[name].ids, pages[name].first_token
    for (plane_group, part, layer), planes in layout.planes_by_key.items():
        if plane_group != name or (layers is not None and layer not in layers):
            continue
        for plane in planes:
            for token in range(first, end):
                slot = int(ids[(token - begin) // size]) * size + (token - begin) % size
                for head in range(plane.head_first, plane.head_end):
                    region, offset = layout.locate(part, layer, slot, head, group=name)
                    yield region, offset, group.content[part, layer][token, head]


def fill_source(case, layout, pages, rng):
    memory = memory_of(layout, rng)
    for name in pages:
        size, first = case.source.page_sizes[name], case.source.first_tokens[name]
        last = first + len(pages[name].ids) * size
        for region, offset, content in cells(layout, pages, case, name, first, last):
            memory[region][offset : offset + len(content)] = content
    return memory


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases())
def test_every_plan_moves_each_cell_once_and_touches_nothing_else(case):
    rng = np.random.default_rng(case.seed)
    rank, layout = case.destination.ranks[case.receiver], case.destination.layouts[case.receiver]
    destination_pages = page_lists(case.destination, layout, case.groups, rng)
    memory = memory_of(layout, rng)
    expected = [part.copy() for part in memory]
    written = [np.zeros(len(part), np.int64) for part in memory]

    owned = cover(list(zip(case.source.ranks, case.source.layouts, strict=True)), (rank, layout))
    planned_bytes = 0
    for source_layout, part in zip(case.source.layouts, owned, strict=True):
        made = plan(source_layout, layout, owned=part)
        assert made.empty is (not part.cells)
        source_pages = page_lists(case.source, source_layout, case.groups, rng)
        shared = source_pages.keys() & destination_pages.keys()
        ranges = {name: (case.groups[name].first, case.groups[name].end) for name in shared}
        layers = None
        if case.layers is not None:
            layers = [layer for layer in case.layers if layer in source_layout.layers]
            if not layers:
                continue
        batches = made.batches(source_pages, destination_pages, ranges, layers, case.batch_bytes)
        assert batches.splits[0] == 0
        assert batches.splits[-1] == len(batches.runs)
        assert (np.diff(batches.splits) > 0).all()
        assert batches.runs[:, 4].sum() == batches.length_bytes
        assert batches.length_bytes == made.length_bytes(
            ranges, case.source.first_tokens, case.destination.first_tokens, layers
        )
        planned_bytes += batches.length_bytes
        source_memory = fill_source(case, source_layout, source_pages, rng)
        for from_region, from_offset, to_region, to_offset, length in batches.runs.tolist():
            assert length > 0
            block = source_memory[from_region][from_offset : from_offset + length]
            assert len(block) == length
            assert to_offset + length <= len(memory[to_region])
            memory[to_region][to_offset : to_offset + length] = block
            written[to_region][to_offset : to_offset + length] += 1

    expected_bytes = 0
    for name in destination_pages:
        end = moved_end(case, name)
        for region, offset, content in cells(
            layout, destination_pages, case, name, case.groups[name].first, end, case.layers
        ):
            expected[region][offset : offset + len(content)] = content
            expected_bytes += len(content)
    assert planned_bytes == expected_bytes
    assert sum(int(part.sum()) for part in written) == expected_bytes
    assert max(int(part.max()) for part in written) <= 1
    for got, wanted in zip(memory, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@settings(max_examples=max(EXAMPLES // 3, 50), deadline=None)
@given(cases())
def test_runs_are_the_longest_that_are_contiguous_on_both_sides(case):
    """Where no two pages are neighbours, runs are as few as merging single cells gives."""
    rank, layout = case.destination.ranks[case.receiver], case.destination.layouts[case.receiver]
    owned = cover(list(zip(case.source.ranks, case.source.layouts, strict=True)), (rank, layout))
    source_layout, part = next(
        pair for pair in zip(case.source.layouts, owned, strict=True) if pair[1]
    )
    made = plan(source_layout, layout, owned=part)
    cells_owned = {(c.group, c.part, c.layer): (c.head_first, c.head_end) for c in part.cells}
    for name in case.groups:
        if not any(key[0] == name for key in cells_owned):
            continue
        sizes = case.source.page_sizes[name], case.destination.page_sizes[name]
        if source_layout.group_by_name[name].pages < 4 or layout.group_by_name[name].pages < 4:
            continue
        tokens = min(2 * sizes[0], 2 * sizes[1])
        apart = Pages([1, 3])
        runs = made.runs({name: apart}, {name: apart}, {name: (0, tokens)})
        end = -(-tokens // sizes[0]) * sizes[0] if sizes[0] == sizes[1] else tokens
        atoms = []
        for (group, part_name, layer), (first, head_end) in cells_owned.items():
            if group != name:
                continue
            for token in range(end):
                slots = [int(apart.ids[token // size]) * size + token % size for size in sizes]
                for head in range(first, head_end):
                    a = source_layout.locate(part_name, layer, slots[0], head, group=name)
                    b = layout.locate(part_name, layer, slots[1], head, group=name)
                    length = case.groups[name].parts[part_name]
                    atoms.append((*a, *b, length))
        atoms.sort()
        least = 1
        for before, after in itertools.pairwise(atoms):
            touch = (
                before[0] == after[0]
                and before[2] == after[2]
                and before[1] + before[4] == after[1]
                and before[3] + before[4] == after[3]
            )
            least += not touch
        assert len(runs) == least

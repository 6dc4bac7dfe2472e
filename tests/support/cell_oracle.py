"""What a transfer must leave behind, cell by cell, from the address formula alone.

A model's cache is bytes by (part, layer, position, row, head). Source pools hold it where their
layouts say; after the runs of all source workers the destination pool must hold it where its layout
says, and every other byte must be what it was. Each cell is written once.
"""

import numpy as np

from pdxfer.layout import Pages, PlannedChunk, cover, kept, plan
from tests.support.layout_cases import Case


def memory_of(layout, rng):
    return [rng.integers(0, 256, region.length_bytes, np.uint8) for region in layout.regions]


def page_lists(layout, groups, first_tokens, rng):
    """Distinct ids for every page that a request may touch; sometimes neighbours."""
    lists = {}
    for name, group in groups.items():
        spec = layout.group_by_name.get(name)
        if spec is None:
            continue
        count = -(-(group.end - first_tokens[name]) // spec.page_size)
        ids = np.arange(spec.reserved_pages, spec.pages)
        if rng.integers(3):
            ids = rng.permutation(ids)
        lists[name] = Pages(ids[:count], first_tokens[name])
    return lists


def moved_end(case: Case, name):
    """The rule for the end of a range: a whole page where pages hold the same tokens."""
    group = case.groups[name]
    size = case.source.page_sizes[name]
    first = case.source.first_tokens[name]
    if size != case.destination.page_sizes[name]:
        return group.end
    if (first - case.destination.first_tokens[name]) % size:
        return group.end
    return first + -(-(group.end - first) // size) * size


def cells(layout, pages, content, name, span, layers=None):
    """(region, offsets, bytes that belong there) of each plane's cells in tokens `span`.

    offset = base + page * page_stride + row * row_stride + (head - head_first) * head_stride
    """
    size = layout.group_by_name[name].page_size
    ids, begin = pages.ids, pages.first_token
    for plane in layout.planes:
        if plane.group != name or (layers is not None and plane.layer not in layers):
            continue
        tokens = np.arange(*span)
        if plane.row_kind == "tile":
            tokens = tokens[::size]
        rows = np.arange(plane.rows) if plane.row_kind == "whole" else np.zeros(1, np.int64)
        slots = (tokens - begin) % size * plane.row_stride if plane.row_kind == "token" else 0
        offsets = plane.base + ids[(tokens - begin) // size] * plane.page_stride + slots
        offsets = offsets[:, None] + rows * plane.row_stride
        offsets = offsets[..., None] + np.arange(plane.heads) * plane.head_stride
        offsets = offsets[..., None] + np.arange(plane.cell_bytes)
        found = content[plane.part, plane.layer][..., plane.head_first : plane.head_end, :]
        if plane.row_kind == "tile":
            # what a tile holds is its own affair: here the bytes of its tokens, one by one
            held = found[tokens[:, None] + np.arange(size), 0]
            found = np.moveaxis(held, 1, 2).reshape(offsets.shape)
        else:
            found = found[tokens]
        yield plane.region, offsets.ravel(), found.ravel()


def fill_source(layout, pages, contents, rng):
    memory = memory_of(layout, rng)
    for name, listed in pages.items():
        last = listed.first_token + len(listed.ids) * layout.group_by_name[name].page_size
        span = (listed.first_token, last)
        for region, offsets, content in cells(layout, listed, contents[name], name, span):
            memory[region][offsets] = content
    return memory


def copy_runs(runs, source, destination, written):
    """Each run as one copy; counts what is written."""
    for from_region, from_offset, to_region, to_offset, length in runs.tolist():
        assert length > 0
        block = source[from_region][from_offset : from_offset + length]
        assert len(block) == length
        assert to_offset + length <= len(destination[to_region])
        destination[to_region][to_offset : to_offset + length] = block
        written[to_region][to_offset : to_offset + length] += 1


class Transfer:
    """A case as both sides see it: what every source worker moves into one destination worker."""

    def __init__(self, case: Case):
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        self.contents = {name: group.content(self.rng) for name, group in case.groups.items()}
        self.rank = list(case.destination.ranks())[case.receiver]
        self.layout = case.destination.layout(case.groups, self.rank)
        self.ranks = list(case.source.ranks())
        self.layouts = [case.source.layout(case.groups, rank) for rank in self.ranks]
        self.pages = page_lists(self.layout, case.groups, case.destination.first_tokens, self.rng)
        self.skipped = {}
        workers = list(zip(self.ranks, self.layouts, strict=True))
        self.owned = cover(workers, (self.rank, self.layout))

    def skip_some(self):
        """Decode has no page for some tokens; the spans of each group that move all the same."""
        case, spans = self.case, {}
        for name, listed in self.pages.items():
            group = self.layout.group_by_name[name]
            self.skipped[name] = ()
            if group.kind == "token":
                has_none = self.rng.random(len(listed)) < self.rng.choice([0.2, 0.5, 1])
                self.pages[name] = without(listed, has_none, group.page_size)
                self.skipped[name] = self.pages[name].skipped
        for name, skipped in self.skipped.items():
            spans[name] = kept((case.groups[name].first, moved_end(case, name)), skipped)
        return spans

    def skip_at_source(self, layout, listed):
        """Prefill lacks some of the pages that nobody asks for."""
        found = {}
        for name, pages in listed.items():
            group = layout.group_by_name[name]
            found[name] = pages
            if group.kind == "token" and self.skipped.get(name):
                first = pages.first_token + np.arange(len(pages)) * group.page_size
                has_none = self.rng.random(len(pages)) < 0.7
                span = (self.case.groups[name].first, moved_end(self.case, name))
                for a, b in kept(span, self.skipped[name]):
                    has_none &= (first + group.page_size <= a) | (first >= b)
                found[name] = without(pages, has_none, group.page_size)
        return found

    def shares(self, made, layout):
        """What this worker owes, by group that both hold, pages that are skipped with it."""
        case = self.case
        shared = layout.group_by_name.keys() & self.pages.keys()
        ranges = {name: (case.groups[name].first, case.groups[name].end) for name in shared}
        tokens = max(group.end for group in case.groups.values())
        return made.share(ranges, tokens, case.destination.first_tokens)

    def ranges(self, made, layout):
        """What this worker moves."""
        shares = self.shares(made, layout)
        if not self.skipped:
            return shares
        return {name: kept(span, self.skipped[name]) for name, span in shares.items()}

    def source_pages(self, layout, ranges):
        firsts = dict(self.case.source.first_tokens)
        if self.case.own_pages_only and self.case.source.cp_size > 1:
            for name, (first, _) in ranges.items():
                if layout.group_by_name[name].kind == "token":
                    size = layout.group_by_name[name].page_size
                    firsts[name] = min(first, self.case.groups[name].end - 1) // size * size
        return page_lists(layout, self.case.groups, firsts, self.rng)


def without(pages, has_none, page_size):
    """A list without some of its pages, whose tokens it states."""
    skipped = []
    for at in np.flatnonzero(has_none).tolist():
        first = pages.first_token + at * page_size
        if skipped and skipped[-1][1] == first:
            skipped[-1] = (skipped[-1][0], first + page_size)
        else:
            skipped.append((first, first + page_size))
    return Pages(pages.ids[~has_none], pages.first_token, tuple(skipped))


def copy_pieces(chunk, source, destination):
    """The bytes in canonical order, gathered at the source and scattered at the destination."""
    order = [source[region][at : at + size] for region, at, size in chunk.source_pieces().tolist()]
    sent = np.concatenate([np.zeros(0, np.uint8), *order])
    pieces = chunk.plan.destination_pieces(chunk.destination, chunk.exact_ranges, chunk.layers)
    assert int(pieces[:, 2].sum()) == len(sent) == chunk.length_bytes
    at = 0
    for region, offset, size in pieces.tolist():
        destination[region][offset : offset + size] = sent[at : at + size]
        at += size


def check_intervals(chunk, runs_max, whole_bytes):
    """Stretches of a chunk hold its bytes one after the other."""
    at = 0
    for part in chunk.intervals(runs_max):
        assert part.first_byte == at
        assert part.length_bytes or part is chunk, "a stretch without bytes has no ticket to end it"
        assert part.batches().length_bytes == part.length_bytes
        at += part.length_bytes
    assert at == whole_bytes


def check_case(case: Case, *, skips=False):
    """Plans a case, copies its runs, and compares the whole destination pool.

    The same bytes have to arrive in canonical order, where each side knows its own pages only.
    With `skips` decode has no page for some tokens, and prefill lacks some that nobody asks for.
    """
    transfer = Transfer(case)
    lists = dict(transfer.pages)
    spans = {name: [(case.groups[name].first, moved_end(case, name))] for name in lists}
    if skips:
        spans = transfer.skip_some()
    layout, rng = transfer.layout, transfer.rng
    memory = memory_of(layout, rng)
    expected = [part.copy() for part in memory]
    placed = [part.copy() for part in memory]
    written = [np.zeros(len(part), np.int8) for part in memory]
    planned_bytes = 0
    for source_layout, part in zip(transfer.layouts, transfer.owned, strict=True):
        made = plan(source_layout, layout, owned=part)
        assert made.empty is (not part.cells)
        ranges = transfer.ranges(made, source_layout)
        shares = transfer.shares(made, source_layout)
        if made.empty:
            assert made.length_bytes(ranges) == 0
            continue
        source_pages = source_lists = transfer.source_pages(source_layout, shares)
        if skips:
            source_pages = transfer.skip_at_source(source_layout, source_lists)
        layers = None
        if case.layers is not None:
            layers = [layer for layer in case.layers if layer in source_layout.layers]
            if not layers:
                continue
        batches = made.batches(source_pages, transfer.pages, ranges, layers, case.batch_bytes)
        assert batches.splits[0] == 0
        assert batches.splits[-1] == len(batches.runs)
        assert (np.diff(batches.splits) > 0).all()
        assert batches.runs[:, 4].sum() == batches.length_bytes
        firsts = {name: listed.first_token for name, listed in source_pages.items()}
        assert batches.length_bytes == made.length_bytes(
            ranges, firsts, case.destination.first_tokens, layers
        )
        planned_bytes += batches.length_bytes
        source_memory = fill_source(source_layout, source_lists, transfer.contents, rng)
        copy_runs(batches.runs, source_memory, memory, written)
        chosen = None if layers is None else tuple(layers)
        chunk = PlannedChunk(made, source_pages, transfer.pages, ranges, chosen)
        copy_pieces(chunk, source_memory, placed)
        check_intervals(chunk, int(rng.integers(1, 40)), batches.length_bytes)

    expected_bytes = 0
    for name, listed in lists.items():
        for span in spans[name]:
            for region, offsets, content in cells(
                layout, listed, transfer.contents[name], name, span, case.layers
            ):
                expected[region][offsets] = content
                expected_bytes += len(content)
    assert planned_bytes == expected_bytes
    assert sum(int(part.sum(dtype=np.int64)) for part in written) == expected_bytes
    assert max(int(part.max()) for part in written) <= 1
    for got, arrived, wanted in zip(memory, placed, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(arrived, wanted)


def single_cells(source, destination, lists, owned, end):
    """Rows (region, offset, region, offset, length) of every cell that is owed."""
    sides = []
    for layout, listed in zip((source, destination), lists, strict=True):
        rows = []
        for head in range(owned.head_first, owned.head_end):
            plane = next(
                plane
                for plane in layout.planes_by_key[owned.group, owned.part, owned.layer]
                if plane.head_first <= head < plane.head_end
            )
            size = layout.group_by_name[owned.group].page_size
            positions = np.arange(0, end, size if plane.row_kind == "tile" else 1)
            inner = np.arange(plane.rows) if plane.row_kind == "whole" else np.zeros(1, np.int64)
            for row in inner:
                used = positions % size if plane.row_kind == "token" else row
                offsets = (
                    plane.base
                    + listed.ids[positions // size] * plane.page_stride
                    + used * plane.row_stride
                    + (head - plane.head_first) * plane.head_stride
                )
                rows.append(
                    np.stack(
                        [
                            np.full(len(offsets), plane.region),
                            offsets,
                            np.full(len(offsets), plane.cell_bytes),
                        ],
                        axis=1,
                    )
                )
        sides.append(np.concatenate(rows))
    return np.concatenate([sides[0][:, :2], sides[1]], axis=1)

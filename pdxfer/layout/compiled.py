"""A compiled plan: what turns the page ids of a request into runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer import _core, limits
from pdxfer.errors import ConfigError, LayoutMismatchError, ResourceError
from pdxfer.layout import planes as row_kinds
from pdxfer.layout.groups import STATE
from pdxfer.layout.kv_layout import ORDER_VERSION, canonical
from pdxfer.layout.outline import Outline
from pdxfer.layout.pages import Pages, as_group_pages, check_ids
from pdxfer.layout.summary import GroupSummary, PlanSummary, lane_hint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.ownership import Owned
    from pdxfer.layout.planes import Plane

_ROW_KINDS: Final = {row_kinds.TOKEN: 0, row_kinds.WHOLE: 1, row_kinds.TILE: 2}
_NO_LIMIT: Final = (1 << 63) - 1
_TOKEN_END: Final = 1 << 62

TokenRange = tuple[int, int]
"""`[first, end)` in tokens of the request; positions of ids in a state group."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The runs of a request, in batches.

    Shapes:  runs int64 [n, 5]: source region, source offset, destination region, destination
             offset, length (bytes); splits int64 [batches + 1]: batch b is rows
             `splits[b]:splits[b + 1]`.
    """

    runs: NDArray[np.int64]
    splits: NDArray[np.int64]
    length_bytes: int
    """Sum of the lengths; equal to `Plan.length_bytes` of the same ranges."""


@dataclass(frozen=True, slots=True)
class PlanePair:
    """Heads `[first, end)` that a source and a destination plane share."""

    source: Plane
    destination: Plane
    first: int
    end: int

    def row(self, group_index: int) -> list[int]:
        """The pair as the native core takes it."""
        plane = self.destination
        sides = [
            value
            for side in (self.source, self.destination)
            for value in (
                side.region,
                side.base + (self.first - side.head_first) * side.head_stride,
                side.page_stride,
                side.row_stride,
                side.head_stride,
            )
        ]
        return [
            group_index,
            plane.layer,
            _ROW_KINDS[plane.row_kind],
            plane.rows,
            self.end - self.first,
            plane.cell_bytes,
            *sides,
        ]


_GroupRequest = tuple[int, "NDArray[np.int64]", int, "NDArray[np.int64]", int, int, int]


@dataclass(frozen=True, slots=True)
class _Request:
    """Page ids and ranges of a request as the native core takes them."""

    groups: list[_GroupRequest] = field(default_factory=list)
    source_first: dict[str, int] = field(default_factory=dict)
    destination_first: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Weights:
    """Bytes by layer, and their sum."""

    by_layer: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, layer: int, length_bytes: int) -> None:
        self.by_layer[layer] = self.by_layer.get(layer, 0) + length_bytes
        self.total += length_bytes

    def of(self, layers: frozenset[int] | None) -> int:
        if layers is None:
            return self.total
        return sum(weight for layer, weight in self.by_layer.items() if layer in layers)


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    """One group of a plan: both sides' pages, and what its rows and pages weigh."""

    index: int
    source: Group
    destination: Group
    row_bytes: _Weights = field(default_factory=_Weights)
    """Of planes whose rows are tokens."""
    page_bytes: _Weights = field(default_factory=_Weights)
    """Of planes that move whole."""

    def weigh(self, pair: PlanePair) -> None:
        plane = pair.destination
        cells = (pair.end - pair.first) * plane.cell_bytes
        if plane.row_kind == row_kinds.TOKEN:
            self.row_bytes.add(plane.layer, cells)
        else:
            self.page_bytes.add(plane.layer, cells * plane.rows)

    def rounded_end(self, end: int, source_first: int, destination_first: int) -> int:
        """`end`, at the page end where pages on both sides cover the same tokens."""
        size = self.source.page_size
        if size != self.destination.page_size or (source_first - destination_first) % size:
            return end
        return source_first - (source_first - end) // size * size


class Plan:
    """How pages of a source layout become pages of a destination layout.

    Made by `plan`. Immutable; any thread may use it, and the native part runs without the GIL.
    """

    def __init__(
        self, source: KVLayout, destination: KVLayout, pairs: list[PlanePair], owned: Owned
    ) -> None:
        self.source = source
        self.destination = destination
        self.owned = owned
        """The cells that this plan moves."""
        self._groups = _planned_groups(source, destination, pairs)
        self._core = _compile(source, destination, self._groups, pairs)
        self.digest: bytes = _digest(source, destination, owned)
        """32 bytes over planes, owned cells and order version; equal on both sides."""

    @property
    def empty(self) -> bool:
        """True where the source worker owes nothing: every range plans zero bytes."""
        return self.owned.empty

    def runs(
        self,
        source_pages: object,
        destination_pages: object,
        token_range: TokenRange | Mapping[str, TokenRange] | None = None,
        layers: Iterable[int] | None = None,
    ) -> NDArray[np.int64]:
        """The runs of a request as one array; see `Batches.runs`.

        Args:    source_pages, destination_pages: ids or `Pages` of the only group, or a mapping
                 from group to either. token_range: `[first, end)`, for every group or by group;
                 None: all that the page lists of both sides hold, which must be the same tokens.
        Raises:  as `batches`.
        """
        source = as_group_pages(self.source, source_pages)
        destination = as_group_pages(self.destination, destination_pages)
        if isinstance(token_range, Mapping):
            ranges = dict(token_range)
        else:
            ranges = {
                name: token_range or self._whole_range(name, source[name], destination)
                for name in source
            }
        return self._batches(source, destination, ranges, layers, _NO_LIMIT).runs

    def batches(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        token_ranges: Mapping[str, TokenRange],
        layers: Iterable[int] | None = None,
        batch_bytes: int = limits.BATCH_BYTES,
    ) -> Batches:
        """The runs of a request.

        One batch per group and layer where every run belongs to one layer, else batches of about
        `batch_bytes`. A run that grows over consecutive pages stays within `batch_bytes`.

        Args:    source, destination: pages by group. token_ranges: `[first, end)` of each group
                 that moves; for a state group positions of ids. The end is rounded up to the page
                 end where pages on both sides cover the same tokens. layers: global layers of the
                 source that move; None: all.
        Returns: runs that never overlap at the destination; empty where this pair owes nothing.
        Raises:  ConfigError: ids outside `reserved_pages <= id < pages` or repeated at the
                 destination, page lists too short, unknown groups or layers, a tile cut.
                 ResourceError: more runs than `limits` allow. Nothing was written.
        Threads: any; native code runs without the GIL.
        Cost:    about 20 ns a run; the first request of a new shape compiles it.
        """
        if batch_bytes < 1:
            raise ConfigError(f"batch_bytes is {batch_bytes}; it must be 1 or more")
        return self._batches(source, destination, token_ranges, layers, batch_bytes)

    def share(
        self,
        ranges: Mapping[str, TokenRange],
        tokens: int,
        destination_first: Mapping[str, int] | None = None,
    ) -> dict[str, TokenRange]:
        """`ranges` cut to what this source worker owes of them (`Owned.share`).

        Ranges as both sides have them before: `[first, end)` of the tokens that a request moves, by
        group; positions of ids in a state group. They come back as they are where context parallel
        does not divide them. Shares of all source workers together are the ranges, once each.

        Args:    tokens: of the whole request. destination_first: `Pages.first_token` of decode's
                 pages by group; 0 where left out.
        Raises:  ConfigError: pages of decode that do not begin at a multiple of the page size, so
                 that a share's end would be inside a page.
        """
        if self.owned.share.parts == 1:
            return dict(ranges)
        cut: dict[str, TokenRange] = {}
        for name, (first, end) in ranges.items():
            group = self._groups.get(name)
            if group is None:
                cut[name] = (first, end)
                continue
            _check_page_start(group.destination, (destination_first or {}).get(name, 0))
            size = group.source.page_size
            states = group.source.kind == STATE
            begin, stop = self.owned.share.pages(end if states else -(-tokens // size))
            begin = min(max(first, begin * size), end)
            cut[name] = (begin, max(begin, min(end, stop * size)))
        return cut

    def outline(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        token_ranges: Mapping[str, TokenRange],
        layers: Iterable[int] | None = None,
    ) -> Outline:
        """The runs of a request in outline, for `pdxfer.cuda.descriptors` to fill in on a GPU.

        Rows are those of `batches`, in its order, but that no run grows over the next page.

        Args:    as `batches`.
        Raises:  as `batches`.
        Threads: any; native code runs without the GIL.
        Cost:    O(page ids); with equal page sizes a few spans, else up to one per page and layer.
        """
        chosen = self._chosen_layers(layers)
        request = self._request(source, destination, token_ranges)
        with _native_errors():
            entries, spans, rows, length = self._core.outline(
                request.groups, None if chosen is None else sorted(chosen)
            )
        self._check_length(length, token_ranges, request, chosen)
        return Outline(
            entries=entries,
            spans=spans,
            source_ids=_joined([group[1] for group in request.groups]),
            destination_ids=_joined([group[3] for group in request.groups]),
            rows=rows,
            length_bytes=length,
        )

    def length_bytes(
        self,
        token_ranges: Mapping[str, TokenRange],
        source_first: Mapping[str, int] | None = None,
        destination_first: Mapping[str, int] | None = None,
        layers: Iterable[int] | None = None,
    ) -> int:
        """Bytes that `batches` plans for these ranges, without page ids.

        Args:    source_first, destination_first: `Pages.first_token` by group; 0 where left out
                 (any other start of a page comes to the same).
        Raises:  ConfigError: an unknown group or layer.
        """
        chosen = self._chosen_layers(layers)
        total = 0
        for name, (first, end) in token_ranges.items():
            group = self._planned_group(name)
            if group is None or first >= end:
                continue
            stop = group.rounded_end(
                end, (source_first or {}).get(name, 0), (destination_first or {}).get(name, 0)
            )
            total += (stop - first) * group.row_bytes.of(chosen)
            total += (stop - first) // group.destination.page_size * group.page_bytes.of(chosen)
        return total

    def summary(self) -> PlanSummary:
        """Runs and bytes a page, longest and shortest run, and which lane suits them."""
        groups = []
        for name, group in self._groups.items():
            with _native_errors():
                tokens, runs, length, longest, shortest = self._core.describe(group.index)
            pages = tokens / group.destination.page_size
            groups.append(
                GroupSummary(
                    group=name,
                    source_page_size=group.source.page_size,
                    destination_page_size=group.destination.page_size,
                    runs_per_page=runs / pages,
                    bytes_per_page=round(length / pages),
                    longest_run_bytes=longest,
                    shortest_run_bytes=shortest,
                )
            )
        runs_per_page = sum(group.runs_per_page for group in groups)
        bytes_per_page = sum(group.bytes_per_page for group in groups)
        return PlanSummary(tuple(groups), lane_hint(runs_per_page, bytes_per_page))

    def _whole_range(
        self, name: str, source: Pages, destination: Mapping[str, Pages]
    ) -> TokenRange:
        group, other = self._planned_group(name), destination.get(name)
        if group is None:
            return (0, 0)
        if other is None:
            raise ConfigError(f"destination pages of group {name} are missing")
        ends = (
            source.first_token + len(source) * group.source.page_size,
            other.first_token + len(other) * group.destination.page_size,
        )
        if source.first_token != other.first_token or ends[0] != ends[1]:
            raise ConfigError(
                f"source pages of group {name} hold tokens [{source.first_token}, {ends[0]}), "
                f"destination pages [{other.first_token}, {ends[1]}); give token_range"
            )
        return source.first_token, ends[0]

    def _batches(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        ranges: Mapping[str, TokenRange],
        layers: Iterable[int] | None,
        batch_bytes: int,
    ) -> Batches:
        chosen = self._chosen_layers(layers)
        request = self._request(source, destination, ranges)
        with _native_errors():
            runs, splits, length = self._core.batches(
                request.groups,
                None if chosen is None else sorted(chosen),
                batch_bytes,
                batch_bytes,
            )
        self._check_length(length, ranges, request, chosen)
        return Batches(runs, splits, length)

    def _request(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        ranges: Mapping[str, TokenRange],
    ) -> _Request:
        request = _Request()
        for name, token_range in ranges.items():
            group = self._planned_group(name)
            if group is None:
                continue
            first, end = _checked_range(name, token_range)
            mine = _pages_of(source, group.source, "source")
            theirs = _pages_of(destination, group.destination, "destination")
            request.source_first[name] = mine.first_token
            request.destination_first[name] = theirs.first_token
            request.groups.append(
                (
                    group.index,
                    mine.ids,
                    mine.first_token,
                    theirs.ids,
                    theirs.first_token,
                    first,
                    end,
                )
            )
        return request

    def _check_length(
        self,
        length: int,
        ranges: Mapping[str, TokenRange],
        request: _Request,
        layers: Iterable[int] | None,
    ) -> None:
        expected = self.length_bytes(
            ranges, request.source_first, request.destination_first, layers=layers
        )
        if length != expected:
            raise LayoutMismatchError(
                f"planned {length} bytes where {expected} are expected; nothing was sent",
                fields={"length_bytes": f"planned={length}, expected={expected}"},
            )

    def _chosen_layers(self, layers: Iterable[int] | None) -> frozenset[int] | None:
        if layers is None:
            return None
        chosen = frozenset(layers)
        unknown = sorted(chosen.difference(self.source.layers))
        if unknown or not chosen:
            raise ConfigError(
                f"layers name {unknown[:4] or 'nothing'}; the source holds layers "
                f"{self.source.layers[0]} to {self.source.layers[-1]}, None means all"
            )
        return chosen

    def _planned_group(self, name: str) -> _PlannedGroup | None:
        """None: this pair owes nothing of the group."""
        group = self._groups.get(name)
        if group is None and name not in self.source.group_by_name | self.destination.group_by_name:
            raise ConfigError(
                f"no group {name!r}; the layouts have {', '.join(self.source.group_by_name)}"
            )
        return group


def _check_page_start(group: Group, first_token: int) -> None:
    if first_token % group.page_size:
        raise ConfigError(
            f"destination pages of group {group.name} begin at token {first_token}, inside a page "
            f"of {group.page_size}; with prefill context parallel first_token must be a multiple "
            "of page_size",
            fields={"first_token": str(first_token), "page_size": str(group.page_size)},
        )


def _joined(ids: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(ids) if ids else np.zeros(0, np.int64)


def _checked_range(name: str, token_range: TokenRange) -> TokenRange:
    first, end = int(token_range[0]), int(token_range[1])
    if not 0 <= first <= end < _TOKEN_END:
        raise ConfigError(f"token range of group {name} is [{first}, {end}); 0 <= first <= end")
    return first, end


def _pages_of(pages: Mapping[str, Pages], group: Group, side: str) -> Pages:
    found = pages.get(group.name)
    if found is None:
        raise ConfigError(f"{side} pages of group {group.name} are missing")
    check_ids(group, found.ids, side=side)
    return found


def _digest(source: KVLayout, destination: KVLayout, owned: Owned) -> bytes:
    cells = [[c.group, c.part, c.layer, c.head_first, c.head_end] for c in owned.cells]
    form: list[object] = [
        ORDER_VERSION, source.map_digest.hex(), destination.map_digest.hex(), cells
    ]  # fmt: skip
    if owned.share.parts > 1:
        form.append([owned.share.part, owned.share.parts])
    return hashlib.sha256(canonical(form)).digest()


def _planned_groups(
    source: KVLayout, destination: KVLayout, pairs: list[PlanePair]
) -> dict[str, _PlannedGroup]:
    groups: dict[str, _PlannedGroup] = {}
    moved = {pair.destination.group for pair in pairs}
    for name, theirs in destination.group_by_name.items():
        if name in moved:
            groups[name] = _PlannedGroup(len(groups), source.group_by_name[name], theirs)
    for pair in pairs:
        groups[pair.destination.group].weigh(pair)
    return groups


def _compile(
    source: KVLayout,
    destination: KVLayout,
    groups: dict[str, _PlannedGroup],
    pairs: list[PlanePair],
) -> _core.Plan:
    rows = [pair.row(groups[pair.destination.group].index) for pair in pairs]
    with _native_errors():
        return _core.Plan(
            [
                (
                    name,
                    group.source.page_size,
                    group.source.pages,
                    group.source.reserved_pages,
                    group.destination.page_size,
                    group.destination.pages,
                    group.destination.reserved_pages,
                )
                for name, group in groups.items()
            ],
            np.array(rows, dtype=np.int64).reshape(-1, 16),
            [region.length_bytes for region in source.regions],
            [region.length_bytes for region in destination.regions],
            limits.RUNS_PER_PAGE_MAX,
            limits.RUNS_PER_REQUEST_MAX,
        )


@contextmanager
def _native_errors() -> Iterator[None]:
    """Errors of the native core as ours."""
    try:
        yield
    except _core.LimitError as error:
        raise ResourceError(str(error)) from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(str(error)) from error

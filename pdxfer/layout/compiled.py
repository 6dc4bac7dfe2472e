"""A compiled plan: what turns the page ids of a request into runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from pdxfer import _core, limits
from pdxfer.errors import ConfigError, LayoutMismatchError, ResourceError
from pdxfer.layout.canonical_order import OwnPages, pieces_in_order, ranked_pairs
from pdxfer.layout.groups import STATE
from pdxfer.layout.kv_layout import ORDER_VERSION, canonical
from pdxfer.layout.native_plan import compile_plan, native_errors
from pdxfer.layout.outline import Outline
from pdxfer.layout.pages import Pages, as_group_pages, check_ids
from pdxfer.layout.planned_groups import PlanePair, PlannedGroup, planned_groups
from pdxfer.layout.request import (
    Moved,
    TokenRange,
    are_several,
    checked_range,
    find_group,
    read_request,
    spans_of,
)
from pdxfer.layout.summary import GroupSummary, PlanSummary, lane_hint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.ownership import Owned

_NO_LIMIT: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The runs of a request, divided into batches.

    Shapes:  runs: int64 [n, 5], a row being source region, source offset, destination region,
             destination offset, length. splits: int64 [batches + 1]; batch b is the rows
             `splits[b]:splits[b + 1]` of runs.
    Units:   regions by number; offsets and lengths in bytes.
    """

    runs: NDArray[np.int64]
    splits: NDArray[np.int64]
    length_bytes: int
    """The lengths of all runs together; `Plan.length_bytes` says the same of the same ranges."""


class Plan:
    """How pages of a source layout become pages of a destination layout.

    `pdxfer.layout.plan` makes it. It cannot be changed; any thread may use it, and native code runs
    without the GIL.
    """

    def __init__(
        self, source: KVLayout, destination: KVLayout, pairs: list[PlanePair], owned: Owned
    ) -> None:
        self.source = source
        self.destination = destination
        self.owned = owned
        """The cells that this plan moves."""
        self._groups = planned_groups(source, destination, pairs)
        known = source.group_by_name.keys() | destination.group_by_name.keys()
        self._unmoved = frozenset(known - self._groups.keys())
        self._core = compile_plan(source, destination, self._groups, pairs)
        self._pairs = pairs
        self.digest: bytes = _digest(source, destination, owned)
        """32 bytes, equal on both sides: over planes, owned cells and the order version."""

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
        """The runs of a request as one array, of the shape of `Batches.runs`.

        Args:    source_pages, destination_pages: ids or `Pages` of the only group, or a mapping
                 from the names of groups to either. token_range: the tokens `[first, end)` that
                 move, of every group or by group; None: all that the page lists of both sides
                 hold, which must be the same tokens. layers: global layers of the source that
                 move; None: all.
        Raises:  ConfigError, ResourceError: where `batches` raises them.
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
        token_ranges: Mapping[str, Moved],
        layers: Iterable[int] | None = None,
        batch_bytes: int = limits.BATCH_BYTES,
    ) -> Batches:
        """The runs of a request, divided into batches.

        There is a batch for each group and layer where every run belongs to one layer; elsewhere
        batches have about `batch_bytes`, within which a run that grows over pages stays.

        Args:    source, destination: the pages of each group. token_ranges: the tokens `[first,
                 end)` of each group that moves, positions of ids in a state group; a list of such
                 ranges where pages between them are skipped. An end is rounded up to the page end
                 where pages on both sides cover the same tokens. layers: global layers of the
                 source that move; None: all. batch_bytes: size of a batch.
        Returns: runs that never overlap at the destination; none where this pair owes nothing.
        Raises:  ConfigError: ids outside of `reserved_pages <= id < pages` or repeated at the
                 destination, page lists that are too short, unknown groups or layers, a tile that
                 would be cut. ResourceError: more runs than `limits` allow. Nothing was written.
        Threads: any thread may call it; native code runs without the GIL.
        Cost:    about 20 ns for each run; the first request of a new shape compiles it.
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
        """The ranges of a request, cut to what this source worker owes of them.

        They come back as they are where context parallel ranks do not divide them (`Owned.share`).
        The shares of all source workers together are the ranges, each token once.

        Args:    ranges: the tokens `[first, end)` that the request moves, by group; positions of
                 ids in a state group. tokens: how many the whole request has. destination_first:
                 the first token of the pages at decode by group; 0 where left out.
        Raises:  ConfigError: pages of decode that do not begin at a multiple of the page size, so
                 that the end of a share would be inside of a page.
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
        token_ranges: Mapping[str, Moved],
        layers: Iterable[int] | None = None,
    ) -> Outline:
        """The runs of a request in outline, for `pdxfer.cuda.descriptors` to fill in on a GPU.

        Its rows are the runs of `batches`, in the same order, but no run grows over the next page.

        Args:    source, destination, token_ranges, layers: the arguments of `batches`.
        Raises:  ConfigError, ResourceError: where `batches` raises them.
        Threads: any thread may call it; native code runs without the GIL.
        Cost:    grows with the number of page ids: a few spans with equal page sizes, else up to
                 one for each page and layer.
        """
        chosen = self._chosen_layers(layers)
        request = read_request(self._groups, self._unmoved, source, destination, token_ranges)
        with native_errors():
            entries, spans, rows, length = self._core.outline(
                request.groups, None if chosen is None else sorted(chosen)
            )
        firsts = (request.source_first, request.destination_first)
        _check_length(length, self.length_bytes(token_ranges, *firsts, layers=chosen))
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
        token_ranges: Mapping[str, Moved],
        source_first: Mapping[str, int] | None = None,
        destination_first: Mapping[str, int] | None = None,
        layers: Iterable[int] | None = None,
    ) -> int:
        """How many bytes `batches` plans for these ranges, which no page id is needed to tell.

        Args:    token_ranges, layers: the arguments of `batches`. source_first, destination_first:
                 the first token of the pages of each side by group; 0 where left out, which any
                 other start of a page comes to as well.
        Raises:  ConfigError: an unknown group or layer.
        """
        chosen = self._chosen_layers(layers)
        total = 0
        for name, moved in token_ranges.items():
            group = self._planned_group(name)
            if group is None:
                continue
            firsts = ((source_first or {}).get(name, 0), (destination_first or {}).get(name, 0))
            rows, pages = group.row_bytes.of(chosen), group.page_bytes.of(chosen)
            for first, end in spans_of(moved):
                if first < end:
                    tokens = group.rounded_end(end, *firsts) - first
                    total += tokens * rows + tokens // group.destination.page_size * pages
        return total

    def source_pieces(
        self,
        source: Mapping[str, Pages],
        destination_first: Mapping[str, int],
        token_ranges: Mapping[str, Moved],
        layers: Iterable[int] | None = None,
    ) -> NDArray[np.int64]:
        """The bytes of a chunk in canonical order, where they are in the source's memory.

        Args:    source: pages by group. destination_first: `Pages.first_token` of decode's pages by
                 group; 0 where left out. token_ranges, layers: as `batches`.
        Returns: int64 [n, 3]: region, offset, length (bytes); neighbours in memory are one piece.
        Raises:  as `batches`.
        """
        firsts = {name: listed.first_token for name, listed in source.items()}
        exact = self.rounded(token_ranges, firsts, destination_first)
        return self._pieces(OwnPages(True, source, destination_first), exact, layers)

    def destination_pieces(
        self,
        destination: Mapping[str, Pages],
        token_ranges: Mapping[str, Moved],
        layers: Iterable[int] | None = None,
    ) -> NDArray[np.int64]:
        """The bytes of a chunk in canonical order, where they go in the destination's memory.

        Needs nothing of the source's pages: byte n of these pieces is byte n of `source_pieces`.

        Args:    destination: pages by group. token_ranges: as `rounded` gives them. layers: as
                 `batches`.
        Returns: int64 [n, 3]: region, offset, length (bytes); neighbours in memory are one piece.
        Raises:  as `batches`.
        """
        firsts = {name: listed.first_token for name, listed in destination.items()}
        return self._pieces(OwnPages(False, destination, firsts), token_ranges, layers)

    def rounded(
        self,
        token_ranges: Mapping[str, Moved],
        source_first: Mapping[str, int],
        destination_first: Mapping[str, int],
    ) -> dict[str, Moved]:
        """The ranges of groups that this plan moves, each end where the bytes really end.

        That is the page end where pages on both sides cover the same tokens. A receiver, which
        does not know where the source's pages begin, is told these.

        Args:    source_first, destination_first: `Pages.first_token` by group; 0 where left out.
        Raises:  ConfigError: an unknown group, a range that is none.
        """
        found: dict[str, Moved] = {}
        for name, moved in token_ranges.items():
            spans = [checked_range(name, span) for span in spans_of(moved)]
            group = self._planned_group(name)
            firsts = (source_first.get(name, 0), destination_first.get(name, 0))
            exact = [
                (first, group.rounded_end(end, *firsts))
                for first, end in spans
                if group is not None and first < end
            ]
            if exact:
                found[name] = exact if are_several(moved) else exact[0]
        return found

    def _pieces(
        self,
        own: OwnPages,
        ranges: Mapping[str, Moved],
        layers: Iterable[int] | None,
    ) -> NDArray[np.int64]:
        chosen = self._chosen_layers(layers)
        spans: dict[str, list[TokenRange]] = {}
        for name, moved in ranges.items():
            group = self._planned_group(name)
            spans[name] = [span for span in spans_of(moved) if span[0] < span[1]]
            if group is None or not spans[name]:
                continue
            side = group.source if own.is_source else group.destination
            listed = own.pages.get(name)
            which = "source" if own.is_source else "destination"
            if listed is None:
                raise ConfigError(f"{which} pages of group {name} are missing")
            check_ids(side, listed.ids, unique=not own.is_source, side=which)
            begin, reach = listed.first_token, listed.end_token(side.page_size)
            first, end = spans[name][0][0], spans[name][-1][1]
            if first < begin or end > reach:
                raise ConfigError(
                    f"{which} pages of group {name} hold tokens [{begin}, {reach}), the range is "
                    f"[{first}, {end})"
                )
        pairs = ranked_pairs(self._pairs, self.owned)
        return pieces_in_order(self._groups, pairs, own, spans, chosen)

    @cached_property
    def runs_per_page(self) -> float:
        """How many runs a destination page of every group takes, where no two pages touch."""
        return sum(group.runs_per_page for group in self.summary().groups)

    def summary(self) -> PlanSummary:
        """What this plan costs: runs and bytes of a page, the longest and the shortest run."""
        groups = []
        for name, group in self._groups.items():
            with native_errors():
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
        ranges: Mapping[str, Moved],
        layers: Iterable[int] | None,
        batch_bytes: int,
    ) -> Batches:
        chosen = None if layers is None else sorted(self._chosen_layers(layers) or ())
        listed = [*source.values(), *destination.values()]
        if any(are_several(moved) for moved in ranges.values()) or any(
            pages.skipped for pages in listed
        ):
            return self._stretches(source, destination, ranges, chosen, batch_bytes)
        plain = cast("Mapping[str, TokenRange]", ranges)
        return self._unbroken(source, destination, plain, chosen, batch_bytes)

    def _stretches(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        ranges: Mapping[str, Moved],
        chosen: list[int] | None,
        batch_bytes: int,
    ) -> Batches:
        """The runs between pages that are skipped, one stretch of tokens after the other."""
        read_request(self._groups, self._unmoved, source, destination, ranges)
        found: list[Batches] = []
        for name, moved in ranges.items():
            group = self._planned_group(name)
            if group is None:
                continue
            check_ids(group.destination, destination[name].ids, unique=True, side="destination")
            for span in spans_of(moved):
                mine = {name: source[name].stretch(group.source, span, "source")}
                theirs = {name: destination[name].stretch(group.destination, span, "destination")}
                found.append(self._unbroken(mine, theirs, {name: span}, chosen, batch_bytes))
        rows = np.cumsum([0, *(len(each.runs) for each in found)])
        runs = np.concatenate([np.zeros((0, 5), np.int64), *(each.runs for each in found)])
        if len(runs) > limits.RUNS_PER_REQUEST_MAX:
            raise ResourceError(
                f"{len(runs)} runs between skipped pages, at most {limits.RUNS_PER_REQUEST_MAX}"
            )
        splits = [each.splits[1:] + at for each, at in zip(found, rows, strict=False)]
        length = sum(each.length_bytes for each in found)
        return Batches(runs, np.concatenate([np.zeros(1, np.int64), *splits]), length)

    def _unbroken(
        self,
        source: Mapping[str, Pages],
        destination: Mapping[str, Pages],
        ranges: Mapping[str, TokenRange],
        chosen: list[int] | None,
        batch_bytes: int,
    ) -> Batches:
        if not self._unmoved.isdisjoint(ranges):
            ranges = {name: span for name, span in ranges.items() if name not in self._unmoved}
        try:
            runs, splits, length, expected = self._core.batches(
                ranges, source, destination, chosen, batch_bytes, batch_bytes
            )
        except (ValueError, OverflowError):
            # The native call says that something is wrong; this finds out what to say.
            read_request(self._groups, self._unmoved, source, destination, ranges)
            plain = {name: checked_range(name, span) for name, span in ranges.items()}
            with native_errors():
                runs, splits, length, expected = self._core.batches(
                    plain, source, destination, chosen, batch_bytes, batch_bytes
                )
        except _core.LimitError as error:
            raise ResourceError(str(error)) from error
        _check_length(length, expected)
        return Batches(runs, splits, length)

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

    def _planned_group(self, name: str) -> PlannedGroup | None:
        return find_group(self._groups, self._unmoved, name)


def _check_length(planned: int, expected: int) -> None:
    if planned != expected:
        raise LayoutMismatchError(
            f"planned {planned} bytes where {expected} are expected; nothing was sent",
            fields={"length_bytes": f"planned={planned}, expected={expected}"},
        )


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


def _digest(source: KVLayout, destination: KVLayout, owned: Owned) -> bytes:
    cells = [[c.group, c.part, c.layer, c.head_first, c.head_end] for c in owned.cells]
    form: list[object] = [
        ORDER_VERSION, source.map_digest.hex(), destination.map_digest.hex(), cells
    ]  # fmt: skip
    if owned.share.parts > 1:
        form.append([owned.share.part, owned.share.parts])
    return hashlib.sha256(canonical(form)).digest()

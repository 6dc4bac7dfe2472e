"""A chunk as a lane gets it: a plan, the pages of both sides, and the tokens and layers that move.

Pure. A lane that writes into the receiver's memory asks for runs; a lane whose receiver places the
bytes asks for intervals of the canonical order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdxfer.layout.pages import Pages
from pdxfer.layout.request import spans_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pdxfer.layout.compiled import Batches, Plan
    from pdxfer.layout.request import Moved, TokenRange


@dataclass(frozen=True, slots=True, eq=False)
class PlannedChunk:
    """What one source worker moves of one chunk into one destination worker.

    Shapes: `source` and `destination` are pages by group; `ranges` is `[first, end)` of each group
        that moves (tokens; positions of ids in a state group), a list where pages between ranges
        are skipped; `layers` are global layers, None
        means all.
    Units: `first_byte` is the offset of the first byte in the canonical order of the whole chunk;
        `whole` are the ranges of the whole chunk.
    """

    plan: Plan
    source: Mapping[str, Pages]
    destination: Mapping[str, Pages]
    ranges: Mapping[str, Moved]
    layers: tuple[int, ...] | None = None
    first_byte: int = 0
    whole: Mapping[str, Moved] | None = None
    """The ranges of the whole chunk; None where this is all of it."""

    @property
    def length_bytes(self) -> int:
        """Bytes that move, from cells and ranges alone.

        Raises: ConfigError: an unknown group or layer.
        """
        return self.plan.length_bytes(
            self.ranges, _firsts(self.source), _firsts(self.destination), layers=self.layers
        )

    @property
    def exact_ranges(self) -> dict[str, Moved]:
        """The ranges with each end where the bytes really end; what a placing receiver is told.

        Raises: ConfigError: an unknown group, a range that is none.
        """
        firsts = (_firsts(self.source), _firsts(self.destination))
        return self.plan.rounded(self.chunk_ranges, *firsts)

    @property
    def chunk_ranges(self) -> Mapping[str, Moved]:
        """The ranges of the whole chunk, of which this may be an interval."""
        return self.ranges if self.whole is None else self.whole

    def batches(self) -> Batches:
        """The runs, in batches; see `Plan.batches` for errors and cost."""
        return self.plan.batches(self.source, self.destination, self.ranges, self.layers)

    def source_pieces(self) -> NDArray[np.int64]:
        """The bytes in canonical order in the source's memory: int64 [n, 3] region, offset, length.

        The first piece holds byte `first_byte` of the chunk.
        """
        return self.plan.source_pieces(
            self.source, _firsts(self.destination), self.ranges, self.layers
        )

    def intervals(self, runs_max: int) -> Iterator[PlannedChunk]:
        """This chunk in stretches of the canonical order that need about `runs_max` runs each.

        Every stretch begins and ends at a destination page, and holds bytes: what has none, such as
        a group of which no chosen layer goes to this destination, is left out. A chunk that is
        small enough comes back as it is; nothing is planned before it is asked for.
        """
        pages_max = max(1, int(runs_max / max(self.plan.runs_per_page, 1e-9)))
        if self.pages <= pages_max:
            yield self
            return
        first_byte = self.first_byte
        for name in sorted(self.ranges, key=str.encode):
            for span in self._steps(name, pages_max):
                part = replace(
                    self, ranges={name: span}, first_byte=first_byte, whole=self.chunk_ranges
                )
                length_bytes = part.length_bytes
                if length_bytes:
                    first_byte += length_bytes
                    yield part

    @property
    def pages(self) -> int:
        """Destination pages that the ranges touch; states count one an id."""
        sizes = {group.name: group.page_size for group in self.plan.destination.groups}
        return sum(
            -(-(end - first) // sizes[name])
            for name, moved in self.ranges.items()
            for first, end in spans_of(moved)
        )

    def _steps(self, name: str, pages_max: int) -> Iterator[TokenRange]:
        sizes = [
            next(group.page_size for group in layout.groups if group.name == name)
            for layout in (self.plan.source, self.plan.destination)
        ]
        listed = self.destination.get(name)
        begin_of_pages = listed.first_token if listed is not None else 0
        step = pages_max * sizes[1]
        for first, end in spans_of(self.ranges[name]):
            at = first
            while at < end:
                # Up to a page end of the destination, so that stretches are whole pages there.
                stop = begin_of_pages + ((at - begin_of_pages) // sizes[1]) * sizes[1] + step
                yield at, min(stop, end)
                at = min(stop, end)


def _firsts(pages: Mapping[str, Pages]) -> dict[str, int]:
    return {name: listed.first_token for name, listed in pages.items()}

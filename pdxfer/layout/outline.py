"""A request's runs in outline: what a GPU fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What is needed to compute each run of a request on its own; `Plan.outline` makes it.

    Row r lies in the last span whose first row is not beyond r; its page is
    `(r - first_row) // entries` of that span, its entry `(r - first_row) % entries`, its offset on
    either side the entry's offset plus the page's id times the entry's page stride.

    Shapes:  entries int64 [e, 8]: source offset, destination offset, length, source page stride,
             destination page stride, source region, destination region, bytes of the page's earlier
             entries. spans int64 [s, 12]: first row, bytes of all earlier rows, position of the
             first page in source_ids and in destination_ids, pages, first entry, entries, bytes a
             page, then the valid ids `first <= id < end` of the source and of the destination.
             source_ids, destination_ids int64: those of all groups, one group after the other.
    Units:   bytes; offsets from the start of a region.
    """

    entries: NDArray[np.int64]
    spans: NDArray[np.int64]
    source_ids: NDArray[np.int64]
    destination_ids: NDArray[np.int64]
    rows: int
    """Number of runs."""
    length_bytes: int
    """Bytes of all runs together, which a staging buffer must hold."""

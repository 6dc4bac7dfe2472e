"""Which tokens the chunks of one send cover: the same rules for a worker and its agent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdxfer.errors import ConfigError
from pdxfer.layout import Group, KVLayout, Pages
from pdxfer.protocol.given import does_not_fit
from pdxfer.protocol.ranges import Ranges

_Ends = dict[tuple[str, int | None], int]


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """What one more chunk covers, as `Extent.check` has found; nothing counts before `take`."""

    pages: dict[str, Pages]
    """The pages of each group, with the token that they begin at and without a page that was
    trimmed."""
    ranges: Ranges
    tokens: int | None
    """Tokens of the whole request, as far as this chunk tells."""
    last: bool
    ends: _Ends
    """(group, layer) to the token behind this chunk."""


@dataclass(slots=True)
class Extent:
    """How far the chunks of a send have come.

    Args:  room: for error texts. layout: of the source worker. shares_pages: a context parallel
           rank, which may hold a share of the pages only.
    """

    room: int
    layout: KVLayout
    shares_pages: bool = False
    tokens: int | None = None
    """Tokens of the whole request; None: not told yet."""
    complete: bool = False
    """The last chunk has come."""
    _ends: _Ends = field(default_factory=dict)
    """(group, layer) to the token where its next chunk begins; layer None: all layers."""

    def check(
        self,
        pages: Mapping[str, Pages],
        tokens: int | None,
        layers: Iterable[int] | None,
        *,
        last: bool,
        trim: bool = False,
    ) -> ChunkExtent:
        """What one more chunk covers; changes nothing.

        Args:
            pages: by group; plain lists begin where the previous chunk of these layers ended.
            tokens: of the whole request; None: as told before, or to the end of the last page.
            layers: whose bytes these are; None: all.
            last: nothing follows.
            trim: leave the last page of a list out where it lies behind the last token, whole.

        Raises:
            ConfigError: the pages do not fit the tokens, or a chunk follows the last one.
        """
        if self.complete:
            raise ConfigError(f"room {self.room}: a chunk follows the one given with last=True")
        total = self.tokens if tokens is None else tokens
        if self.tokens is not None and total != self.tokens:
            raise ConfigError(f"room {self.room}: tokens={tokens} after tokens={self.tokens}")
        listed = dict(pages)
        ranges: Ranges = {}
        ends: _Ends = {}
        keys: list[int | None] = [None] if layers is None else list(layers)
        for group in self.layout.groups:
            if group.name not in pages:
                continue
            if group.kind == "state":
                ranges[group.name] = self._state_range(group.name, pages, total, last=last)
                continue
            first = self._first(group.name, pages[group.name], keys)
            own = pages[group.name].at(first)
            own.check_skipped(group)
            own, end = self._end(group, own, total, trim=trim)
            whole = last and layers is None and not self.shares_pages
            if total is not None and end < total and whole:
                raise does_not_fit(self.room, group, own, total, trim=trim)
            ranges[group.name], listed[group.name] = (first, end), own
            ends.update({(group.name, key): end for key in keys})
        if last and total is None:
            total = max([*self._ends.values(), *ends.values()], default=0)
        return ChunkExtent(listed, ranges, total, last, ends)

    def take(self, chunk: ChunkExtent) -> None:
        """The chunk that was checked has been given."""
        self._ends.update(chunk.ends)
        self.tokens, self.complete = chunk.tokens, chunk.last

    def _state_range(
        self, name: str, pages: Mapping[str, Pages], total: int | None, *, last: bool
    ) -> tuple[int, int]:
        if not last:
            raise ConfigError(
                f"room {self.room}: ids of state group {name} go with the last chunk, when the "
                "state is final"
            )
        if total == 0 and len(pages[name].ids):
            raise ConfigError(
                f"room {self.room}: {len(pages[name].ids)} id(s) of state group {name}, but "
                "tokens=0 moves nothing; leave them out"
            )
        return (0, len(pages[name].ids))

    def _first(self, name: str, listed: Pages, keys: list[int | None]) -> int:
        """Where a list begins."""
        starts = {self._end_of(name, key) for key in keys}
        if len(starts) != 1:
            raise ConfigError(
                f"room {self.room}: layers {keys} of group {name} stand at different tokens "
                f"{sorted(starts)}; send them in separate chunks"
            )
        first = starts.pop()
        if listed.first_token and listed.first_token < first:
            raise ConfigError(
                f"room {self.room}: first_token={listed.first_token} of group {name}, but its "
                f"earlier chunks end at token {first}; pages are sent once"
            )
        return max(first, listed.first_token)

    def _end(self, group: Group, own: Pages, total: int | None, *, trim: bool) -> tuple[Pages, int]:
        """The list, less a page that is trimmed, and where it ends: at `total` at the latest."""
        size = group.page_size
        end = own.end_token(size)
        if total is None or end <= total:
            return own, end
        spare = min(end - total, end - own.first_token) // size
        if spare == 1 and trim:
            own = own.without_last(size)
        elif spare:
            raise does_not_fit(self.room, group, own, total, trim=trim)
        return own, max(total, own.first_token)

    def _end_of(self, group: str, layer: int | None) -> int:
        whole = self._ends.get((group, None), 0)
        if layer is None:
            return max([whole, *(v for (g, _), v in self._ends.items() if g == group)])
        return self._ends.get((group, layer), whole)

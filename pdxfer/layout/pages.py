"""Page ids of a request, and whether they may travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import _core
from pdxfer.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The page ids of one group of a request, in the order of its tokens.

    Shapes:  ids: int64 [pages], read-only; any one-dimensional array of integers is taken, and one
             integer for one page.
    Units:   first_token: the token of the request that row 0 of the first page stands for, which
             may be a page that is skipped. skipped: ranges `[first, end)` of tokens, whole pages
             and in order, for which there is no page; `ids` does not hold any for them.
    Raises:  ConfigError: ids that are no integers of 63 bits in one dimension, a negative
             first_token, ranges that are empty, overlap or begin before first_token.
    """

    ids: NDArray[np.int64]
    first_token: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _as_ids(self.ids))
        if isinstance(self.first_token, bool) or not isinstance(self.first_token, int):
            raise ConfigError(f"first_token is {self.first_token!r}; it must be an int")
        if not 0 <= self.first_token < 1 << 62:
            raise ConfigError(f"first_token is {self.first_token}; it must be 0 or more")
        least = self.first_token
        for first, end in self.skipped:
            if not least <= first < end < 1 << 62:
                raise ConfigError(
                    f"skipped tokens [{first}, {end}): ranges begin at token {least} or later, are "
                    "not empty, and come in order"
                )
            least = end

    def __len__(self) -> int:
        return len(self.ids)

    def end_token(self, page_size: int) -> int:
        """The token behind the last page, be it skipped or not."""
        skipped = sum(end - first for first, end in self.skipped)
        return self.first_token + len(self.ids) * page_size + skipped

    def at(self, first_token: int) -> Pages:
        """The same pages, the first of them at another token."""
        if first_token == self.first_token:
            return self
        by = first_token - self.first_token
        return Pages(self.ids, first_token, tuple((a + by, b + by) for a, b in self.skipped))

    def without_last(self, page_size: int) -> Pages:
        """All but the last page, be it skipped or not."""
        end = self.end_token(page_size)
        if not self.skipped or self.skipped[-1][1] < end:
            return Pages(self.ids[:-1], self.first_token, self.skipped)
        *before, (first, last) = self.skipped
        rest = [(first, last - page_size)] if last - page_size > first else []
        return Pages(self.ids, self.first_token, (*before, *rest))

    def check_skipped(self, group: Group) -> None:
        """Refuse skipped tokens that are no whole pages of the group, or lie behind its last page.

        Raises:  ConfigError naming the group and the tokens.
        """
        size, end = group.page_size, self.end_token(group.page_size)
        for first, stop in self.skipped:
            aligned = (first - self.first_token) % size == 0 == (stop - first) % size
            if not aligned or stop > end:
                raise ConfigError(
                    f"skipped tokens [{first}, {stop}) of group {group.name} are no whole pages of "
                    f"{size} tokens within [{self.first_token}, {end})"
                )

    def stretch(self, group: Group, span: tuple[int, int], side: str) -> Pages:
        """The pages around a range of tokens, between those that are skipped.

        Args:    side: `source` or `destination`, for the error text.
        Raises:  ConfigError: tokens of the range are skipped.
        """
        if not self.skipped:
            return self
        self.check_skipped(group)
        size, begin, at = group.page_size, self.first_token, 0
        for first, end in (*self.skipped, (self.end_token(group.page_size), 1 << 62)):
            count = (first - begin) // size
            if begin <= span[0] and span[1] <= max(first, begin):
                return Pages(self.ids[at : at + count], begin)
            if span[0] < end:
                break
            begin, at = end, at + count
        gaps = ", ".join(f"[{a}, {b})" for a, b in self.skipped if a < span[1] and span[0] < b)
        raise ConfigError(
            f"{side} pages of group {group.name} skip tokens {gaps or 'none'}, the range is "
            f"[{span[0]}, {span[1]})",
            fields={"group": group.name, "skipped": gaps},
        )


def kept(span: tuple[int, int], skipped: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """What is left of a range of tokens without those that are skipped."""
    left, (begin, stop) = [], span
    for first, end in skipped:
        if end <= begin or first >= stop:
            continue
        if begin < first:
            left.append((begin, first))
        begin = end
    if begin < stop:
        left.append((begin, stop))
    return left


def _as_ids(ids: object) -> NDArray[np.int64]:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"page ids are no array: {error}") from error
    if np.ma.is_masked(ids):
        raise ConfigError(
            f"page ids {repr(ids)[:80]} are masked in part, which names no pages: give the ids "
            "that count, such as ids.compressed()"
        )
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros(0, np.int64)
    elif array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"page ids {repr(ids)[:80]} have dtype {array.dtype} and {array.ndim} dimensions; a "
            "one-dimensional array of integers is needed"
        )
    if array.dtype == np.uint64 and int(array.max(initial=0)) >= 1 << 63:
        raise ConfigError(f"page id {int(array.max())} is over 63 bits")
    result = np.array(array, dtype=np.int64, order="C")
    result.flags.writeable = False
    return result


def as_group_pages(layout: KVLayout, pages: object) -> dict[str, Pages]:
    """The pages of a request, as one `Pages` for each group.

    Args:    pages: ids (or `Pages`) of the layout's only group, or a mapping from the names of
             groups to either.
    Raises:  ConfigError: a group that the layout lacks, or bare ids where it has several groups.
    """
    if isinstance(pages, Mapping):
        unknown = [name for name in pages if name not in layout.group_by_name]
        if unknown:
            raise ConfigError(
                f"pages name group {unknown[0]!r}; the layout has {', '.join(layout.group_by_name)}"
            )
        return {name: _as_pages(value) for name, value in pages.items()}
    if len(layout.groups) != 1:
        raise ConfigError(
            f"the layout has {len(layout.groups)} groups ({', '.join(layout.group_by_name)}); "
            "pages must be a mapping from group to ids"
        )
    return {layout.groups[0].name: _as_pages(pages)}


def _as_pages(value: object) -> Pages:
    return value if isinstance(value, Pages) else Pages(_as_ids(value))


def check_page_ids(
    layout: KVLayout, group: str, ids: NDArray[np.int64], *, unique: bool = False
) -> None:
    """Refuse page ids that may not travel.

    Args:    unique: also refuse an id that appears twice, as destination pages of one request must
             not.
    Raises:  ConfigError: an id outside of `reserved_pages <= id < pages`, or one that appears
             twice; the text names the id, its position and the range.
    Cost:    one pass, of a few nanoseconds for each id.
    """
    spec = layout.group_by_name.get(group)
    if spec is None:
        raise ConfigError(f"no group {group!r}; the layout has {', '.join(layout.group_by_name)}")
    check_ids(spec, ids, unique=unique)


def check_ids(spec: Group, ids: NDArray[np.int64], *, unique: bool = False, side: str = "") -> None:
    """Do what `check_page_ids` does, for one group; `side` is how the text begins."""
    where = f"{side} page id" if side else "page id"
    at = _core.first_bad_id(ids, spec.reserved_pages, spec.pages)
    if at >= 0:
        raise ConfigError(
            f"{where} {int(ids[at])} of group {spec.name} at position {at} is outside "
            f"{spec.reserved_pages} <= id < {spec.pages} (reserved_pages, pages)",
            fields={"page_id": str(int(ids[at])), "position": str(at), "group": spec.name},
        )
    at = _core.first_repeated_id(ids, spec.pages) if unique else -1
    if at >= 0:
        raise ConfigError(
            f"{where} {int(ids[at])} of group {spec.name} at position {at} appeared before; "
            "each destination page may be named once",
            fields={"page_id": str(int(ids[at])), "position": str(at), "group": spec.name},
        )

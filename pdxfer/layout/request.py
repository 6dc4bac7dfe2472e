"""A request for the native core: page ids and token ranges by group, checked one by one.

The native core checks them too; what it refuses is looked at again here, for errors with names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from pdxfer.errors import ConfigError
from pdxfer.layout.pages import check_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from pdxfer.layout.groups import Group
    from pdxfer.layout.pages import Pages
    from pdxfer.layout.planned_groups import PlannedGroup

_TOKEN_END: Final = 1 << 62

TokenRange = tuple[int, int]
"""A range `[first, end)` of tokens of the request; of positions of ids in a state group."""

Moved = TokenRange | list[TokenRange]
"""What moves of a group: one range, or several in order where pages between them are skipped."""

GroupRequest = tuple[int, "NDArray[np.int64]", int, "NDArray[np.int64]", int, int, int]


@dataclass(frozen=True, slots=True)
class Request:
    """Page ids and token ranges of a request, as the native core takes them."""

    groups: list[GroupRequest] = field(default_factory=list)
    source_first: dict[str, int] = field(default_factory=dict)
    destination_first: dict[str, int] = field(default_factory=dict)


def read_request(
    groups: Mapping[str, PlannedGroup],
    unmoved: Collection[str],
    source: Mapping[str, Pages],
    destination: Mapping[str, Pages],
    ranges: Mapping[str, Moved],
) -> Request:
    """The pages of a request, with every id checked.

    Args:    groups: the groups of the plan by name. unmoved: names of the other groups of the two
             layouts, of which this pair owes nothing.
    Raises:  ConfigError: an id outside of the pool, pages or groups that are missing, a range that
             is none; the text names it.
    """
    request = Request()
    for name, moved in ranges.items():
        group = find_group(groups, unmoved, name)
        if group is None:
            continue
        all_mine = _pages_of(source, group.source, "source")
        all_theirs = _pages_of(destination, group.destination, "destination")
        request.source_first[name] = all_mine.first_token
        request.destination_first[name] = all_theirs.first_token
        for span in spans_of(moved):
            first, end = checked_range(name, span)
            mine = all_mine.stretch(group.source, (first, end), "source")
            theirs = all_theirs.stretch(group.destination, (first, end), "destination")
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


def spans_of(moved: Moved) -> list[TokenRange]:
    """The ranges of a group that move, in order."""
    return cast("list[TokenRange]", moved) if are_several(moved) else [cast("TokenRange", moved)]


def are_several(moved: Moved) -> bool:
    """Whether it is a list of ranges, be there one or none in it; else it is one range."""
    return isinstance(moved, list) and all(isinstance(each, tuple | list) for each in moved)


def find_group(
    groups: Mapping[str, PlannedGroup], unmoved: Collection[str], name: str
) -> PlannedGroup | None:
    """The group of a plan by its name; None where this pair owes nothing of it.

    Raises:  ConfigError: neither layout has it.
    """
    group = groups.get(name)
    if group is None and name not in unmoved:
        known = ", ".join(sorted({*groups, *unmoved}))
        raise ConfigError(f"no group {name!r}; the layouts have {known}")
    return group


def checked_range(name: str, token_range: TokenRange) -> TokenRange:
    """A token range as a pair of plain ints.

    Raises:  ConfigError: it is no range; the text names the group.
    """
    try:
        first, end = (operator.index(token) for token in token_range)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"token range of group {name} is {token_range!r}; two integers are needed"
        ) from error
    if not 0 <= first <= end < _TOKEN_END:
        raise ConfigError(f"token range of group {name} is [{first}, {end}); 0 <= first <= end")
    return first, end


def _pages_of(pages: Mapping[str, Pages], group: Group, side: str) -> Pages:
    found = pages.get(group.name)
    if found is None:
        raise ConfigError(f"{side} pages of group {group.name} are missing")
    check_ids(group, found.ids, side=side)
    return found

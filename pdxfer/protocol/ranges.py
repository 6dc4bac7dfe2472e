"""Which tokens of a request travel. Pure, and the same on both sides."""

from __future__ import annotations

from collections.abc import Mapping

from pdxfer.layout import KVLayout, Pages

Ranges = dict[str, tuple[int, int]]
"""Group to `[first, end)`: tokens of the request; positions of ids in a state group."""


def owed_ranges(
    layout: KVLayout, placed: Mapping[str, Pages], prefix_tokens: int, tokens: int
) -> Ranges:
    """What one transfer is: all of each group that decode has placed pages for.

    A group whose pages begin behind the prefix (a window) is owed from there on; a state group is
    owed whole.
    """
    ranges: Ranges = {}
    for group in layout.groups:
        listed = placed.get(group.name)
        if listed is None:
            continue
        if group.kind == "state":
            ranges[group.name] = (0, len(listed.ids))
        else:
            ranges[group.name] = (max(prefix_tokens, listed.first_token), tokens)
    return ranges

"""Which tokens of a request travel. Pure, and the same on both sides."""

from __future__ import annotations

from collections.abc import Mapping

from pdxfer.layout import KVLayout, Pages, Plan, kept

Ranges = dict[str, tuple[int, int]]
"""The range `[first, end)` of each group: tokens of the request, or positions of ids in a state
group."""
Spans = dict[str, list[tuple[int, int]]]
"""Group to the ranges of it that move, in order: what lies between them is skipped by decode."""


def owed_ranges(
    plan: Plan, layout: KVLayout, placed: Mapping[str, Pages], prefix_tokens: int, tokens: int
) -> Ranges:
    """What one source worker owes a transfer, of each group that decode has placed pages for.

    A group whose pages begin behind the prefix (a window) is owed from there on; a state group is
    owed whole. Context parallel ranks divide it by pages.
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
    firsts = {name: listed.first_token for name, listed in placed.items()}
    return plan.share(ranges, tokens, firsts)


def moving_spans(ranges: Mapping[str, tuple[int, int]], placed: Mapping[str, Pages]) -> Spans:
    """The ranges without the tokens for which decode has no page: those of `placed`."""
    return {name: kept(span, placed[name].skipped) for name, span in ranges.items()}

"""Page ids on their way to the agent: checked against the layout, placed in the request, packed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import limits
from pdxfer.client.arguments import check_id, shown
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.layout import Pages, as_group_pages, check_page_ids
from pdxfer.protocol.group_pages import pack_group

if TYPE_CHECKING:
    from pdxfer.layout import Group, KVLayout
    from pdxfer.wire.messages import GroupPages


def token_groups(layout: KVLayout) -> list[Group]:
    """Groups whose pages stand for tokens of the request."""
    return [group for group in layout.groups if group.kind == "token"]


def normalise(
    layout: KVLayout,
    pages: object,
    first_tokens: Mapping[str, int],
    *,
    unique: bool = False,
    null_page: int | None = None,
) -> dict[str, Pages]:
    """What a caller gave as `pages`, by group, checked.

    Args:
        layout: of the worker's own cache.
        pages: ids of the only group, or `{group: ids}`; `Pages` in place of ids says itself where
            they begin.
        first_tokens: by group, the token where plain ids begin.
        unique: refuse an id that appears twice, as written pages must.
        null_page: the id that stands for no page in token groups; None: there is none.

    Raises: ConfigError naming the group, the id, its position and the range; ResourceError when
        there are too many for one message.
    """
    placed = {}
    for name, given in as_group_pages(layout, pages).items():
        first = first_tokens.get(name, 0)
        stated = isinstance(pages[name] if isinstance(pages, Mapping) else pages, Pages)
        listed = given if stated else given.at(first)
        if null_page is not None:
            listed = _without_null(layout.group_by_name[name], listed, null_page)
        check_page_ids(layout, name, listed.ids, unique=unique)
        placed[name] = listed
    count = sum(len(given.ids) for given in placed.values())
    if count > limits.PAGES_PER_MESSAGE_MAX:
        raise ResourceError(
            f"{count} page ids in one call, at most {limits.PAGES_PER_MESSAGE_MAX}: "
            "use larger pages, or send in chunks"
        )
    return placed


def _without_null(group: Group, listed: Pages, null_page: int) -> Pages:
    """Each list without the ids that stand for no page. Lists of states have none.

    Raises: ConfigError: the id is one of a page.
    """
    null = check_id("null_page", null_page)
    if group.kind != "token":
        return listed
    if group.reserved_pages <= null < group.pages:
        raise ConfigError(
            f"null_page={null} is a page of group {group.name}, whose ids are "
            f"{group.reserved_pages} <= id < {group.pages}: only an id that is none can stand for "
            "no page"
        )
    is_null = listed.ids == null
    if not is_null.any():
        return listed
    if listed.skipped:
        raise ConfigError(
            f"group {group.name}: null_page={null} goes with a list of ids, not with "
            "Pages(skipped=...)"
        )
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_null, [False])))).reshape(-1, 2)
    tokens = (edges * group.page_size + listed.first_token).tolist()
    skipped = tuple((first, end) for first, end in tokens)
    return Pages(listed.ids[~is_null], listed.first_token, skipped)


def end_token(layout: KVLayout, groups: Mapping[str, Pages]) -> int | None:
    """The token behind the last page of the groups that have tokens; None without such pages."""
    ends = [
        groups[group.name].end_token(group.page_size)
        for group in token_groups(layout)
        if group.name in groups
    ]
    return max(ends, default=None)


def check_layers(layout: KVLayout, layers: Iterable[int]) -> list[int]:
    """The layers in order, each once. Raises: ConfigError naming those the cache does not have."""
    try:
        chosen = {operator.index(layer) for layer in layers}
    except TypeError as error:
        raise ConfigError(
            f"layers={shown(layers)}: must be global layer ids, such as [0, 1], or None for all"
        ) from error
    if not chosen or not chosen <= set(layout.layers):
        raise ConfigError(
            f"layers={sorted(chosen)}: must be some of this cache's layers {list(layout.layers)}"
        )
    return sorted(chosen)


def pack(groups: Mapping[str, Pages]) -> dict[str, GroupPages]:
    """The pages of each group as they travel to the agent: packed ids with their first token."""
    return {name: pack_group(listed) for name, listed in groups.items()}

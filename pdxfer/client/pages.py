"""Page ids on their way to the agent: checked against the layout, placed in the request, packed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client.arguments import shown
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.layout import Pages, as_group_pages, check_page_ids
from pdxfer.wire.messages import GroupPages
from pdxfer.wire.pages import pack_ids

if TYPE_CHECKING:
    from pdxfer.layout import Group, KVLayout


def token_groups(layout: KVLayout) -> list[Group]:
    """Groups whose pages stand for tokens of the request."""
    return [group for group in layout.groups if group.kind == "token"]


def normalise(
    layout: KVLayout, pages: object, first_tokens: Mapping[str, int], *, unique: bool = False
) -> dict[str, Pages]:
    """What a caller gave as `pages`, by group, checked.

    Args:
        layout: of the worker's own cache.
        pages: ids of the only group, or `{group: ids}`; `Pages` in place of ids says itself where
            they begin.
        first_tokens: by group, the token where plain ids begin.
        unique: refuse an id that appears twice, as written pages must.

    Raises: ConfigError naming the group, the id, its position and the range; ResourceError when
        there are too many for one message.
    """
    placed = {}
    for name, given in as_group_pages(layout, pages).items():
        check_page_ids(layout, name, given.ids, unique=unique)
        first = first_tokens.get(name, 0)
        stated = isinstance(pages[name] if isinstance(pages, Mapping) else pages, Pages)
        placed[name] = given if stated or not first else Pages(given.ids, first)
    count = sum(len(given.ids) for given in placed.values())
    if count > limits.PAGES_PER_MESSAGE_MAX:
        raise ResourceError(
            f"{count} page ids in one call, at most {limits.PAGES_PER_MESSAGE_MAX}: "
            "use larger pages, or send in chunks"
        )
    return placed


def end_token(layout: KVLayout, groups: Mapping[str, Pages]) -> int | None:
    """The token behind the last page of the groups that have tokens; None without such pages."""
    ends = [
        groups[group.name].first_token + len(groups[group.name].ids) * group.page_size
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
    """As they travel."""
    packed = {}
    for name, given in groups.items():
        encoding, ids = pack_ids(given.ids)
        packed[name] = GroupPages(first_token=given.first_token, encoding=encoding, ids=ids)
    return packed

"""What decode tells of its pages, and what it holds the words of prefill against. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pdxfer import limits
from pdxfer.errors import ConfigError, PdxferError, from_wire
from pdxfer.layout import Group, KVLayout, Moved, Pages, check_page_ids
from pdxfer.protocol.decode.live_receive import LiveReceive, ReceiveLeg, SourceKey
from pdxfer.protocol.given import does_not_fit
from pdxfer.protocol.group_pages import pack_group
from pdxfer.protocol.ranges import moving_spans, owed_ranges
from pdxfer.wire.messages import Chunk, CommitPayload, Failed, Place


def place_message(receiving: LiveReceive, key: SourceKey) -> Place:
    """Where the pages go, for one source worker; `Receives.tell` comes before it."""
    leg, groups = receiving.legs[key], {}
    if leg.plan is not None:
        pages = receiving.pages or {}
        owed = owed_ranges(
            leg.plan, receiving.layout, pages, receiving.prefix_tokens, receiving.tokens
        )
        leg.expected_bytes = leg.plan.length_bytes(moving_spans(owed, pages))
        for name, listed in pages.items():
            groups[name] = pack_group(listed)
    return Place(
        generation=receiving.generation,
        source_worker=key[1],
        tokens=receiving.tokens,
        prefix_tokens=receiving.prefix_tokens,
        groups=groups,
    )


def check_places(
    layout: KVLayout,
    room: int,
    pages: Mapping[str, Pages],
    tokens: int,
    prefix_tokens: int,
    *,
    trim: bool = False,
) -> dict[str, Pages]:
    """The pages of every group; they hold exactly the tokens that may move.

    Args:
        layout: of the worker.
        room: for error texts.
        pages: by group.
        tokens: of the whole request.
        prefix_tokens: of them, those that are in the pool already.
        trim: leave the last page of a list out where it lies behind the last token, whole.

    Raises:
        ConfigError: a group is missing or unknown, an id out of range, a list too short or long.
    """
    if not 0 <= prefix_tokens <= tokens:
        raise ConfigError(
            f"room {room}: prefix_tokens={prefix_tokens} is more than tokens={tokens}, or negative"
        )
    placed: dict[str, Pages] = {}
    for group in layout.groups:
        listed = pages.get(group.name, None if tokens else Pages(np.zeros(0, np.int64)))
        if listed is None:
            raise ConfigError(f"room {room}: no pages of group {group.name}")
        check_page_ids(layout, group.name, listed.ids)
        if group.kind == "state":
            if not tokens and len(listed.ids):
                raise ConfigError(
                    f"room {room}: {len(listed.ids)} id(s) of state group {group.name}, but "
                    "tokens=0 moves nothing; leave them out"
                )
            if listed.skipped:
                raise ConfigError(f"room {room}: state group {group.name} skips no ids")
            placed[group.name] = listed
            continue
        placed[group.name] = _fitted(room, group, listed, tokens, prefix_tokens, trim=trim)
    unknown = pages.keys() - placed.keys()
    if unknown:
        raise ConfigError(
            f"room {room}: group {min(unknown)} is not of this layout, "
            f"which has {', '.join(placed)}"
        )
    return placed


def _fitted(
    room: int, group: Group, listed: Pages, tokens: int, prefix_tokens: int, *, trim: bool
) -> Pages:
    """The pages of a token group, which hold exactly the tokens that may move."""
    size, first = group.page_size, listed.first_token
    if first % size:
        raise ConfigError(
            f"room {room}: first_token={first} of group {group.name} is not the start of a page "
            f"of {size} tokens"
        )
    listed.check_skipped(group)
    needed = max(0, -(-(tokens - first) // size))
    count = (listed.end_token(size) - first) // size
    if trim and count == needed + 1:
        listed, count = listed.without_last(size), needed
    moves = tokens > prefix_tokens or not tokens
    if count != needed and moves:
        raise does_not_fit(room, group, listed, tokens, trim=trim)
    return listed


def chunk_fault(receiving: LiveReceive, leg: ReceiveLeg, message: Chunk) -> str:
    """What is wrong with the announcement of a chunk, in words; empty: it is what is planned."""
    chunk = f"chunk {message.number} of room {receiving.room}"
    ranges: dict[str, Moved] = {
        name: [(each.first, each.end) for each in spans] for name, spans in message.ranges.items()
    }
    layers = None if message.layers is None else tuple(message.layers)
    try:
        planned = leg.plan.length_bytes(ranges, layers=layers) if leg.plan is not None else 0
    except ConfigError as error:
        return f"{chunk}: {error}"
    if planned != message.length_bytes:
        return f"{chunk} announces {message.length_bytes} bytes, its plan here has {planned}"
    return ""


def commit_fault(receiving: LiveReceive, leg: ReceiveLeg, payload: CommitPayload) -> str:
    """What is wrong with a commit, in words; empty: it is what was planned and expected."""
    room = f"room {receiving.room}"
    if leg.plan is None or receiving.pages is None:
        who = f"prefill worker {payload.source_worker}"
        return f"{room}: a commit from {who}, which was told no page"
    if payload.length_bytes != leg.expected_bytes:
        return (
            f"{room}: the commit says {payload.length_bytes} bytes, "
            f"{leg.expected_bytes} are expected"
        )
    if payload.runs > payload.length_bytes:
        return f"{room}: the commit says {payload.runs} runs of {payload.length_bytes} bytes in all"
    if payload.digest != leg.plan.digest:
        return f"{room}: the commit names another plan"
    if len(payload.aux) > limits.AUX_BYTES_MAX:
        return f"{room}: aux has {len(payload.aux)} bytes, at most {limits.AUX_BYTES_MAX}"
    return ""


def failure_of(message: Failed) -> PdxferError:
    """Why a prefill worker has failed, as it says."""
    return from_wire(
        {
            "code": message.code,
            "text": message.text,
            "retryable": message.retryable,
            "fields": message.fields,
        }
    )

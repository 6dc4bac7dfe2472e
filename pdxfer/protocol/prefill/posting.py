"""Chunks become posts: what one chunk of a send means for one leg. Pure."""

from __future__ import annotations

from pdxfer import limits
from pdxfer.errors import ResourceError, TransferError
from pdxfer.layout import Moved, Pages, Plan, PlannedChunk, check_page_ids
from pdxfer.protocol.effects import Effect, Post, PostCommit
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.prefill.live_send import LiveChunk, LiveSend, SendLeg
from pdxfer.protocol.ranges import Ranges, Spans, moving_spans, owed_ranges
from pdxfer.wire.messages import Chunk as ChunkMessage
from pdxfer.wire.messages import CommitPayload, Place, TokenRange


def check_given(sending: LiveSend, chunk: GivenChunk, chunks: int = 1) -> None:
    """What a worker gives is within the bounds of its layout and of a send.

    Args:
        sending: that it is given to.
        chunk: what is given.
        chunks: how many it counts for: one for each layer that goes by itself.

    Raises:
        ConfigError: a page id is out of range, or the group is unknown.
        ResourceError: too much `aux`, or too many chunks.
    """
    for group, listed in chunk.pages.items():
        check_page_ids(sending.layout, group, listed.ids)
    if len(chunk.aux) > limits.AUX_BYTES_MAX:
        raise ResourceError(f"aux has {len(chunk.aux)} bytes, at most {limits.AUX_BYTES_MAX}")
    if len(sending.chunks) + chunks > limits.CHUNKS_PER_TRANSFER_MAX:
        raise ResourceError(
            f"room {sending.room}: more than {limits.CHUNKS_PER_TRANSFER_MAX} chunks"
        )


def check_tokens(sending: LiveSend, leg: SendLeg) -> None:
    """Both sides state the tokens of the request.

    Raises:
        TransferError: they differ.
    """
    place = leg.place
    if place is None or sending.tokens is None or sending.tokens == place.tokens:
        return
    raise TransferError(
        f"room {sending.room}: tokens differ: prefill={sending.tokens}, decode={place.tokens}; "
        "both sides must state the same request",
        fields={"tokens": f"prefill={sending.tokens}, decode={place.tokens}"},
    )


def post_chunk(sending: LiveSend, leg: SendLeg, chunk: LiveChunk) -> list[Effect]:
    """The writes of the next chunk of a leg. Counts it, and its announcement, into the leg.

    Where the sender places the bytes, the announcement carries no byte's meaning and may wait.

    Raises:
        PdxferError: the chunk does not fit what decode has placed; nothing of it is posted.
    """
    number, leg.chunks_posted = leg.chunks_posted, leg.chunks_posted + 1
    if leg.plan is None:
        return []
    ranges = _moving_ranges(sending, leg, leg.plan, chunk)
    moved: dict[str, Moved] = {**ranges}
    planned = PlannedChunk(leg.plan, chunk.pages, leg.pages, moved, chunk.layers)
    length_bytes = planned.length_bytes
    leg.bytes_planned += length_bytes
    leg.announcements.append(
        ChunkMessage(
            generation=leg.generation,
            source_worker=sending.worker,
            number=number,
            ranges={
                name: [TokenRange(first=a, end=b) for a, b in spans]
                for name, spans in ranges.items()
            },
            layers=None if chunk.layers is None else list(chunk.layers),
            length_bytes=length_bytes,
            last=chunk.last,
        )
    )
    if not length_bytes:
        return []
    leg.posts_in_flight.add(number)
    return [
        Post(
            peer=leg.peer,
            generation=leg.generation,
            source_worker=sending.worker,
            destination_worker=leg.receive.destination_worker,
            number=number,
            chunk=planned,
        )
    ]


def ask_commit(sending: LiveSend, leg: SendLeg, sender_index: int) -> list[Effect]:
    """The commit of a leg whose chunks are all posted; none where nothing is owed.

    Raises:
        TransferError: the chunks do not hold exactly what the request is.
    """
    leg.commit_asked = True
    if leg.plan is None:
        leg.sent = True
        return []
    place = _placed(leg)
    ranges = owed_ranges(leg.plan, sending.layout, leg.pages, place.prefix_tokens, place.tokens)
    owed = leg.plan.length_bytes(moving_spans(ranges, leg.pages))
    if owed != leg.bytes_planned:
        raise TransferError(
            f"room {sending.room}: the chunks hold {leg.bytes_planned} bytes, the request of "
            f"{place.tokens} tokens from {place.prefix_tokens} on is {owed}; send every page "
            "and every layer",
            fields={"length_bytes": f"prefill={leg.bytes_planned}, decode={owed}"},
        )
    payload = CommitPayload(
        decode_incarnation=leg.peer,
        generation=leg.generation,
        source_worker=sending.worker,
        sender_index=sender_index,
        length_bytes=leg.bytes_planned,
        runs=0,
        digest=leg.plan.digest,
        aux=sending.aux,
    )
    return [PostCommit(leg.peer, leg.generation, payload)]


def _placed(leg: SendLeg) -> Place:
    place = leg.place
    assert place is not None, "a leg is posted only once its pages are placed"
    return place


def _moving_ranges(sending: LiveSend, leg: SendLeg, plan: Plan, chunk: LiveChunk) -> Spans:
    """The tokens of each group that this chunk moves: what decode has already, or skips, stays."""
    ranges: Ranges = {}
    place = _placed(leg)
    owed = owed_ranges(plan, sending.layout, leg.pages, place.prefix_tokens, place.tokens)
    states = sending.state_groups
    for name, (first, end) in chunk.ranges.items():
        if first < end and name not in owed:
            raise TransferError(
                f"room {sending.room}: prefill sends pages of group {name}, decode placed none"
            )
        if name in states:
            placed = len(leg.pages[name].ids) if name in leg.pages else 0
            if end != placed:
                raise TransferError(
                    f"room {sending.room}: state group {name} has {end} ids at prefill, "
                    f"{placed} at decode; they pair by position"
                )
            if end and owed[name][0] < owed[name][1]:
                ranges[name] = owed[name]
            continue
        if not chunk.last and end > place.tokens:
            raise TransferError(
                f"room {sending.room}: a chunk that is not the last ends at token {end}, "
                f"decode expects tokens={place.tokens}"
            )
        if first == end:
            continue
        begin, stop = max(first, owed[name][0]), min(end, owed[name][1])
        if begin < stop:
            ranges[name] = (begin, stop)
    spans = moving_spans(ranges, leg.pages)
    for name, moving in spans.items():
        _check_pages(sending, name, moving, chunk.pages[name])
    return {name: moving for name, moving in spans.items() if moving}


def _check_pages(
    sending: LiveSend, name: str, moving: list[tuple[int, int]], listed: Pages
) -> None:
    """Prefill has a page for each token that moves.

    Raises:
        TransferError: it skips some that decode has pages for.
    """
    for span in moving:
        for first, end in listed.skipped:
            if first < span[1] and span[0] < end:
                missing = f"[{max(first, span[0])}, {min(end, span[1])})"
                raise TransferError(
                    f"room {sending.room}: decode has placed pages for tokens {missing} of group "
                    f"{name}, prefill skips them (null_page); skip them at decode too, or send "
                    "the pages",
                    fields={"group": name, "tokens": missing},
                )

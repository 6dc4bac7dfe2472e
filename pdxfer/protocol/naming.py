"""Who an error is about, in words and in `fields`: rank, instance, agent, lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.errors import PeerError

if TYPE_CHECKING:
    from pdxfer.protocol.prefill.live_send import LiveSend, SendLeg
    from pdxfer.protocol.prefill.peer import DecodePeer
    from pdxfer.protocol.workers import Worker


def called(role: str, worker: Worker) -> str:
    """A worker in a sentence."""
    return f"rank {worker.rank.index} of {role} instance {worker.instance!r}"


def fields_of(role: str, worker: Worker | None) -> dict[str, str]:
    """A worker in the fields of an error; nothing of one that is not known any more."""
    if worker is None:
        return {}
    return {f"{role}_instance": worker.instance, f"{role}_rank": str(worker.rank.index)}


def leg_failed(
    what: str,
    workers: Mapping[int, Worker],
    peer: DecodePeer | None,
    sending: LiveSend,
    leg: SendLeg,
) -> PeerError:
    """What went wrong between two workers, with the names of both, of decode's agent and the lane.

    Args:  workers: of the prefill agent.
    """
    source = workers.get(sending.worker)
    destination = None if peer is None else peer.workers.get(leg.receive.destination_worker)
    ends = [
        *([] if source is None else [f"from {called('prefill', source)}"]),
        *([] if destination is None else [f"to {called('decode', destination)}"]),
        f"decode agent {leg.peer.hex()[:12]}",
        *([] if peer is None else [f"lane {peer.path_lane or peer.lane}"]),
    ]
    fields = {
        "room": str(sending.room),
        "peer": leg.peer.hex(),
        **({} if peer is None else {"lane": peer.path_lane or peer.lane}),
        **fields_of("prefill", source),
        **fields_of("decode", destination),
    }
    text = f"room {sending.room}: {what} ({', '.join(ends)})"
    return PeerError(text, retryable=True, fields=fields)


def shown_reason(reason: str) -> str:
    """Why somebody aborted, in a length that is kept; never empty."""
    return reason[: limits.REASON_CHARACTERS_MAX] or "no reason given"

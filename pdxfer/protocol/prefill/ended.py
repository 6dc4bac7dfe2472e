"""Receives that ended before their send came: that send, when it comes, ends with their error."""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer import limits
from pdxfer.errors import LayoutMismatchError, PdxferError
from pdxfer.protocol.prefill.waiting import SendKey


@dataclass(slots=True)
class EndedReceive:
    """Why a receive ended, and of which decode life it was."""

    error: PdxferError
    peer: bytes
    forget_at: float | None = None
    """When this is forgotten; the next tick sets it."""


class EndedReceives:
    """The ended receives of one agent, by the send that each would have met.

    They outlive the session.
    """

    def __init__(self) -> None:
        self._kept: dict[SendKey, EndedReceive] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: SendKey, error: PdxferError, peer: bytes) -> None:
        """Have the send, when it comes, end with this error; the oldest give way to many."""
        self._kept.pop(key, None)
        if len(self._kept) >= limits.ENDED_RECEIVES_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = EndedReceive(error, peer)

    def take(self, key: SendKey) -> PdxferError | None:
        """The error that a new send ends with; None: it may wait for its receives."""
        kept = self._kept.pop(key, None)
        return None if kept is None else kept.error

    def drop(self, key: SendKey) -> None:
        """Forget why a receive ended: the room is received anew."""
        self._kept.pop(key, None)

    def drop_verdicts(self, peer: bytes) -> None:
        """Forget the refusals of pairs: a side has attached anew, and the pair is judged again."""
        for key, kept in list(self._kept.items()):
            if kept.peer == peer and isinstance(kept.error, LayoutMismatchError):
                del self._kept[key]

    def forget(self, now: float) -> None:
        """Drop what no send has come for in time."""
        for key, kept in list(self._kept.items()):
            if kept.forget_at is None:
                kept.forget_at = now + limits.UNMATCHED_DEADLINE_S
            elif now >= kept.forget_at:
                del self._kept[key]

"""The states of a transfer, as workers see them and as the status board stores them."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """Where a transfer is. Values are stored in the status board; they are not ordered by `<`."""

    WAITING = 1
    """The other side has not come."""
    READY = 2
    """The other side has come, and decode has placed pages."""
    MOVING = 3
    """Bytes are on their way."""
    SENT = 4
    """Prefill only: source pages are the worker's again."""
    COMMITTED = 5
    """Final: every byte is in place."""
    FENCING = 6
    """Failed or aborted; writes may still land."""
    QUARANTINED = 7
    """Failed, and nothing proves yet that no write can land."""
    FAILED = 8
    """Final: failed, and no write can land any more."""


FINAL = frozenset({State.COMMITTED, State.FAILED})
"""States that no event leaves."""
RETURNED_AT_PREFILL = frozenset({State.SENT, State.COMMITTED, State.FAILED})
"""States in which the source pages are the worker's."""
RETURNED_AT_DECODE = frozenset({State.COMMITTED, State.FAILED})
"""States in which the destination pages are the worker's."""

"""When the wait of a receive is over: before it is matched, while it moves, while it is fenced."""

from __future__ import annotations

import math

from pdxfer import limits
from pdxfer.errors import PeerError
from pdxfer.protocol.decode.binding import Binding
from pdxfer.protocol.decode.live_receive import LiveReceive
from pdxfer.protocol.decode.receives import Receives
from pdxfer.protocol.state import State
from pdxfer.protocol.tables import ReceivingEvent

_EACH_S = 0.5
"""How often a receive is looked at whose next deadline is not known."""


class Deadlines:
    """The deadlines of one agent's receives.

    Each receive is looked at when its `check_at` says so.
    """

    def __init__(self, receives: Receives, binding: Binding) -> None:
        self._receives = receives
        self._binding = binding

    def check(self, receiving: LiveReceive, now: float) -> None:
        """Fail what waited for too long; show as QUARANTINED what has no proof in time."""
        state = receiving.state
        receiving.check_at = now + _EACH_S
        if state is State.QUARANTINED:
            receiving.check_at = math.inf
            return
        if state is State.FENCING:
            receiving.check_at = receiving.fence_deadline
            if now >= receiving.fence_deadline:
                receiving.advance(ReceivingEvent.UNPROVEN)
                self._receives.note_quarantined(receiving)
                self._receives.show(receiving)
            return
        unmatched = state is State.WAITING or (
            state is State.MOVING
            and not all(d.matched for d in receiving.legs.values() if d.plan is not None)
        )
        if not unmatched:
            self._check_progress(receiving, now)
        elif now >= receiving.deadline:
            text = self._binding.why_waiting(receiving)
            self._receives.fail(receiving, PeerError(text, retryable=True), now)
        else:
            receiving.check_at = receiving.deadline
            if state is State.WAITING and receiving.unreachable_s is not None:
                receiving.check_at = now
                self._binding.give_up_silent(receiving, now)

    def _check_progress(self, receiving: LiveReceive, now: float) -> None:
        """Fail a receive that stands still: prefill moves nothing of it any more."""
        if receiving.moved:
            receiving.moved, receiving.moved_at = False, now
        still_s = now - receiving.moved_at
        if still_s >= limits.NO_PROGRESS_DEADLINE_S:
            text = (
                f"room {receiving.room}: no progress for {still_s:.0f} s "
                f"(NO_PROGRESS_DEADLINE_S): {receiving.why_stuck}"
            )
            self._receives.fail(receiving, PeerError(text, retryable=True), now)

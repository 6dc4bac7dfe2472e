"""When the wait of a send is over: before it is bound, and while decode or the lane stand still."""

from __future__ import annotations

from pdxfer import limits
from pdxfer.errors import PeerError
from pdxfer.protocol.naming import leg_failed
from pdxfer.protocol.prefill.live_send import LiveSend
from pdxfer.protocol.prefill.sends import Sends
from pdxfer.protocol.state import State

LEASED = frozenset({State.WAITING, State.READY, State.MOVING, State.SENT})
"""States of a bound send that lasts only while decode gives signs of life."""
MOVED = LEASED - {State.SENT}
"""States of a bound send in which this side is the one that has to move something."""

_EACH_S = 0.5
"""How often a bound send is looked at."""


class Deadlines:
    """The deadlines of one agent's sends. Each send is looked at when its `check_at` says so."""

    def __init__(self, sends: Sends) -> None:
        self._sends = sends

    def check(self, sending: LiveSend, now: float) -> None:
        """Fail a send that has waited too long."""
        sending.check_at = now + _EACH_S
        if sending.state is State.WAITING and not sending.bound:
            sending.check_at = sending.deadline
            if now >= sending.deadline:
                text = self._sends.why_unmatched(sending)
                self._sends.give_up(sending, PeerError(text, retryable=True))
            return
        if sending.state in LEASED:
            self._check_decode(sending, now)
        if sending.state in MOVED:
            self._check_progress(sending, now)

    def _check_progress(self, sending: LiveSend, now: float) -> None:
        """Fail a send that stands still: its next chunk never comes, or the lane never flushes."""
        if sending.moved:
            sending.moved, sending.moved_at = False, now
        still_s = now - sending.moved_at
        if still_s >= limits.NO_PROGRESS_DEADLINE_S:
            text = (
                f"no progress for {still_s:.0f} s (NO_PROGRESS_DEADLINE_S): "
                f"{self._sends.why_stuck(sending)}"
            )
            self._fail(sending, text)

    def _check_decode(self, sending: LiveSend, now: float) -> None:
        """Fail a send whose lease has ended, or that decode knows nothing of any more."""
        for leg in sending.legs.values():
            peer = self._sends.peers.get(leg.peer)
            if leg.committed or peer is None:
                continue
            if leg.generation <= peer.mark:
                self._fail(sending, f"decode knows nothing of generation {leg.generation} any more")
                return
            if now - peer.last_heard > sending.lease_s:
                text = f"no sign of the decode agent for the lease of {sending.lease_s} s"
                error = leg_failed(text, self._sends.workers, peer, sending, leg)
                self._sends.fail(sending, error)
                return

    def _fail(self, sending: LiveSend, text: str) -> None:
        error = PeerError(f"room {sending.room}: {text}", retryable=True)
        self._sends.fail(sending, error)

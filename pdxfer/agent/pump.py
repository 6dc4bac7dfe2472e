"""From a machine's effects to the outside: the one place that carries them out.

Agents and the tests' cluster use it, so that histories of a seed run what ships.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from pdxfer.agent.lane_work import LaneWork
from pdxfer.protocol.effects import Effect, Free, Show, ShowReturned, Tell
from pdxfer.wire.messages import Message


class Outside(Protocol):
    """What effects reach that are not lane work: peers, workers, the clock."""

    def now(self) -> float:
        """Seconds of the agent's monotonic clock."""
        ...

    def tell(self, peer: bytes, message: Message) -> None:
        """Send a control message to a peer."""
        ...

    def show(self, effect: Show) -> None:
        """Tell a worker where a transfer is."""
        ...

    def show_returned(self, effect: ShowReturned) -> None:
        """Tell a worker how many tokens' pages are its own again."""
        ...

    def effect_failed(self, effect: Effect, error: Exception) -> None:
        """An effect could not be carried out, by a fault of this program."""
        ...

    def free(self, worker_id: int) -> None:
        """Give up the memory of a worker that went away; no write can reach it any more."""
        ...


class Pump:
    """Carries out what one machine asks for, until it asks for nothing more. Loop thread only.

    Args:
        take_effects: of the machine.
        lane_work: the sender or the receiver of the same agent.
        outside: peers, workers and the clock.
    """

    def __init__(
        self, take_effects: Callable[[], list[Effect]], lane_work: LaneWork, outside: Outside
    ) -> None:
        self._take_effects = take_effects
        self._lane_work = lane_work
        self._outside = outside
        self._running = False
        self._outcomes: deque[Callable[[], None]] = deque()

    def later(self, outcome: Callable[[], None]) -> None:
        """Run something behind the effects that are being carried out.

        For what carrying one out has brought about and the machine has to hear: it is never
        entered while it is being served.
        """
        self._outcomes.append(outcome)

    def run(self) -> bool:
        """Carry out effects; False where a call further up the stack is at it already.

        What cannot be carried out is a fault of this program: it is reported and the others go on,
        so that one transfer does not take another's writes, wake-ups or proofs with it.
        """
        if self._running:
            return False
        self._running = True
        try:
            self._tell_outcomes()
            while effects := self._take_effects():
                for effect in effects:
                    try:
                        self.carry_out(effect)
                    except Exception as error:  # noqa: BLE001 - the others must go on
                        self._outside.effect_failed(effect, error)
                self._tell_outcomes()
        finally:
            self._running = False
        return True

    def _tell_outcomes(self) -> None:
        self._lane_work.tell_outcomes(self._outside.now())
        while self._outcomes:
            self._outcomes.popleft()()

    def carry_out(self, effect: Effect) -> None:
        """Carry out one effect; whatever it raises is a fault of this program."""
        match effect:
            case Tell():
                self._outside.tell(effect.peer, effect.message)
            case Show():
                self._outside.show(effect)
            case ShowReturned():
                self._outside.show_returned(effect)
            case Free():
                self._outside.free(effect.worker)
            case _:
                self._lane_work.do(effect)

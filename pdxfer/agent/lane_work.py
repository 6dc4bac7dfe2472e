"""What sender and receiver share: whom they serve, and what waits to be told to the machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from pdxfer.agent.lanes import Lanes
from pdxfer.errors import PdxferError
from pdxfer.fabric.base import Fabric, FabricEvent
from pdxfer.memory import MemoryRange
from pdxfer.protocol.effects import Effect
from pdxfer.wire.messages import Message


class LaneWork(ABC):
    """Carries out the effects of one machine on the lanes of its agent. Loop thread only.

    `do` carries out what the machine asks for, `on_event` brings back what a lane says. What
    carrying out brings about at once (a path that cannot be made, a post that is refused) waits
    until `tell_outcomes`, so that the machine is never entered while it is being served.

    Args:
        lanes: of the agent.
        memory: the memory ranges of a worker, in the order of its layout's regions.
        tell: sends a control message to a peer.
        lost: says that the session with a peer cannot go on, with the reason.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        memory: Callable[[int], tuple[MemoryRange, ...]],
        tell: Callable[[bytes, Message], None],
        lost: Callable[[bytes, PdxferError], None],
    ) -> None:
        self._lanes = lanes
        self._memory = memory
        self._tell = tell
        self._lost = lost
        self._outcomes: deque[Callable[[float], None]] = deque()

    @abstractmethod
    def do(self, effect: Effect) -> None:
        """Carry out one effect.

        Raises:
            LocalProtocolError: it is none of this role.
        """

    @abstractmethod
    def on_event(self, fabric: Fabric, event: FabricEvent, now: float) -> None:
        """Something happened on a lane: the machine hears of it."""

    def tell_outcomes(self, now: float) -> None:
        """Tell the machine what carrying out has brought about since the last call."""
        while self._outcomes:
            self._outcomes.popleft()(now)

    def _later(self, outcome: Callable[[float], None]) -> None:
        """Let the machine hear something at the next `tell_outcomes`; it is given the time."""
        self._outcomes.append(outcome)

    def _lose(self, peer: bytes, error: PdxferError) -> None:
        self._later(lambda _: self._lost(peer, error))

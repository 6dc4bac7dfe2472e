"""Slots of a worker's status board: the worker chooses them, and counts the uses of each."""

from __future__ import annotations

from collections import deque

from pdxfer.errors import ResourceError


class Slots:
    """Which slots are free, and how often each was used. One thread at a time."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._uses = [0] * count

    def take(self) -> tuple[int, int]:
        """A free slot and the sequence number of this use.

        Raises: ResourceError when every slot is taken.
        """
        if not self._free:
            raise ResourceError(
                f"all {len(self._uses)} transfers of this worker are taken; one is given back when "
                "the worker has seen its final state (finished() or wait())",
                retryable=True,
            )
        slot = self._free.popleft()
        self._uses[slot] += 1
        return slot, self._uses[slot]

    def give_back(self, slot: int) -> None:
        """The agent has been told that the slot is free."""
        # To the end of the queue: a slot rests as long as possible before its next use.
        self._free.append(slot)

    def undo(self, slot: int) -> None:
        """Forget a use that the agent has not been told of."""
        self._uses[slot] -= 1
        self._free.appendleft(slot)

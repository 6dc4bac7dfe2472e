"""A UCX lane without an agent: one fabric a side, and a path between them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.fabric.base import (
    BatchEnded,
    CommitArrived,
    CommitSent,
    FabricEvent,
    PathOpened,
    RemoteRegion,
)
from pdxfer.fabric.ucx import UcxFabric

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdxfer.fabric.base import LocalRegion
    from pdxfer.fabric.ucx import UcxPath

_SOURCE = b"bench source----"
_TARGET = b"bench target----"


class _Lane:
    """One side's engine and what it has not told yet."""

    def __init__(self, lane: str) -> None:
        self.fabric = UcxFabric(lane, net_device="lo" if lane == "tcp" else "")
        self._events: list[FabricEvent] = []

    def next_event(self) -> FabricEvent:
        """The next thing that happens, within `limits.CHILD_STEP_TIMEOUT_S`."""
        deadline = time.monotonic() + limits.CHILD_STEP_TIMEOUT_S
        while not self._events:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing happened on the lane")
            self.fabric.wait(1.0)
            self._events = self.fabric.take_events()
        return self._events.pop(0)

    def register(self, bases: Sequence[int], lengths: Sequence[int]) -> list[LocalRegion]:
        """Regions at these addresses. The mapping outlives the lane."""
        return [
            self.fabric.register(base, length, None)
            for base, length in zip(bases, lengths, strict=True)
        ]

    def close(self) -> None:
        """Release the engine."""
        self.fabric.close(limits.ENGINE_CLOSE_DEADLINE_S)


class TargetLane(_Lane):
    """Decode's side."""

    def open(self) -> bytes:
        """Make the receive worker; where the source connects."""
        return self.fabric.open_receiver(_SOURCE)

    def wait_commit(self) -> bytes:
        """Block until a commit arrives."""
        while True:
            event = self.next_event()
            if isinstance(event, CommitArrived):
                return event.payload


class SourceLane(_Lane):
    """Prefill's side."""

    path: UcxPath
    transports = ""
    """What the lane really uses."""

    def connect(self, address: bytes) -> None:
        """Open the path."""
        self.path = self.fabric.connect(_TARGET, address, limits.PATH_OPEN_TIMEOUT_S)
        while True:
            event = self.next_event()
            if isinstance(event, PathOpened):
                if event.error:
                    raise RuntimeError(f"the path did not open: {event.error}")
                self.transports = event.transports
                return

    def put(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> None:
        """Post, and wait until every batch is flushed."""
        left = len(self.path.post_runs(generation, runs, splits, source, destination))
        while left:
            left -= self._is_posted(self.next_event())

    def put_and_commit(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> None:
        """Post, commit behind it, and wait until the commit has left: what an agent does."""
        left = len(self.path.post_runs(generation, runs, splits, source, destination))
        self.path.commit(generation, b"bench")
        committed = False
        while left or not committed:
            event = self.next_event()
            left -= self._is_posted(event)
            if isinstance(event, CommitSent):
                if event.error:
                    raise RuntimeError(f"the commit failed: {event.error}")
                committed = True

    @staticmethod
    def _is_posted(event: FabricEvent) -> bool:
        if isinstance(event, BatchEnded) and event.error:
            raise RuntimeError(f"a batch failed: {event.error}")
        return isinstance(event, BatchEnded)

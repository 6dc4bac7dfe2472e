"""How much the workers of one agent have given, and may give, in bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pdxfer import limits
from pdxfer.errors import ResourceError
from pdxfer.layout import Pages
from pdxfer.protocol.given import GivenChunk


def chunk_bytes(chunk: GivenChunk) -> int:
    """What a chunk counts in the budget of its worker."""
    return pages_bytes(chunk.pages) + 8 * len(chunk.layers or ()) + len(chunk.aux)


def pages_bytes(pages: Mapping[str, Pages]) -> int:
    """What the pages of one call count in the budget of their worker."""
    ids_bytes = sum(each.ids.nbytes + 16 * len(each.skipped) for each in pages.values())
    return limits.GIVEN_RECORD_BYTES + ids_bytes


class GivenBytes:
    """What the workers of one agent have given with their live transfers, in bytes.

    A transfer adds up to what its worker may give, so that transfers times chunks times page ids
    stay within one budget a worker, and one for all of them.
    """

    def __init__(self) -> None:
        self._of_worker: dict[int, int] = {}

    @property
    def length_bytes(self) -> int:
        """Of all workers."""
        return sum(self._of_worker.values())

    def take(self, worker: int, room: int, length_bytes: int) -> None:
        """Count what a worker gives.

        Raises:
            ResourceError: over the budget of the worker or of the agent, retryable; nothing is
                counted.
        """
        held = self._of_worker.get(worker, 0)
        for whose, kept, name in (
            ("this worker", held, "GIVEN_BYTES_PER_WORKER_MAX"),
            ("all workers of this agent", self.length_bytes, "GIVEN_BYTES_MAX"),
        ):
            allowed: int = getattr(limits, name)
            if kept + length_bytes > allowed:
                raise ResourceError(
                    f"room {room}: what {whose} gave with live transfers takes {kept} bytes here, "
                    f"and {length_bytes} more are over the {allowed} allowed ({name}); try again "
                    "when others have ended, or give fewer pages at once",
                    retryable=True,
                    fields={"room": str(room), "held_bytes": str(kept)},
                )
        self._of_worker[worker] = held + length_bytes

    def give_back(self, worker: int, length_bytes: int) -> None:
        """A transfer has ended that had taken so much."""
        left = self._of_worker.get(worker, 0) - length_bytes
        if left > 0:
            self._of_worker[worker] = left
        else:
            self._of_worker.pop(worker, None)

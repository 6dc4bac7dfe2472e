"""
Native core of pdxfer: plans, the status board, calls on the local socket.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class LimitError(RuntimeError):
    pass

class Plan:
    """Matched plane pairs, compiled; any thread may use it."""

    def __init__(
        self,
        groups: Sequence[tuple[str, int, int, int, int, int, int]],
        pairs: Annotated[
            NDArray[numpy.int64], dict(shape=(None, 16), order="C", device="cpu", writable=False)
        ],
        source_region_bytes: Sequence[int],
        destination_region_bytes: Sequence[int],
        runs_per_page_max: int,
        runs_max: int,
    ) -> None: ...
    def batches(
        self,
        ranges: object,
        source: object,
        destination: object,
        layers: Sequence[int] | None,
        batch_bytes: int,
        run_bytes_max: int,
    ) -> tuple[
        Annotated[NDArray[numpy.int64], dict(shape=(None, 5))],
        Annotated[NDArray[numpy.int64], dict(shape=(None,))],
        int,
        int,
    ]:
        """
        Runs int64 [n, 5], splits int64 [batches + 1], bytes of a request, bytes expected.
        """

    def outline(
        self,
        requests: Sequence[
            tuple[
                int,
                Annotated[
                    NDArray[numpy.int64],
                    dict(shape=(None,), order="C", device="cpu", writable=False),
                ],
                int,
                Annotated[
                    NDArray[numpy.int64],
                    dict(shape=(None,), order="C", device="cpu", writable=False),
                ],
                int,
                int,
                int,
            ]
        ],
        layers: Sequence[int] | None,
    ) -> tuple[
        Annotated[NDArray[numpy.int64], dict(shape=(None, 8))],
        Annotated[NDArray[numpy.int64], dict(shape=(None, 12))],
        int,
        int,
    ]:
        """Entries int64 [e, 8], spans int64 [s, 12], rows, bytes of a request."""

    def describe(self, group: int) -> tuple[int, int, int, int, int]:
        """
        Tokens, runs, bytes, longest and shortest run of one period of a group's pages.
        """

def first_bad_id(
    ids: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    reserved_pages: int,
    pages: int,
) -> int:
    """Position of the first id outside [reserved_pages, pages), or -1."""

def first_repeated_id(
    ids: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    pages: int,
) -> int:
    """Position of the first id that appeared before, or -1."""

def board_bytes(slots: int) -> int:
    """Bytes of a status board with this many slots."""

class BoardWriter:
    """A status board mapped writable: the agent's side."""

    def __init__(self, fd: int, slots: int, incarnation: bytes) -> None: ...
    @property
    def slots(self) -> int: ...
    def set_details(
        self, slot: int, room: int, generation: int, peer: bytes, peer_count: int, lane: int
    ) -> None: ...
    def set_bytes_done(self, slot: int, bytes_done: int) -> None: ...
    def set_returned(self, slot: int, packed: int) -> None: ...
    def end(self) -> None:
        """Tell readers that this agent writes no more. Idempotent."""

    def publish(self, slot: int, sequence: int, state: int) -> None:
        """Store the word (release) and wake its waiters."""

class BoardReader:
    """A status board mapped read-only: the worker's side."""

    def __init__(self, fd: int, slots: int) -> None: ...
    @property
    def slots(self) -> int: ...
    @property
    def incarnation(self) -> bytes: ...
    @property
    def ended(self) -> bool:
        """Whether the agent has ended, or its thread: one memory read."""

    def word(self, slot: int) -> int:
        """
        `sequence << 8 | state` of a slot (acquire); with bit 7 once the agent has ended.
        """

    def bytes_done(self, slot: int) -> int: ...
    def returned(self, slot: int) -> int: ...
    def details(self, slot: int) -> tuple[int, int, bytes, int, int]:
        """(room, generation, peer incarnation, peer count, lane code) of a slot."""

    def wait(self, slot: int, seen: int, timeout_s: float) -> int:
        """
        Block, without the GIL, until the slot's word is not `seen` or the time is over; returns the word.
        """

def send_now(fd: int, parts: list[memoryview], descriptors: list[int]) -> int:
    """
    Give the kernel what it takes now, without giving up the GIL; -1: the socket is full.
    """

def receive_now(fd: int, size: int, descriptors_max: int) -> tuple[bytes, list[int], bool] | None:
    """
    What is there now, without giving up the GIL: (bytes, descriptors, whether some were lost); no bytes: the end of the stream; None: nothing is there.
    """

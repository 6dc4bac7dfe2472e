"""The two pools of the bench: sealed memfds that both processes map, and the clocks."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer import memory
from pdxfer.bench import _pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.bench.cases import Case
    from pdxfer.memory import SharedMemory

BLANK: Final = 0xA5
"""Every byte of the destination before a transfer."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Both pools, mapped in this process.

    The target maps the source too, only to compare; the source maps the destination for memcpy.
    """

    source: SharedMemory
    destination: SharedMemory

    @classmethod
    def from_fds(cls, source_fd: int, destination_fd: int) -> Buffers:
        """Map what the parent passed on."""
        buffers = cls(
            memory.map_sealed(source_fd, os.fstat(source_fd).st_size),
            memory.map_sealed(destination_fd, os.fstat(destination_fd).st_size),
        )
        os.close(source_fd)
        os.close(destination_fd)
        for shared in (buffers.source, buffers.destination):
            _bytes(shared)[:: mmap.PAGESIZE].max()  # page faults belong to set-up
        return buffers

    def fill_source(self, seed: int = 0) -> None:
        """Random bytes, so that no two pages are equal."""
        words = _bytes(self.source).view(np.uint64)
        words[:] = np.random.default_rng(seed).integers(0, 1 << 64, len(words), dtype=np.uint64)

    def blank_destination(self) -> None:
        """Forget what arrived before."""
        _bytes(self.destination)[:] = BLANK

    def verify(self, case: Case) -> str:
        """Compare every byte of the destination; empty text when all are right."""
        runs = case.batches.runs
        wrong = _pieces.first_difference(
            runs, case.bases(self.source.address), case.bases(self.destination.address)
        )
        if wrong >= 0:
            return f"run {wrong} of {len(runs)} arrived wrong: {runs[wrong].tolist()}"
        placed = _bytes(self.destination)
        for first, end in case.gaps():
            if (placed[first:end] != BLANK).any():
                return f"bytes [{first}, {end}) were written though no run goes there"
        return ""


def _bytes(shared: SharedMemory) -> NDArray[np.uint8]:
    return np.frombuffer(shared.buffer, np.uint8)


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    return time.process_time()


def now_ns() -> int:
    """A clock that is the same in every process of this machine."""
    return time.monotonic_ns()

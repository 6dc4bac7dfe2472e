"""Runs moved by memcpy, process_vm_writev and plain sockets."""

import numpy as np
from numpy.typing import NDArray

def copy_runs(
    runs: NDArray[np.int64], source: NDArray[np.uint64], destination: NDArray[np.uint64]
) -> None:
    """memcpy, one call a run."""

def vm_write_runs(
    pid: int, runs: NDArray[np.int64], source: NDArray[np.uint64], destination: NDArray[np.uint64]
) -> None:
    """process_vm_writev, one call a run, into process `pid`."""

def send_runs(socket: int, runs: NDArray[np.int64], source: NDArray[np.uint64]) -> None:
    """The bytes of the runs into a blocking socket."""

def receive_runs(socket: int, runs: NDArray[np.int64], destination: NDArray[np.uint64]) -> None:
    """The bytes of a blocking socket into place."""

def first_difference(
    runs: NDArray[np.int64], source: NDArray[np.uint64], destination: NDArray[np.uint64]
) -> int:
    """The first run whose bytes differ between the two sides, or -1."""

"""Runs moved by memcpy, process_vm_writev and plain sockets."""

from typing import Annotated

import numpy
from numpy.typing import NDArray

def copy_runs(
    runs: Annotated[
        NDArray[numpy.int64], dict(shape=(None, 5), order="C", device="cpu", writable=False)
    ],
    source: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    destination: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> None:
    """memcpy, one call a run."""

def vm_write_runs(
    pid: int,
    runs: Annotated[
        NDArray[numpy.int64], dict(shape=(None, 5), order="C", device="cpu", writable=False)
    ],
    source: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    destination: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> None:
    """process_vm_writev, one call a run, into process `pid`."""

def send_runs(
    socket: int,
    runs: Annotated[
        NDArray[numpy.int64], dict(shape=(None, 5), order="C", device="cpu", writable=False)
    ],
    source: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> None:
    """The bytes of the runs into a blocking socket."""

def receive_runs(
    socket: int,
    runs: Annotated[
        NDArray[numpy.int64], dict(shape=(None, 5), order="C", device="cpu", writable=False)
    ],
    destination: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> None:
    """The bytes of a blocking socket into place."""

def first_difference(
    runs: Annotated[
        NDArray[numpy.int64], dict(shape=(None, 5), order="C", device="cpu", writable=False)
    ],
    source: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    destination: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> int:
    """The first run whose bytes differ between the two sides, or -1."""

"""An agent that is out of file descriptors: one is kept back, to say so to a worker with."""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Final

from pdxfer.errors import ResourceError

_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException) -> bool:
    """Whether a call failed because this process, or the system, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def shortage(who: str) -> ResourceError:
    """What a worker is told that finds a process without descriptors. The same may work later.

    Args:  who: `the agent`, or `this process`: the one that calls.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ResourceError(
        f"{who} has no file descriptor left, of at most {limit} (RLIMIT_NOFILE), or the system "
        "has none: raise LimitNOFILE (`ulimit -n`), or end workers and peers that are not needed, "
        "and try again",
        retryable=True,
        fields={"rlimit_nofile": str(limit)},
    )


class Reserve:
    """One descriptor that is given up to accept a connection when no other is left.

    Threads:  one. Ownership: of the descriptor, until `close`.
    """

    def __init__(self) -> None:
        """Holds nothing before `restore`."""
        self._fd = -1

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """A waiting connection, to be told why and closed; then `restore`. None: without success.

        Raises: OSError of `accept`, also where another thread was faster to take the descriptor.
        """
        if self._fd < 0:
            return None
        self.close()
        return listener.accept()[0]

    def restore(self) -> None:
        """Take a descriptor back, if there is one. Idempotent."""
        if self._fd < 0:
            try:
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if not is_shortage(error):
                    raise

    def close(self) -> None:
        """Give the descriptor up. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

"""What proves to a worker, once its agent has died, that nothing writes its pages any more.

What an agent placed or read itself ended with the agent's process. At decode other processes may
write by their own system calls; the agent names them before they are told any page, and passes a
descriptor of each (`Writer`), which is readable once that process has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from pdxfer.local.messages import FromAgent, TransferWriters, Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.local.board import BoardReader, Entry

_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module has no name for it
_CREDENTIALS: Final = struct.Struct("iII")


class AgentProcess:
    """The process of the agent behind a connected socket. Any thread.

    Made before the agent answers on that socket, so that its process id is not another's by then.

    Args:
        sock: connected to the agent.
        ended_here: whether an agent inside this very process has closed its lanes.
    """

    def __init__(self, sock: socket.socket, ended_here: Callable[[], bool]) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pidfd = -1
        self._pid: int = _CREDENTIALS.unpack(credentials)[0]
        self._ended_here = ended_here
        if self._pid != os.getpid():
            self._pidfd = _open_pidfd(sock, self._pid)

    @property
    def ended(self) -> bool:
        """Whether it has ended, so that it neither reads nor writes any page."""
        if self._pid == os.getpid():
            return self._ended_here()
        return self._pidfd >= 0 and has_ended(self._pidfd)

    def close(self) -> None:
        """Forget it. Idempotent; done at the latest when nobody refers to this any more."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __del__(self) -> None:
        self.close()


class Proofs:
    """What a worker knows of the processes that may touch its pages. Any thread.

    Args:
        role: of the worker: at `prefill` only the agent reads its pages.
    """

    def __init__(self, role: str) -> None:
        self.process: AgentProcess | None = None
        """The agent's process, once there is a connection."""
        self._writers = Writers() if role == "decode" else None

    def hear(self, message: FromAgent, fds: list[int]) -> None:
        """Take what the agent says of other writers, and the descriptors of it out of `fds`."""
        if self._writers is not None:
            self._writers.hear(message, fds)

    def are_complete(self, board: BoardReader, slot: int, sequence: int) -> bool:
        """Whether every process has ended that may touch the pages of a transfer.

        To be asked once the connection to the agent has ended, and all that came was read.
        """
        if self.process is None or not self.process.ended:
            return False
        entry = board.entry(slot, sequence)  # nobody changes it any more
        return self._writers is None or self._writers.all_ended(slot, sequence, entry)

    @property
    def agent_ended(self) -> bool:
        """Whether the agent's process has ended; so it has where there never was a connection."""
        return self.process is None or self.process.ended

    def named(self, board: BoardReader, slot: int, sequence: int) -> list[bytes]:
        """Incarnations of the processes that were named as writers of a transfer's pages."""
        entry = board.entry(slot, sequence)
        if self._writers is None or entry is None or entry.peer_count == 0:
            return []
        return self._writers.named(slot, sequence, entry)

    def close(self) -> None:
        """Forget everybody. Idempotent."""
        if self._writers is not None:
            self._writers.close()
        if self.process is not None:
            self.process.close()


class Writers:
    """The processes that may write a decode worker's pages, as its agent has named them.

    Threads:  any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pidfds: dict[bytes, int] = {}
        """Descriptors of processes by prefill incarnation; -1 where the process has ended."""
        self._of_transfer: dict[int, TransferWriters] = {}
        """The writers of a transfer by slot, where it has several."""

    def hear(self, message: FromAgent, fds: list[int]) -> None:
        """Take what an agent says of writers, and the descriptors of it out of `fds`."""
        with self._lock:
            if isinstance(message, TransferWriters):
                self._of_transfer[message.transfer] = message
            elif isinstance(message, Writer) and fds:
                self._forget_ended()
                old = self._pidfds.get(message.incarnation, -1)
                self._pidfds[message.incarnation] = fds.pop(0)
                if old >= 0:
                    os.close(old)

    def all_ended(self, slot: int, sequence: int, entry: Entry | None) -> bool:
        """Whether every process has ended that may write a transfer's pages by itself.

        To be asked once the agent has ended, and all that it said has been heard.

        Args:
            slot: of the transfer on the status board.
            sequence: which use of the slot.
            entry: what the board says of it; None: the agent never had it.
        """
        if entry is None or entry.peer_count == 0:
            return True
        with self._lock:
            named = self.named(slot, sequence, entry)
            return len(named) == entry.peer_count and all(self._has_ended(each) for each in named)

    def named(self, slot: int, sequence: int, entry: Entry) -> list[bytes]:
        """Incarnations of the writers of a transfer, as far as they were told."""
        several = self._of_transfer.get(slot)
        if several is not None and several.sequence == sequence:
            return several.incarnations
        return [entry.peer_incarnation]

    def close(self) -> None:
        """Forget everybody. Idempotent; done at the latest when nobody refers to this any more."""
        with self._lock:
            for pidfd in self._pidfds.values():
                if pidfd >= 0:
                    os.close(pidfd)
            self._pidfds.clear()
            self._of_transfer.clear()

    def __del__(self) -> None:
        self.close()

    def _has_ended(self, incarnation: bytes) -> bool:
        pidfd = self._pidfds.get(incarnation)
        if pidfd is None:
            return False
        if pidfd >= 0 and has_ended(pidfd):
            os.close(pidfd)
            self._pidfds[incarnation] = pidfd = -1
        return pidfd < 0

    def _forget_ended(self) -> None:
        """Close the descriptors of processes that have ended, and keep that they have."""
        for incarnation in list(self._pidfds):
            self._has_ended(incarnation)


def has_ended(pidfd: int) -> bool:
    """Whether the process of a descriptor has ended, every thread of it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor of the connected process; -1 where its pid namespace is another."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
        return -1
    os.set_inheritable(fd, False)
    return fd

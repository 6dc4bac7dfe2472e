"""One connection between two agents of one host, and the messages on it.

Frames are those of the socket between worker and agent; a process descriptor rides beside the two
messages that begin it.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdxfer.errors import PeerError, ProtocolError
from pdxfer.local.connection import Inbox, Outbox, encode
from pdxfer.local.messages import LocalMessage
from pdxfer.wire.messages import Incarnation

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

_LOG = logging.getLogger(__name__)
_CREDENTIALS: Final = struct.Struct("iII")


class Meet(LocalMessage, frozen=True, kw_only=True, tag="meet"):
    """The agent that connected says who it is; a descriptor of its process rides beside it."""

    incarnation: Incarnation
    nonce: bytes
    """The nonce from the `Hello` of the other side; whoever returns it here is on this host."""


class Met(LocalMessage, frozen=True, kw_only=True, tag="met"):
    """The listening agent answers `Meet`; a descriptor of its process rides beside it."""

    incarnation: Incarnation
    nonce: bytes
    """The nonce from the `Hello` of the side that connected."""


class Silent(LocalMessage, frozen=True, kw_only=True, tag="silent"):
    """The sender has closed its lanes: that life writes nothing more, its process may live on."""


NeighbourMessage = Meet | Met | Silent


class Line:
    """A connected socket; frames in and out, never waiting. Loop thread only.

    Args:
        sock: owned from here on.
        on_message: gets each message with its descriptors; those left in the list are closed.
        on_end: called once when the other end closed, or broke a rule; not after `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[Line, NeighbourMessage, list[int]], None],
        on_end: Callable[[Line, str], None],
    ) -> None:
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)
        """Process id and user id of the other end, as the kernel gives them; pid 0: it is in
        another pid namespace."""
        self.closed = False
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._inbox: Inbox[NeighbourMessage] = Inbox(NeighbourMessage)
        self._outbox = Outbox()
        loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: NeighbourMessage, fds: Sequence[int] = ()) -> None:
        """Send one small message; the descriptors stay the caller's.

        A socket that does not take it at once ends the line: nothing here fills its buffer.
        """
        if self.closed:
            return
        try:
            self._outbox.append(encode(message, len(fds)), fds)
            sent = self._outbox.flush(self._sock)
        except OSError as error:
            self._end(str(error))
            return
        if not sent:
            self._end("it does not read")

    def close(self) -> None:
        """Close now. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._inbox.close()
        self._outbox.close()
        self._sock.close()

    def take_process(self, fds: list[int]) -> int:
        """The process descriptor that came with a message, if it is of the other end's process.

        Returns: the descriptor, the caller's from here on.

        Raises: PeerError: it is not, or that process has ended.
        """
        if len(fds) != 1:
            raise PeerError(f"{len(fds)} descriptors came with its greeting, expected its process")
        pid = _process_of(fds[0])
        if pid <= 0 or pid != self.pid:
            raise PeerError(f"it passed a descriptor of process {pid}, it is process {self.pid}")
        return fds.pop()

    def _on_readable(self) -> None:
        try:
            self._inbox.receive(self._sock)
            while not self.closed and (got := self._inbox.next()) is not None:
                self._dispatch(*got)
        except EOFError:
            self._end("it closed the connection")
        except (OSError, ProtocolError) as error:
            self._end(str(error))

    def _dispatch(self, message: NeighbourMessage, fds: list[int]) -> None:
        try:
            self._on_message(self, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_end(self, reason)


def _process_of(fd: int) -> int:
    """The process id behind a process descriptor; -1 once it has ended, or for anything else."""
    try:
        described = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    except OSError:
        return -1
    for line in described.splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return -1


def listen(path: str) -> socket.socket:
    """A listening socket of mode 0600 at `path`, however long that is.

    Raises: OSError.
    """
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)  # on Linux the file is made with this mode
        listener.bind(_short(folder, path))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


def connect(path: str) -> socket.socket:
    """A socket connected to the agent of this user that listens at `path`.

    The path was told by a peer: nothing but a socket of this user is connected to.

    Raises: OSError.
    """
    status = os.lstat(path)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{path} is no socket of user {os.geteuid()}")
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(_short(folder, path))
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def is_dead(path: str) -> bool:
    """Whether a socket file has nobody who listens on it any more."""
    try:
        connect(path).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _short(folder: int, path: str) -> str:
    """The same file by a path that fits into a socket address."""
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}"

"""The agent's end of the Unix socket: accepts workers, reads and writes their frames.

Not built on asyncio transports, which drop descriptors: non-blocking `recvmsg` and `sendmsg` under
`add_reader` and `add_writer`. All of it runs on the loop's thread. Whatever one worker sends, or
fails to read, ends at most that worker's connection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from pdxfer import limits
from pdxfer.errors import ConfigError, PdxferError, RemoteProtocolError, ResourceError
from pdxfer.local.binding import bind
from pdxfer.local.connection import Inbox, Outbox, encode
from pdxfer.local.descriptors import Reserve, is_shortage, shortage
from pdxfer.local.messages import FromAgent, FromWorker, Refused

_LOG = logging.getLogger(__name__)
_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module has no name for it
_CREDENTIALS: Final = struct.Struct("iII")
_READS_PER_EVENT: Final = 16
_READS_AFTER_EXIT: Final = 256
_ACCEPTS_PER_EVENT: Final = 16
_ACCEPT_PAUSE_S: Final = 0.1


class Handler(Protocol):
    """What the agent does with its workers. Called on the loop's thread; must not block."""

    def on_connected(self, conn: Connection) -> None:
        """A worker of an allowed user is there; nothing has been read from it."""
        ...

    def on_message(self, conn: Connection, message: FromWorker, fds: list[int]) -> None:
        """A message came, in order.

        The descriptors left in `fds` are closed when this returns; remove those to keep.
        """
        ...

    def on_closed(self, conn: Connection, reason: str) -> None:
        """The worker is gone, or `close` was called. Last call for `conn`, exactly one."""
        ...


class Connection:
    """One connected worker."""

    def __init__(self, server: LocalServer, sock: socket.socket, pid: int, uid: int) -> None:
        self.pid = pid
        """User id and process id of the worker, as the kernel gives them."""
        self.uid = uid
        self.pidfd = _open_pidfd(sock, pid)
        """Descriptor of the worker's process, readable once that has ended; -1 where there is
        none."""
        self.closed = False
        self._server = server
        self._loop = server.loop
        self._sock = sock
        self._inbox: Inbox[FromWorker] = Inbox(FromWorker)
        self._outbox = Outbox()
        self._writing = False

    def open(self) -> None:
        """Start to watch the socket and the process."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)
        if self.pidfd >= 0:
            self._loop.add_reader(self.pidfd, self._on_exit)

    def send(self, message: FromAgent, fds: Sequence[int] = ()) -> None:
        """Queue a message; never blocks. The descriptors stay the caller's, to close at once.

        To a closed connection: dropped, as the worker's death may come at any time. A worker that
        lets more than `limits.LOCAL_QUEUE_BYTES_MAX` pile up is dropped (`on_closed` follows).

        Raises: ResourceError when the message is larger than `limits` allow.
        """
        if self.closed:
            return
        self._outbox.append(encode(message, len(fds)), fds)
        if not self._writing:
            self._flush()
        if self._outbox.queued_bytes > limits.LOCAL_QUEUE_BYTES_MAX:
            self.close(
                f"the worker does not read: {self._outbox.queued_bytes} bytes are queued for it, "
                f"at most {limits.LOCAL_QUEUE_BYTES_MAX} may be"
            )

    def close(self, reason: str = "closed by the agent") -> None:
        """Close now; what is queued is dropped. `on_closed` follows from the loop. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        self._inbox.close()
        self._outbox.close()
        self._sock.close()
        self._server.forget(self)
        self._loop.call_soon(self._server.handler.on_closed, self, reason)

    # -- events --------------------------------------------------------------------------------
    def _on_readable(self) -> None:
        self._read(_READS_PER_EVENT)

    def _on_exit(self) -> None:
        # What the worker sent before it died still counts (an abort, a last chunk). Not more than a
        # socket holds: a forked child of it may go on sending.
        self._read(_READS_AFTER_EXIT)
        self.close(f"the worker's process {self.pid} has ended")

    def _read(self, reads: int) -> None:
        """Up to `reads` reads, and all messages in them."""
        try:
            for _ in range(reads):
                if not self._receive():
                    return
                self._dispatch()
        except EOFError:
            self.close("the worker closed its connection")
        except OSError as error:
            self.close(f"the worker's connection failed: {error.strerror}")
        except RemoteProtocolError as error:
            self._refuse(error)

    def _receive(self) -> bool:
        """One read; False when nothing is there now, or nothing more is wanted."""
        try:
            return not self.closed and self._inbox.receive(self._sock)
        except ResourceError:
            self._refuse(shortage("the agent"))
            return False

    def _dispatch(self) -> None:
        while not self.closed and (got := self._inbox.next()) is not None:
            message, fds = got
            try:
                self._server.handler.on_message(self, message, fds)
            except BaseException as error:
                if is_shortage(error):
                    self._refuse(shortage("the agent"))
                    return
                # A bug in the handler: this worker's requests cannot be trusted to be in order any
                # more. The loop reports the error; the other workers go on.
                self.close(f"internal error: {error!r}")
                raise
            finally:
                for fd in fds:
                    os.close(fd)

    def _refuse(self, error: PdxferError) -> None:
        """Tell why, as far as the socket takes it, and close."""
        _LOG.warning("worker_connection_refused", extra={"pid": self.pid, "reason": str(error)})
        self.send(Refused(**error.to_wire()))
        self.close(str(error))

    def _flush(self) -> None:
        try:
            done = self._outbox.flush(self._sock)
        except OSError as error:
            # Not closed yet: what the worker sent before is still to be read, and then its end.
            _LOG.debug("worker_write_failed", extra={"pid": self.pid, "reason": error.strerror})
            self._outbox.close()
            done = True
        if done and self._writing:
            self._loop.remove_writer(self._sock.fileno())
        elif not done and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        self._writing = not done


class LocalServer:
    """Listens on a Unix socket and makes a `Connection` for each worker."""

    def __init__(
        self, path: str, handler: Handler, *, allowed_uids: Collection[int] | None = None
    ) -> None:
        """Nothing is opened before `start`.

        Args:
            path: of the socket. Its mode is 0600; 0666 when `allowed_uids` names somebody else than
                this user and root, whom the kernel would keep out otherwise.
            handler: what happens.
            allowed_uids: users whose processes may attach, by SO_PEERCRED; None: this user.
        """
        self.path = path
        self.handler = handler
        self.allowed_uids = frozenset({os.geteuid()} if allowed_uids is None else allowed_uids)
        self.loop: asyncio.AbstractEventLoop
        self.connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._inode = (0, 0)
        self._reserve = Reserve()

    async def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Bind and listen; a file left by an agent that died is replaced.

        Raises: ConfigError when the path is too long or is no socket; ResourceError when it cannot
            be bound, or another agent listens there.
        """
        self.loop = loop or asyncio.get_running_loop()
        self._listener = listener = bind(self.path, private=self.allowed_uids <= {0, os.geteuid()})
        self._reserve.restore()
        status = os.stat(self.path)
        self._inode = (status.st_dev, status.st_ino)
        self.loop.add_reader(listener.fileno(), self._on_acceptable)

    def close(self) -> None:
        """Close the listener, its file and every connection. Idempotent."""
        if self._listener is None:
            return
        self.loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        self._reserve.close()
        for connection in list(self.connections):
            connection.close("the agent is closing")
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass

    def forget(self, connection: Connection) -> None:
        """Called by a connection that closes."""
        self.connections.discard(connection)

    def _on_acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_shortage(error) and self._refuse_one():
                    continue
                self._pause_accepting(error)
                return
            self._admit(sock)

    def _refuse_one(self) -> bool:
        """Out of descriptors: tell a waiting worker so, with the one kept back; whether it was."""
        assert self._listener is not None
        self._reserve.restore()
        try:
            sock = self._reserve.accept(self._listener)
        except OSError:
            sock = None
        if sock is not None:
            with sock:
                sock.setblocking(False)
                self._tell_refused(sock, shortage("the agent"))
        self._reserve.restore()
        return sock is not None

    def _pause_accepting(self, error: OSError) -> None:
        """Without descriptors the listener stays readable: look again later, do not spin."""
        _LOG.error("worker_not_accepted", extra={"reason": error.strerror})
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            return
        assert self._listener is not None
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener.fileno(), self._on_acceptable)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        error = self._refusal(uid)
        if error is None:
            try:
                connection = Connection(self, sock, pid, uid)
            except OSError as failed:
                if not is_shortage(failed):
                    raise
                error = shortage("the agent")
        if error is not None:
            with sock:
                self._tell_refused(sock, error, pid=pid, uid=uid)
            return
        self.connections.add(connection)
        connection.open()
        self.handler.on_connected(connection)

    def _refusal(self, uid: int) -> PdxferError | None:
        if uid not in self.allowed_uids:
            return ConfigError(
                f"user {uid} may not attach to this agent; allowed_uids={sorted(self.allowed_uids)}"
            )
        if len(self.connections) >= limits.WORKERS_PER_AGENT_MAX:
            return ResourceError(
                f"this agent has {limits.WORKERS_PER_AGENT_MAX} workers already, its limit",
                retryable=True,
            )
        return None

    def _tell_refused(self, sock: socket.socket, error: PdxferError, **who: int) -> None:
        """Say why a connection is not taken, as far as the socket takes it."""
        _LOG.warning("worker_refused", extra={**who, "reason": str(error)})
        outbox = Outbox()
        outbox.append(encode(Refused(**error.to_wire())))
        try:
            outbox.flush(sock)
        except OSError:
            _LOG.debug("refused_worker_gone", extra=who)
        finally:
            outbox.close()


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor of the connected process.

    Where the kernel can, it comes from the socket, so that it is never that of a later process with
    the same pid.
    """
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if is_shortage(error):
            raise
        try:
            return os.pidfd_open(pid)
        except OSError as failed:
            if is_shortage(failed):
                raise
        # Dead already, or of another pid namespace: the end of the stream will tell.
        return -1
    os.set_inheritable(fd, False)
    return fd

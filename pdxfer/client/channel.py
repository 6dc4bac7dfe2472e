"""A worker's end of the Unix socket: requests with answers, and messages that nobody waits for.

Any number of threads may use one channel. There is no thread of its own: of the threads that wait,
one (the leader) reads the socket for all of them, and the others sleep until it has read something.

Locks: `_changed` guards who leads and what was answered; `_out_lock` guards the outbox. Neither is
held while a thread waits or while `on_message` runs.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from pdxfer.client.line import Line, from_wire_refused, not_accepting, not_connected
from pdxfer.errors import DaemonUnavailableError, PdxferError
from pdxfer.local.connection import encode
from pdxfer.local.messages import FromAgent, LocalMessage, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HANG_UP: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Channel(Line):
    """One connection to an agent. Made connected; `close` is final."""

    def __init__(self, socket_path: str, timeout_s: float) -> None:
        """Connect.

        Raises: DaemonUnavailableError when nobody listens at `socket_path`.
        """
        super().__init__(socket_path)
        self._timeout_s = timeout_s
        self._sock = _connect(socket_path, timeout_s)
        self._out_lock = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._leading = False
        self._closed = False
        self._eventfd = -1

    def watch(self, eventfd: int) -> None:
        """Take over the board's eventfd: a change of the board wakes whoever waits here."""
        self._eventfd = eventfd
        self._close_eventfd = weakref.finalize(self, os.close, eventfd)

    def request(
        self, message: LocalMessage, fds: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> tuple[FromAgent, list[int]]:
        """Send a message that has a request number, and return its answer.

        Raises: the error the agent answers with; DaemonUnavailableError when it is gone, or silent
            for `timeout_s`. A later answer then reaches only `on_message`.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        number = message.request
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._answers[number] = None
        try:
            self.post(message, fds)
            if not self.wait_until(lambda: self._answers[number] is not None, deadline):
                raise self._unanswered(message, timeout_s)
        finally:
            with self._changed:
                answered = self._answers.pop(number)
        assert answered is not None
        if isinstance(answered[0], Refused):
            raise from_wire_refused(answered[0])
        return answered

    def post(self, message: LocalMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and give the kernel what it takes now; never waits.

        Raises: DaemonUnavailableError; ResourceError when the message is too large.
        """
        self.check()
        frame = encode(message, len(fds))
        with self._out_lock:
            self._outbox.append(frame, fds)
            pending = not self._flush()
        if pending:
            self._wake_leader()

    def wait_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Read for all until `done()`, or the deadline (of `time.monotonic`); says which.

        `done` is called on this thread only, after each thing read, with a lock held: it must be
        short and must not use the channel.

        Raises: DaemonUnavailableError when the connection fails before `done()`.
        """
        looked = False
        while True:
            with self._changed:
                while True:
                    if done():
                        return True
                    self.check()
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0 and (looked or self._leading):
                        return False
                    if not self._leading:
                        self._leading = True
                        break
                    self._changed.wait(remaining_s)
            self._lead(remaining_s)
            looked = True

    def collect(self) -> None:
        """Read what is there now, without waiting; nothing when another thread reads already."""
        with self._changed:
            if self._leading or self.failure is not None:
                return
            self._leading = True
        self._lead(0.0)

    def close(self) -> None:
        """Hang up; threads that wait here get a `DaemonUnavailableError`. Idempotent."""
        self._fail(DaemonUnavailableError("this client is closed"))
        with self._changed:
            if self._closed:
                return
            self._closed = True
        # The leader may be inside poll(): wake it by the hang-up and let it go before the
        # descriptors can be given to somebody else.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._changed.wait_for(lambda: not self._leading)
            self._leading = True  # nobody leads any more
        with self._out_lock:
            self._outbox.close()
            self._inbox.close()
            self._sock.close()
            if self._eventfd >= 0:
                self._close_eventfd()
                self._eventfd = -1

    # -- the leader ----------------------------------------------------------------------------
    def _lead(self, timeout_s: float) -> None:
        """Wait once for anything, and handle it. Called with `_leading` taken; gives it up."""
        try:
            if self._poll(timeout_s):
                self._read()
        except (EOFError, OSError, PdxferError) as error:
            self._fail(self._failure_of(error))
        finally:
            with self._changed:
                self._leading = False
                self._changed.notify_all()

    def _poll(self, timeout_s: float) -> bool:
        """Wait for socket or board; True when the socket can be read."""
        poller = select.poll()
        with self._out_lock:
            wants = select.POLLIN if self.drained() else select.POLLIN | select.POLLOUT
        poller.register(self._sock, wants)
        if self._eventfd >= 0:
            poller.register(self._eventfd, select.POLLIN)
        readable = False
        for fd, events in poller.poll(max(0.0, timeout_s * 1e3)):
            if fd == self._eventfd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._eventfd)
                continue
            if events & select.POLLOUT:
                with self._out_lock:
                    self._flush()
            readable = bool(events & (select.POLLIN | _HANG_UP))
        return readable

    def _answer(self, message: FromAgent, fds: list[int]) -> bool:
        with self._changed:
            return super()._answer(message, fds)

    def _wake_leader(self) -> None:
        """Have the leader poll again: it must now wait for the socket to take more."""
        if self._eventfd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._eventfd, 1)

    def _fail(self, error: PdxferError) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()


def _connect(socket_path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Connecting waits while the agent's backlog is full. Python's own timeout would make that an
    # error at once: a Unix socket that does not block has no way to wait for it.
    seconds, fraction = divmod(timeout_s, 1)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        sock.connect(socket_path)
    except BlockingIOError as error:
        sock.close()
        raise not_accepting(socket_path, timeout_s) from error
    except OSError as error:
        sock.close()
        raise not_connected(socket_path, error) from error
    sock.setblocking(False)
    return sock

"""The Unix socket of a sync client: whoever waits blocks its thread.

Any number of threads may use one channel. There is no thread of its own: of the threads that wait,
one (the leader) reads the socket for all of them, and the others sleep until it has read something.

Locks: `_changed` guards who leads; `_out_lock` guards the outbox. Neither is held while a thread
waits or while `on_message` runs.
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

from pdxfer.client.line import Line, not_accepting, not_connected
from pdxfer.errors import DaemonUnavailableError, PdxferError
from pdxfer.local import process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.client.waiting import Bell

_HANG_UP: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Channel(Line):
    """One connection to an agent. Its coroutines block and never suspend; `close` is final."""

    def __init__(self, socket_path: str) -> None:
        super().__init__(socket_path)
        self._out_lock = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._leading = False
        self._closed = False

    async def connect(self, timeout_s: float) -> None:
        """Connect; blocks.

        Raises: DaemonUnavailableError when nobody listens at `socket_path`.
        """
        self._sock = _connect(self.socket_path, timeout_s)

    def watch(self, eventfd: int) -> None:
        """Take over the board's eventfd: a change of the board wakes whoever waits here."""
        self._eventfd = eventfd
        self._close_eventfd = weakref.finalize(self, os.close, eventfd)

    async def until(self, done: Callable[[], bool], timeout_s: float, bell: Bell) -> bool:
        """Read for all until `done()`, or for `timeout_s`; says which. Blocks.

        `done` is called on this thread only, after each thing read, with a lock held.
        """
        deadline = time.monotonic() + timeout_s
        looked = False
        self.check_home()
        self.send_gathered()
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
        self.check_home()
        with self._changed:
            if self._leading or self.failure is not None:
                return
            self._leading = True
        self._lead(None)

    def close(self) -> None:
        """Hang up; threads that wait here get a `DaemonUnavailableError`. Idempotent."""
        if self.home != process.current():  # the locks may be held for ever, by threads not here
            if not self._closed:
                self._closed = True
                if self._eventfd >= 0:
                    self._close_eventfd.detach()
                self._leave_to_parent()
            return
        self._fail(DaemonUnavailableError("this client is closed"))
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if not hasattr(self, "_sock"):
            return
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
    def _lead(self, timeout_s: float | None) -> None:
        """Wait once for anything, and handle it; None: handle what is there, without waiting.

        Called with `_leading` taken; gives it up.
        """
        try:
            if timeout_s is None or self._poll(timeout_s):
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
            wants = select.POLLIN if self.all_sent() else select.POLLIN | select.POLLOUT
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

    def gather(self) -> None:
        """What is posted from here on, by any thread, waits for `let_go`."""
        with self._out_lock:
            self._gathering += 1

    def let_go(self) -> None:
        """Post what was gathered."""
        with self._out_lock:
            self._gathering -= 1
            if not self._gathering:
                self._pack()
        self.push()

    def send_gathered(self) -> None:
        """Post what other threads have gathered so far."""
        if self._gathered:
            with self._out_lock:
                self._pack()
            self.push()

    def push(self) -> None:
        """Give the kernel what it has not taken yet, as far as it takes it now."""
        if self.failure is not None:
            return
        with self._out_lock:
            pending = not self._flush()
        if pending:
            self._wake_leader()

    def _queue(self, body: bytes, fds: Sequence[int]) -> None:
        with self._out_lock:
            pending = self._take(body, fds) and not self._flush()
        if pending:
            self._wake_leader()

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

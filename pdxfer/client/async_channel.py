"""The Unix socket of an async client: the event loop tells when to read and write.

Everything happens on the loop's thread, and nothing blocks it: the socket and the board's eventfd
stand under `add_reader`; what the socket does not take at once goes out under `add_writer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Final

from pdxfer.client.line import Line, not_accepting, not_connected
from pdxfer.errors import DaemonUnavailableError, LocalProtocolError, PdxferError
from pdxfer.local import process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.client.waiting import Bell

_CONNECT_RETRY_S: Final = 0.005


class AsyncChannel(Line):
    """One connection to an agent, of one event loop. Made unconnected; `close` is final."""

    def __init__(self, socket_path: str) -> None:
        super().__init__(socket_path)
        self.failure = LocalProtocolError(
            "this client is not attached to its agent yet: make it by `await create(...)`, or "
            "enter it by `async with`"
        )
        self._loop: asyncio.AbstractEventLoop
        self._connected = False
        self._watching = False
        self._writing = False

    async def connect(self, timeout_s: float) -> None:
        """Connect on the running loop.

        Raises: DaemonUnavailableError when nobody listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await _connect(sock, self.socket_path, timeout_s)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._connected = self._watching = True
        self.failure = None
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def check_home(self) -> None:
        """Raise LocalProtocolError in a fork, and on another event loop while it is open there."""
        super().check_home()
        if not self._connected or self.failure is not None:
            return
        try:
            elsewhere = asyncio.get_running_loop() is not self._loop
        except RuntimeError:  # no loop runs: nothing is awaited then
            return
        if elsewhere:
            raise LocalProtocolError(
                "this client belongs to another event loop, the one that it was attached on: use "
                "it there, or make another client on this loop"
            )

    def watch(self, eventfd: int) -> None:
        """Take over the board's eventfd: `on_board` is called when it changes."""
        self._eventfd = eventfd
        self._loop.add_reader(eventfd, self._on_board)

    async def until(self, done: Callable[[], bool], timeout_s: float, bell: Bell) -> bool:
        """Wait until `done()`, at most for `timeout_s`; True when it is done.

        Cancelling changes nothing.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            self.check()
            self.send_gathered()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            await self._woken(done, remaining_s, bell)
        return True

    def gather(self) -> None:
        """What is posted from here on, by any task, waits for `let_go`."""
        self._gathering += 1

    def let_go(self) -> None:
        """Post what was gathered, as one message."""
        self._gathering -= 1
        if not self._gathering:
            self._pack()
            self.push()

    def send_gathered(self) -> None:
        """Post what was gathered so far."""
        if self._gathered:
            self._pack()
            self.push()

    def push(self) -> None:
        """Give the kernel what it has not taken yet; the loop goes on with the rest."""
        if self.failure is None and not self._writing:
            self._on_writable()

    async def _woken(self, done: Callable[[], bool], remaining_s: float, bell: Bell) -> None:
        future = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        place = (done, wake)
        bell.waiting.append(place)
        timer = self._loop.call_later(remaining_s, wake)
        try:
            await future
        finally:
            timer.cancel()
            bell.waiting.remove(place)

    def collect(self) -> None:
        """Read what is there now, without waiting."""
        self.check_home()
        if self.failure is None:
            self._on_readable()

    def close(self) -> None:
        """Hang up; tasks that wait here get a `DaemonUnavailableError`. Idempotent."""
        if self.home != process.current():
            # The loop's own descriptor is the parent's too: nothing may be taken off it here.
            self._leave_to_parent()
            return
        self._fail(DaemonUnavailableError("this client is closed"))
        self._outbox.close()
        self._inbox.close()
        if self._connected:
            self._connected = False
            self._sock.close()
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    # -- events --------------------------------------------------------------------------------
    def _queue(self, body: bytes, fds: Sequence[int]) -> None:
        if self._take(body, fds):
            self.push()

    def _on_readable(self) -> None:
        try:
            self._read()
        except (EOFError, OSError, PdxferError) as error:
            self._fail(self._failure_of(error))
        except Exception as error:
            # A bug of ours. Nobody must wait for what was not read; the loop reports the error.
            self._fail(self._failure_of(error))
            raise

    def _on_board(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        self.on_board()
        self.board_bell.ring()

    def _on_writable(self) -> None:
        done = self._flush()
        if not done and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif done and self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._writing = not done
        self._sent.ring()

    def _fail(self, error: PdxferError) -> None:
        if self._connected and self.failure is not None:
            return
        self.failure = error
        self._unwatch()
        for bell in (
            self._sent,
            self.board_bell,
            *(answer.bell for answer in self._answers.values()),
        ):
            bell.ring(everybody=True)
        self.on_failure()

    def _unwatch(self) -> None:
        """Leave the loop: an ended socket would stay readable for ever."""
        if not self._watching:
            return
        self._watching = False
        if self._loop.is_closed():
            return
        self._loop.remove_reader(self._sock.fileno())
        if self._eventfd >= 0:
            self._loop.remove_reader(self._eventfd)
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
            self._writing = False


async def _connect(sock: socket.socket, socket_path: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(socket_path)
        except BlockingIOError as error:
            # The agent's backlog is full, and a Unix socket has no event for its end: ask again.
            if time.monotonic() >= deadline:
                raise not_accepting(socket_path, timeout_s) from error
        except OSError as error:
            raise not_connected(socket_path, error) from error
        else:
            return
        await asyncio.sleep(_CONNECT_RETRY_S)

"""A worker's end of the Unix socket on an event loop: the loop tells when to read and write.

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

from pdxfer.client.line import Line, from_wire_refused, not_accepting, not_connected
from pdxfer.errors import DaemonUnavailableError, LocalProtocolError, PdxferError
from pdxfer.local.connection import encode
from pdxfer.local.messages import FromAgent, LocalMessage, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CONNECT_RETRY_S: Final = 0.005


class Bell:
    """Where tasks wait for something to become true; whoever may have made it true rings."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def ring(self, *, everybody: bool = False) -> None:
        """Wake those who have what they wait for."""
        for done, future in self._waiting:
            if not future.done() and (everybody or done()):
                future.set_result(None)

    async def until(
        self, done: Callable[[], bool], timeout_s: float, check: Callable[[], None]
    ) -> bool:
        """Wait until `done()`, or for `timeout_s`; says which. Cancelling changes nothing.

        Raises: what `check` raises, called when woken before `done()`.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            await self._woken(done, remaining_s)
        return True

    async def _woken(self, done: Callable[[], bool], remaining_s: float) -> None:
        loop = asyncio.get_running_loop()
        place = (done, loop.create_future())
        self._waiting.append(place)
        timer = loop.call_later(remaining_s, _wake, place[1])
        try:
            await place[1]
        finally:
            timer.cancel()
            self._waiting.remove(place)


class AsyncChannel(Line):
    """One connection to an agent, of one event loop. Made unconnected; `close` is final."""

    def __init__(self, socket_path: str) -> None:
        super().__init__(socket_path)
        self.failure = LocalProtocolError(
            "this client is not attached to its agent yet: make it by `await create(...)`, or "
            "enter it by `async with`"
        )
        self.on_board: Callable[[], None] = _nothing
        """Called when the board may have changed."""
        self.on_failure: Callable[[], None] = _nothing
        """Called once, when the connection has become unusable."""
        self._loop: asyncio.AbstractEventLoop
        self._connected = False
        self._watching = False
        self._writing = False
        self._eventfd = -1
        self._posted_bytes = 0
        self._sent = Bell()
        self._answered: dict[int, Bell] = {}
        """By request awaited."""

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

    def watch(self, eventfd: int) -> None:
        """Take over the board's eventfd: `on_board` is called when it changes."""
        self._eventfd = eventfd
        self._loop.add_reader(eventfd, self._on_board)

    async def request(
        self, message: LocalMessage, fds: Sequence[int] = (), *, timeout_s: float
    ) -> tuple[FromAgent, list[int]]:
        """Send a message that has a request number, and return its answer.

        Cancelling leaves the request on its way; a later answer then reaches only `on_message`.

        Raises: the error the agent answers with; DaemonUnavailableError when it is gone, or silent
            for `timeout_s`.
        """
        number = message.request
        self._answers[number] = None
        self._answered[number] = bell = Bell()
        taken = False
        try:
            self.post(message, fds)
            if not await bell.until(
                lambda: self._answers[number] is not None, timeout_s, self.check
            ):
                raise self._unanswered(message, timeout_s)
            taken = True
        finally:
            del self._answered[number]
            answered = self._answers.pop(number)
            if answered is not None and not taken:
                for fd in answered[1]:
                    os.close(fd)
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
        self._outbox.append(frame, fds)
        self._posted_bytes += len(frame)
        if not self._writing:
            self._on_writable()

    async def sent(self, timeout_s: float) -> bool:
        """Wait until the kernel has what has been posted so far; False: not within `timeout_s`.

        Raises: DaemonUnavailableError when the connection fails before.
        """
        goal = self._posted_bytes
        in_time = await self._sent.until(
            lambda: self._posted_bytes - self._outbox.queued_bytes >= goal, timeout_s, self.check
        )
        self.check()
        return in_time

    def collect(self) -> None:
        """Read what is there now, without waiting."""
        if self.failure is None:
            self._on_readable()

    def close(self) -> None:
        """Hang up; tasks that wait here get a `DaemonUnavailableError`. Idempotent."""
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

    def _on_writable(self) -> None:
        done = self._flush()
        if not done and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif done and self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._writing = not done
        self._sent.ring()

    def _answer(self, message: FromAgent, fds: list[int]) -> bool:
        taken = super()._answer(message, fds)
        if taken:
            self._answered[message.request].ring()
        return taken

    def _fail(self, error: PdxferError) -> None:
        if self._connected and self.failure is not None:
            return
        self.failure = error
        self._unwatch()
        for bell in (self._sent, *self._answered.values()):
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


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _nothing() -> None:
    """Nobody listens yet."""

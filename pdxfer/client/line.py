"""A worker's end of the Unix socket.

How to wait is left open: `Channel` blocks the thread that waits, `AsyncChannel` suspends the task.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdxfer import limits
from pdxfer.client.proofs import AgentProcess
from pdxfer.client.waiting import Bell
from pdxfer.errors import (
    ConfigError,
    DaemonUnavailableError,
    LocalProtocolError,
    PdxferError,
    from_wire,
)
from pdxfer.local import process
from pdxfer.local.connection import Inbox, Outbox, encode, encode_body, framed
from pdxfer.local.messages import (
    FromAgent,
    LocalMessage,
    Refused,
    Together,
    TransferWriters,
    Writer,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from pdxfer.client.cache import EmbeddedAgent


_TOGETHER_BYTES_MAX: Final = limits.LOCAL_MESSAGE_BYTES_MAX - 1024
_BLOCKS: Final[ContextVar[tuple[object, ...]]] = ContextVar("pdxfer_together", default=())
"""The `together` blocks that the running thread or task is in."""


@dataclass(slots=True)
class Answer:
    """What comes to a request that somebody waits for."""

    bell: Bell = field(default_factory=Bell)
    message: FromAgent | None = None
    fds: list[int] = field(default_factory=list)


class Line:
    """One connection to an agent: what came, what goes, which requests are not answered yet."""

    _sock: socket.socket
    """Connected, non-blocking."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.on_message: Callable[[FromAgent], None] = _ignore
        """Called with each message, in order, where it is read, before its waiter wakes."""
        self.on_writer: Callable[[FromAgent, list[int]], None] = _ignore_with_fds
        """Called with what the agent says of other processes that may write; takes descriptors."""
        self.on_board: Callable[[], None] = _nothing
        """Called when the board may have changed, where somebody watches it all the time."""
        self.on_failure: Callable[[], None] = _nothing
        """Called once, when the connection has become unusable."""
        self.failure: PdxferError | None = None
        """Why the connection is unusable; None while it can be used."""
        self.home = process.current()
        """The process that may use it."""
        self._inbox: Inbox[FromAgent] = Inbox(FromAgent)
        self._outbox = Outbox()
        self.board_bell = Bell()
        """Where those wait who wait for anything on the board."""
        self._posted_bytes = 0
        self._gathering = 0
        """How many calls of `gather` wait for their `let_go`."""
        self._blocks: set[object] = set()
        """Those of these calls that come from `together`, whose callers do not wait inside."""
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._sent = Bell()
        self._eventfd = -1
        self._ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        """Answers that somebody waits for, by their request number."""

    def new_request(self) -> int:
        """A number that no other request of this connection has."""
        return next(self._ids)

    def number_on(self, earlier: Line) -> None:
        """Number requests behind those of an earlier connection of the same client."""
        self._ids = earlier._ids

    def check(self) -> None:
        """Raise what ended the connection, if anything did. No system call."""
        self.check_home()
        if self.failure is not None:
            raise from_wire(self.failure.to_wire())

    def check_home(self) -> None:
        """Raise LocalProtocolError in a fork of the process that this belongs to.

        A channel of an event loop raises it on another one too.
        """
        if self.home != process.current():
            raise process.inherited("client", self.home)

    def all_sent(self) -> bool:
        """Whether the kernel has all that was posted."""
        return self._outbox.queued_bytes == 0

    def post(self, message: LocalMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and give the kernel what it takes now; never waits, and keeps the GIL.

        Raises: DaemonUnavailableError; ResourceError when the message is too large.
        """
        self.check()
        self._queue(encode_body(message, len(fds)), fds)

    def check_not_gathering(self) -> None:
        """Raise LocalProtocolError where an answer would be waited for that nobody asks for yet."""
        if self.inside_together():
            raise LocalProtocolError(
                "inside together() nothing is sent before its end, so nothing can be waited for: "
                "ask with wait=False, or outside"
            )

    def inside_together(self) -> bool:
        """Whether the calling thread or task, or one that made this task, is in a `together`."""
        return not self._blocks.isdisjoint(_BLOCKS.get())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Gather what is posted inside; calls of this thread or task do not wait inside."""
        block = object()
        self.gather()
        self._blocks.add(block)
        _BLOCKS.set((*_BLOCKS.get(), block))
        try:
            yield
        finally:
            self._blocks.discard(block)
            _BLOCKS.set(tuple(each for each in _BLOCKS.get() if each is not block))
            self.let_go()

    def gather(self) -> None:
        """What is posted from here on waits for `let_go`, and travels as one message."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Post what was gathered."""
        raise NotImplementedError

    def send_gathered(self) -> None:
        """Post what was gathered so far: somebody waits, perhaps for an answer to it."""
        raise NotImplementedError

    def push(self) -> None:
        """Give the kernel what it has not taken yet, as far as it takes it now."""
        raise NotImplementedError

    async def connect(self, timeout_s: float) -> None:
        """Connect; once.

        Raises: DaemonUnavailableError when nobody listens at `socket_path`.
        """
        raise NotImplementedError

    async def until(self, done: Callable[[], bool], timeout_s: float, bell: Bell) -> bool:
        """Wait until `done()`, or for `timeout_s`; says which.

        `done` must be short and must not use the connection. `bell` is rung when it may have become
        true (a sync client asks `done` after everything that it reads).

        Raises: DaemonUnavailableError when the connection fails before `done()`.
        """
        raise NotImplementedError

    async def sent(self, timeout_s: float) -> bool:
        """Wait until the kernel has what has been posted so far; False: not within `timeout_s`.

        Raises: DaemonUnavailableError when the connection fails before.
        """
        goal = self._posted_bytes
        return await self.until(
            lambda: self._posted_bytes - self._outbox.queued_bytes >= goal, timeout_s, self._sent
        )

    async def request(
        self, message: LocalMessage, fds: Sequence[int] = (), *, timeout_s: float
    ) -> tuple[FromAgent, list[int]]:
        """Send a message that has a request number, and return its answer.

        Cancelling leaves the request on its way; a later answer then reaches only `on_message`.

        Raises: the error the agent answers with; DaemonUnavailableError when it is gone, or silent
            for `timeout_s`.
        """
        self.check_not_gathering()
        answer = self.ask(message, fds)
        taken = False
        try:
            if not await self.until(lambda: answer.message is not None, timeout_s, answer.bell):
                raise self.unanswered(message, timeout_s)
            taken = True
        finally:
            self._answers.pop(message.request, None)
            if not taken:
                _close_all(answer.fds)
        assert answer.message is not None
        if isinstance(answer.message, Refused):
            raise from_wire_refused(answer.message)
        return answer.message, answer.fds

    def ask(self, message: LocalMessage, fds: Sequence[int] = ()) -> Answer:
        """Send a message that has a request number; its answer will be found in what is returned.

        Raises: DaemonUnavailableError; ResourceError when the message is too large.
        """
        self._answers[message.request] = answer = Answer()
        try:
            self.post(message, fds)
        except BaseException:
            del self._answers[message.request]
            raise
        return answer

    def forget(self, message: LocalMessage) -> None:
        """Forget a request: nobody looks for its answer any more."""
        self._answers.pop(message.request, None)

    def watch(self, eventfd: int) -> None:
        """Take over the board's eventfd: a change of the board wakes whoever waits here."""
        raise NotImplementedError

    def collect(self) -> None:
        """Read what is there now, without waiting; keeps the GIL."""
        raise NotImplementedError

    def close(self) -> None:
        """Hang up; whoever waits here gets a `DaemonUnavailableError`. Idempotent.

        In a fork of the process that made it: close what this process has inherited, and say
        nothing to anybody.
        """
        raise NotImplementedError

    def unanswered(self, message: LocalMessage, timeout_s: float) -> DaemonUnavailableError:
        """The error of a request that the agent has not answered in time."""
        return DaemonUnavailableError(
            f"the agent at {self.socket_path} did not answer {type(message).__name__} within "
            f"timeout_s={timeout_s:g}",
            retryable=True,
        )

    # -- for those who derive ------------------------------------------------------------------
    def _queue(self, body: bytes, fds: Sequence[int]) -> None:
        """Queue what a frame carries and give the kernel what it takes now."""
        raise NotImplementedError

    def _take(self, body: bytes, fds: Sequence[int]) -> bool:
        """Put a body into the outbox; False where it is gathered instead."""
        if self._gathering and not fds:
            if self._gathered_bytes + len(body) > _TOGETHER_BYTES_MAX:
                self._pack()
            self._gathered.append(body)
            self._gathered_bytes += len(body)
            return False
        frame = framed(body, len(fds))
        self._outbox.append(frame, fds)
        self._posted_bytes += len(frame)
        return True

    def _pack(self) -> None:
        """Put what was gathered into the outbox, as one message."""
        bodies, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not bodies:
            return
        frame = framed(bodies[0]) if len(bodies) == 1 else encode(together(bodies))
        self._outbox.append(frame)
        self._posted_bytes += len(frame)

    def _read(self) -> None:
        """Read and hand out all that is there.

        Raises: what `_failure_of` takes.
        """
        while self._inbox.receive(self._sock):
            while (got := self._inbox.next()) is not None:
                self._dispatch(*got)

    def _dispatch(self, message: FromAgent, fds: list[int]) -> None:
        if isinstance(message, Writer | TransferWriters):
            self.on_writer(message, fds)
        self.on_message(message)
        answer = self._answers.pop(message.request, None)
        if answer is not None:
            answer.fds, answer.message = fds, message
            answer.bell.ring()
            return
        _close_all(fds)
        if isinstance(message, Refused) and not message.request:
            # The agent refuses this connection as a whole, and closes it.
            self._fail(from_wire_refused(message))

    def _flush(self) -> bool:
        """Send what the socket takes; True when nothing is left to send."""
        try:
            return self._outbox.flush(self._sock)
        except OSError:
            # The agent hung up. What it said before is still to be read, and then its end: the
            # reader reports that.
            self._outbox.close()
            return True

    def _fail(self, error: PdxferError) -> None:
        """Note what ended the connection, the first time, and wake whoever waits."""
        raise NotImplementedError

    def agent_process(self, embedded: EmbeddedAgent | None) -> AgentProcess:
        """The process at the other end. Call this before the agent has answered anything."""
        return AgentProcess(self._sock, lambda: embedded is not None and embedded.closed)

    def _leave_to_parent(self) -> None:
        """Close descriptors that this process has inherited; their connection goes on elsewhere."""
        self.failure = self.failure or process.inherited("client", self.home)
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1
        if hasattr(self, "_sock"):
            self._sock.close()

    def _failure_of(self, error: Exception) -> PdxferError:
        """What an error of reading means: EOFError, OSError or ours."""
        if isinstance(error, EOFError):
            return DaemonUnavailableError(
                f"the agent at {self.socket_path} is gone: it closed the connection"
            )
        if isinstance(error, OSError):
            return DaemonUnavailableError(
                f"the connection to the agent at {self.socket_path} failed: {error.strerror}"
            )
        if isinstance(error, PdxferError):
            return error
        return DaemonUnavailableError(f"this client failed while it read: {error!r}")


def not_accepting(socket_path: str, timeout_s: float) -> DaemonUnavailableError:
    """The error of a connection that the agent did not accept, since its backlog stayed full."""
    return DaemonUnavailableError(
        f"the agent at socket_path={socket_path} does not accept within timeout_s={timeout_s:g}",
        retryable=True,
    )


def not_connected(socket_path: str, error: OSError) -> PdxferError:
    """The error of a connection that failed at once."""
    if error.errno is None:
        return ConfigError(f"socket_path={socket_path}: {error}")
    remedy = (
        "Only its own user, and those of its allowed_uids, may attach"
        if isinstance(error, PermissionError)
        else "Start pdxfer-prefill or pdxfer-decode, or give the client the socket path of the one "
        "that runs: its setting socket_path, `socket` in its ready file"
    )
    return DaemonUnavailableError(
        f"no agent at socket_path={socket_path}: {error.strerror}. {remedy}", retryable=True
    )


def from_wire_refused(refused: Refused) -> PdxferError:
    """The error in a refusal, made anew: a raised exception collects tracebacks."""
    return from_wire(
        {
            "code": refused.code,
            "text": refused.text,
            "retryable": refused.retryable,
            "fields": refused.fields,
        }
    )


def together(bodies: Sequence[bytes]) -> Together:
    """One message of several that are encoded already."""
    raw: list[Any] = [msgspec.Raw(body) for body in bodies]
    return Together(messages=raw)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _ignore(message: FromAgent) -> None:
    """Ignore a message: nobody has set a callback yet."""


def _ignore_with_fds(message: FromAgent, fds: list[int]) -> None:
    """Ignore a message with descriptors: nobody has set a callback yet."""


def _nothing() -> None:
    """Ignore a call: nobody has set a callback yet."""

"""A worker's end of the Unix socket, without the waiting: `Channel` and `AsyncChannel` add that.

Neither locks nor clocks here. Whoever derives from `Line` says when to read, when to write, and
who is woken.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError, DaemonUnavailableError, PdxferError, from_wire
from pdxfer.local.connection import Inbox, Outbox
from pdxfer.local.messages import FromAgent, LocalMessage, Refused

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence


class Line:
    """One connection to an agent: what came, what goes, which requests are not answered yet."""

    _sock: socket.socket
    """Connected, non-blocking."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.on_message: Callable[[FromAgent], None] = _ignore
        """Called with each message, in order, where it is read, before its waiter wakes."""
        self.failure: PdxferError | None = None
        """Why the connection is unusable; None while it is fine."""
        self._inbox: Inbox[FromAgent] = Inbox(FromAgent)
        self._outbox = Outbox()
        self._ids = itertools.count(1)
        self._answers: dict[int, tuple[FromAgent, list[int]] | None] = {}
        """By request awaited: the answer, None until it comes."""

    def new_request(self) -> int:
        """A number that no other request of this connection has."""
        return next(self._ids)

    def check(self) -> None:
        """Raise what ended the connection, if anything did. No system call."""
        if self.failure is not None:
            raise from_wire(self.failure.to_wire())

    def drained(self) -> bool:
        """Whether the kernel has all that was posted."""
        return self._outbox.queued_bytes == 0

    def post(self, message: LocalMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and give the kernel what it takes now; never waits.

        Raises: DaemonUnavailableError; ResourceError when the message is too large.
        """
        raise NotImplementedError

    def collect(self) -> None:
        """Read what is there now, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """Hang up; whoever waits here gets a `DaemonUnavailableError`. Idempotent."""
        raise NotImplementedError

    # -- for those who derive ------------------------------------------------------------------
    def _read(self) -> None:
        """Read and hand out all that is there.

        Raises: what `_failure_of` takes.
        """
        while self._inbox.receive(self._sock):
            while (got := self._inbox.next()) is not None:
                self._dispatch(*got)

    def _dispatch(self, message: FromAgent, fds: list[int]) -> None:
        self.on_message(message)
        if self._answer(message, fds):
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Refused) and not message.request:
            # The agent refuses this connection as a whole, and closes it.
            self._fail(from_wire_refused(message))

    def _answer(self, message: FromAgent, fds: list[int]) -> bool:
        """Keep the message if it is the first answer to a request that is awaited."""
        if self._answers.get(message.request, fds) is not None:
            return False
        self._answers[message.request] = (message, fds)
        return True

    def _flush(self) -> bool:
        """True when nothing is left to send."""
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

    def _unanswered(self, message: LocalMessage, timeout_s: float) -> DaemonUnavailableError:
        return DaemonUnavailableError(
            f"the agent at {self.socket_path} did not answer {type(message).__name__} within "
            f"timeout_s={timeout_s:g}",
            retryable=True,
        )


def not_accepting(socket_path: str, timeout_s: float) -> DaemonUnavailableError:
    """The agent's backlog stayed full."""
    return DaemonUnavailableError(
        f"the agent at socket_path={socket_path} does not accept within timeout_s={timeout_s:g}",
        retryable=True,
    )


def not_connected(socket_path: str, error: OSError) -> PdxferError:
    """Connecting failed at once."""
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


def _ignore(message: FromAgent) -> None:
    """Nobody listens yet."""

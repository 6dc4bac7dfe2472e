"""The agents of this host that an agent has a session with: proven to be here, and seen to die.

Two agents find out that they are neighbours by connecting. The prefill agent listens on a Unix
socket of its own, made for this life; its path travels in `Hello` with a nonce that is made for
that peer alone. The decode agent connects and returns the nonce, and the prefill agent returns the
one of decode's `Hello`. Whoever reaches the socket and knows the nonce is on this host and is the
peer of that session. Each side passes a descriptor of its process: it becomes readable when that
process has ended, which proves that a lane written by the peer's own system calls (cma) is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import hashlib
import hmac
import logging
import os
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.agent.host import host_id
from pdxfer.agent.neighbour_line import (
    Line,
    Meet,
    Met,
    NeighbourMessage,
    Silent,
    connect,
    is_dead,
    listen,
)
from pdxfer.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.wire.messages import Hello

_LOG = logging.getLogger("pdxfer.agent")
_NONCE_BYTES: Final = 16
_SUFFIX_DIGITS: Final = 8
_ACCEPTS_PER_EVENT: Final = 16
_ACCEPT_PAUSE_S: Final = 0.1


@dataclass(slots=True)
class _Neighbour:
    """A peer that has proven to be on this host."""

    line: Line
    pidfd: int
    """Descriptor of the neighbour's process; -1 once that has ended."""


@dataclass(slots=True)
class _Meeting:
    """A decode agent's attempt to prove that a peer is on this host."""

    peer: bytes
    nonce: bytes
    done: Callable[[str], None]


class Neighbours:
    """The neighbours of one agent. Loop thread only; no method blocks.

    Args:
        incarnation: this agent's.
        beside: path of the socket for this agent's workers; the one for neighbours is beside it.
        on_dead: the process of a neighbour has ended: it writes nothing more. Called once.
        on_silent: a neighbour has closed its lanes in order: that life writes nothing more.

    State:
        `local_socket` and `nonce` are what this agent's `Hello` says. A peer is a neighbour from
        its proof on until `forget`, also after its process has ended.
    """

    def __init__(
        self,
        incarnation: bytes,
        beside: str,
        *,
        on_dead: Callable[[bytes], None],
        on_silent: Callable[[bytes], None],
    ) -> None:
        self.incarnation = incarnation
        self.local_socket = ""
        """Path of the socket that neighbours connect to; empty: this agent does not listen."""
        self._beside = os.path.abspath(beside)
        self._on_dead = on_dead
        self._on_silent = on_silent
        self._secret = os.urandom(_NONCE_BYTES)
        self._listener: socket.socket | None = None
        self._near: dict[bytes, _Neighbour] = {}
        self._expected: dict[bytes, bytes] = {}
        """The nonce in the `Hello` to each peer that may connect."""
        self._strangers: dict[Line, asyncio.TimerHandle] = {}
        """Connections on which nothing was proven yet, each with the timer that closes it."""
        self._meetings: dict[Line, _Meeting] = {}

    # -- life --------------------------------------------------------------------------------
    def start(self, loop: asyncio.AbstractEventLoop, *, listening: bool) -> None:
        """Begin; with `listening` make the socket, and remove those of dead lives at this place.

        Without a socket (the reason is logged) peers are served, but none is a neighbour.
        """
        self._loop = loop
        if not listening:
            return
        path = f"{self._beside}.{_suffix(self.incarnation)}"
        digits = "[0-9a-f]" * _SUFFIX_DIGITS
        for old in glob.glob(f"{glob.escape(self._beside)}.{digits}"):
            if is_dead(old):
                with contextlib.suppress(OSError):
                    os.unlink(old)
        try:
            self._listener = listen(path)
        except OSError as error:
            _LOG.warning(
                "neighbour_socket_failed", extra={"fields": {"path": path, "reason": str(error)}}
            )
            return
        self.local_socket = path
        loop.add_reader(self._listener.fileno(), self._on_acceptable)

    def close(self, *, silent: bool = False) -> None:
        """Close every connection and the socket; the file is removed. Idempotent.

        Args:
            silent: this agent's lanes are closed, and neighbours are told so.
        """
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):  # somebody has tidied the folder, or it is gone
                os.unlink(self.local_socket)
            self.local_socket = ""
        for line in [*self._strangers, *self._meetings]:
            line.close()
        for timer in self._strangers.values():
            timer.cancel()
        self._strangers.clear()
        self._meetings.clear()
        self._expected.clear()
        for peer, neighbour in list(self._near.items()):
            if silent:
                neighbour.line.send(Silent())
            self.forget(peer)

    # -- what an agent asks ------------------------------------------------------------------
    def nonce(self, peer: bytes = b"") -> bytes:
        """The nonce for the `Hello` to a peer; an empty `peer`: one that is not known yet."""
        return hashlib.blake2b(peer, key=self._secret, digest_size=_NONCE_BYTES).digest()

    def expect(self, peer: bytes, hello: Hello) -> None:
        """Prefill: a session with a peer begins, which may now connect; an older proof is over."""
        self.forget(peer)
        if not why_apart(hello):
            self._expected[peer] = hello.nonce

    def meet(self, peer: bytes, hello: Hello, done: Callable[[str], None]) -> None:
        """Decode: find out whether a prefill life is on this host.

        Args:
            peer: that life.
            hello: what it says of itself.
            done: called once, at once or within `limits.NEIGHBOUR_TIMEOUT_S`, with an empty text
                once the peer is a neighbour, else with the reason why it is none. Not after
                `stop_meeting`, `forget` or `close`. A proof of an earlier session stays until a
                newer one takes its place.
        """
        self.stop_meeting(peer)
        why = why_apart(hello) or _why_no_path(peer, hello.local_socket)
        if why:
            done(why)
            return
        try:
            sock = connect(hello.local_socket)
        except OSError as error:
            done(f"its socket {hello.local_socket} cannot be reached: {error.strerror or error}")
            return
        line = self._admit(sock)
        if line is None:
            done("its socket belongs to another user")
            return
        self._meetings[line] = _Meeting(peer, hello.nonce, done)
        with _OwnProcess() as pidfd:
            line.send(Meet(incarnation=self.incarnation, nonce=hello.nonce), [pidfd])

    def stop_meeting(self, peer: bytes) -> None:
        """Call no `done` of `meet` any more; what was proven before stays."""
        for line, meeting in list(self._meetings.items()):
            if meeting.peer == peer:
                self._drop(line)

    def is_near(self, peer: bytes) -> bool:
        """Whether a peer has proven to be on this host, and its process has not ended."""
        neighbour = self._near.get(peer)
        return neighbour is not None and not _has_ended(neighbour.pidfd)

    def pidfd(self, peer: bytes) -> int:
        """A descriptor of a neighbour's process, of this object; -1: no neighbour, or ended."""
        neighbour = self._near.get(peer)
        return -1 if neighbour is None else neighbour.pidfd

    @property
    def peers(self) -> tuple[bytes, ...]:
        """The neighbours."""
        return tuple(self._near)

    def forget(self, peer: bytes) -> None:
        """The agent has no more use for what it knows of a peer. Idempotent."""
        self._expected.pop(peer, None)
        self.stop_meeting(peer)
        neighbour = self._near.pop(peer, None)
        if neighbour is not None:
            neighbour.line.close()
            self._unwatch(neighbour)

    # -- connections -------------------------------------------------------------------------
    def _on_acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _LOG.error("neighbour_not_accepted", extra={"fields": {"reason": str(error)}})
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
                return
            self._admit(sock)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._on_acceptable)

    def _admit(self, sock: socket.socket) -> Line | None:
        """A connection of this user, to be proven in time; None: of another one, closed."""
        line = Line(self._loop, sock, self._on_message, self._on_end)
        if line.uid != os.geteuid() or len(self._strangers) >= limits.NEIGHBOURS_UNPROVEN_MAX:
            line.close()
            return None
        timer = self._loop.call_later(limits.NEIGHBOUR_TIMEOUT_S, self._on_late, line)
        self._strangers[line] = timer
        return line

    def _on_late(self, line: Line) -> None:
        self._refuse(line, f"it did not answer within {limits.NEIGHBOUR_TIMEOUT_S:g} s")

    def _on_message(self, line: Line, message: NeighbourMessage, fds: list[int]) -> None:
        try:
            match message:
                case Meet():
                    self._on_meet(line, message, fds)
                case Met():
                    self._on_met(line, message, fds)
                case Silent():
                    for peer in [p for p, each in self._near.items() if each.line is line]:
                        self._on_silent(peer)
        except PeerError as error:
            self._refuse(line, str(error))

    def _on_meet(self, line: Line, message: Meet, fds: list[int]) -> None:
        peer = message.incarnation
        answer = self._expected.get(peer)
        if line in self._meetings or line not in self._strangers:
            raise PeerError("it greets out of turn")
        if answer is None or not hmac.compare_digest(message.nonce, self.nonce(peer)):
            raise PeerError(f"it is not the agent {peer.hex()[:12]} of a session, or of an old one")
        pidfd = line.take_process(fds)
        with _OwnProcess() as own:
            line.send(Met(incarnation=self.incarnation, nonce=answer), [own])
        self._prove(peer, line, pidfd)

    def _on_met(self, line: Line, message: Met, fds: list[int]) -> None:
        meeting = self._meetings.get(line)
        if meeting is None:
            raise PeerError("it answers what it was not asked")
        if message.incarnation != meeting.peer or not hmac.compare_digest(
            message.nonce, self.nonce()
        ):
            raise PeerError("the agent that listens there is not the one of the session")
        pidfd = line.take_process(fds)
        self._prove(meeting.peer, line, pidfd)
        meeting.done("")

    def _prove(self, peer: bytes, line: Line, pidfd: int) -> None:
        self._meetings.pop(line, None)
        self._strangers.pop(line).cancel()
        self.forget(peer)
        self._near[peer] = _Neighbour(line, pidfd)
        self._loop.add_reader(pidfd, self._on_exit, peer)

    def _on_exit(self, peer: bytes) -> None:
        self._unwatch(self._near[peer])
        self._on_dead(peer)

    def _unwatch(self, neighbour: _Neighbour) -> None:
        if neighbour.pidfd >= 0:
            self._loop.remove_reader(neighbour.pidfd)
            os.close(neighbour.pidfd)
            neighbour.pidfd = -1

    def _on_end(self, line: Line, reason: str) -> None:
        """The other end is closed: no proof of anything; the process tells its own end."""
        if line in self._strangers:
            self._refuse(line, reason)

    def _refuse(self, line: Line, reason: str) -> None:
        meeting = self._drop(line)
        fields = {"pid": line.pid, "reason": reason}
        _LOG.warning("neighbour_refused", extra={"fields": fields})
        if meeting is not None:
            meeting.done(reason)

    def _drop(self, line: Line) -> _Meeting | None:
        line.close()
        timer = self._strangers.pop(line, None)
        if timer is not None:
            timer.cancel()
        return self._meetings.pop(line, None)


def why_apart(hello: Hello) -> str:
    """Why a peer cannot be a neighbour, by what its `Hello` says; empty: it may be one."""
    if hello.boot_id != host_id():
        return "it is on another host, or in another pid namespace"
    if hello.uid != os.geteuid():
        return f"it runs as user {hello.uid}, this agent as user {os.geteuid()}"
    if len(hello.nonce) != _NONCE_BYTES:
        return "it does not say how to prove that it is on this host"
    return ""


def _why_no_path(peer: bytes, path: str) -> str:
    """Why a path that a peer told is not to be connected to; empty: it is that life's socket."""
    if not path:
        return "it has no socket for agents of its host"
    if "\0" in path or not os.path.isabs(path) or not path.endswith(f".{_suffix(peer)}"):
        return f"{path!r} is not the path of that agent's socket"
    return ""


def _suffix(incarnation: bytes) -> str:
    return incarnation.hex()[:_SUFFIX_DIGITS]


def _has_ended(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class _OwnProcess:
    """A descriptor of this process, for as long as it takes to pass it on."""

    def __enter__(self) -> int:
        self._fd = os.pidfd_open(os.getpid())
        return self._fd

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

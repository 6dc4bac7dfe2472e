"""One session of the control channel: its frames in order, its timers, its messages delivered.

Both ends use it; what differs (sockets, `Hello`, restarts) is in `control.link` and
`control.server`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdxfer.control.session import UNNUMBERED
from pdxfer.errors import ConfigError, PeerError, ProtocolError
from pdxfer.limits import CONTROL_BLOCKED_RETRY_S, HEARTBEAT_INTERVAL_S, LIVENESS_TIMEOUT_S
from pdxfer.wire.messages import Bye, Heartbeat, Hello, Message, Reject
from pdxfer.wire.version import check_version

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdxfer.control.session import Session
    from pdxfer.errors import WireError
    from pdxfer.wire.messages import Envelope

log = logging.getLogger(__name__)

INTERNAL_ERROR = PeerError("internal error of the peer; its log has the details").to_wire()
"""What a peer is told where a callback failed by a bug."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the owner of a channel is told; all on the loop's thread, peers by incarnation."""

    on_message: Callable[[bytes, Message], None]
    """Every message of a session but those that begin or end it: once, in order. A `ProtocolError`
    that it raises ends the session, and the peer is told its text."""
    on_session: Callable[[bytes, Hello], None]
    """A peer's session begins. A `PdxferError` that it raises refuses it with that error."""
    on_lost: Callable[[bytes, str], None]
    """A peer's session is over, with the reason; after it `send` to that peer raises."""
    heartbeat: Callable[[bytes], Heartbeat]
    """The content of the next heartbeat."""


class Peer:
    """One session with its outgoing queue and its timers.

    Args:  transmit: sends one frame at once; False when the queue of the peer is full.
           reachable: whether the peer's end of the connection answers the transport's own pings.
           read: reads the channel's socket until it is empty. ended: the channel forgets this peer.
    Threads:  the loop's.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: Session,
        callbacks: Callbacks,
        *,
        transmit: Callable[[bytes], bool],
        reachable: Callable[[], bool],
        read: Callable[[], object],
        ended: Callable[[Peer, str], None],
    ) -> None:
        self.session = session
        self.answer: Hello | None = None
        """At prefill: the `Hello` that answered the peer's, to answer a repeat with."""
        self.rejection: Reject | None = None
        """The `Reject` by which the peer ended the session; None: it has not."""
        self._loop = loop
        self._callbacks = callbacks
        self._transmit = transmit
        self._reachable = reachable
        self._read = read
        self._ended = ended
        self._queue: deque[bytes] = deque()
        self._end: str | None = None
        self._report: asyncio.Handle | None = None
        self._heartbeat_at = loop.time() + HEARTBEAT_INTERVAL_S
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    @property
    def incarnation(self) -> bytes:
        """Incarnation of the peer; empty until it is known."""
        return self.session.remote or b""

    @property
    def is_over(self) -> bool:
        """Whether the session ended; `on_lost` was or will be called."""
        return self._end is not None

    @property
    def is_blocked(self) -> bool:
        """Whether frames wait for room in the socket's queue."""
        return bool(self._queue)

    # -- sending -----------------------------------------------------------------------------
    def send(self, message: Message | None) -> None:
        """Send, or queue behind what is queued; None is a pure acknowledgement.

        A session whose limits this exceeds ends: `on_lost` is called from the loop. What is queued
        is kept by the session until acknowledged, so that its limits bound the queue too; messages
        outside the numbering are dropped where they cannot leave at once.

        Raises:  ResourceError when the message is too large; nothing changed then.
        """
        if self._end is not None:
            return
        try:
            frame = self.session.wrap(message, self._loop.time())
        except PeerError as error:
            self.end(str(error), soon=True)
            return
        if message is None or isinstance(message, UNNUMBERED):
            # May be lost, and is out of date soon: never queued, or a peer that goes on asking and
            # does not read would have this side queue without end.
            if not self._queue:
                self._transmit(frame)
        else:
            self._put(frame)
        self.arm()

    def flush(self) -> None:
        """Send what is queued, in order, as far as it goes."""
        while self._queue and self._transmit(self._queue[0]):
            self._queue.popleft()

    def send_due(self) -> None:
        """Send what time asks for; after each batch read, and by timer."""
        if self._end is not None:
            return
        self.flush()
        if not self._queue:
            for frame in self.session.due(self._loop.time()):
                self._put(frame)
        self.arm()

    def restart(self) -> None:
        """The connection was replaced: send again what may have been on its way."""
        self._queue.clear()  # what is numbered is kept by the session, the rest is out of date
        self.session.reconnected(self._loop.time())
        self.send_due()

    def _put(self, frame: bytes) -> None:
        if self._queue or not self._transmit(frame):
            self._queue.append(frame)

    # -- receiving ---------------------------------------------------------------------------
    def take(self, envelope: Envelope) -> None:
        """Check the frame's number, then deliver its message.

        `send_due` follows once the batch is read.
        """
        try:
            messages = self.session.receive(envelope, self._loop.time())
        except (ProtocolError, PeerError) as error:
            self.refuse(error.to_wire())
            return
        for message in messages:
            if self._end is None:
                self._deliver(message)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Hello):
            return
        if isinstance(message, Bye):
            self.end(f"the peer closed the session: {message.reason or 'no reason given'}")
            return
        if isinstance(message, Reject):
            self.rejection = message
            self.end(f"the peer refused the session: {message.text}")
            return
        try:
            self._callbacks.on_message(self.incarnation, message)
        except ProtocolError as error:
            self.refuse(error.to_wire())
        except Exception:
            log.exception("control_callback_failed", extra={"peer": self.incarnation.hex()})
            self.refuse(INTERNAL_ERROR)

    # -- the end -----------------------------------------------------------------------------
    def refuse(self, error: WireError) -> None:
        """End the session with `Reject`: the peer sent or is what it may not."""
        if self._end is None:
            if self.session.remote is not None:
                self.send(Reject(**error))
            self.end(error["text"])

    def end(self, reason: str, *, soon: bool = False) -> None:
        """The session is over. `soon`: call `on_lost` from the loop, not from this call."""
        if self._end is not None:
            self._report_now()
            return
        self._end = reason
        self._queue.clear()
        self.session.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._report = self._loop.call_soon(self._report_now)
        if not soon:
            self._report_now()

    def _report_now(self) -> None:
        if self._report is not None and self._end is not None:
            self._report.cancel()
            self._report = None
            self._ended(self, self._end)

    # -- time --------------------------------------------------------------------------------
    def arm(self) -> None:
        """Have the timer run no later than the next thing to do."""
        if self._end is not None:
            return
        silent_at = self.session.heard_at + LIVENESS_TIMEOUT_S
        at = self._heartbeat_at
        if silent_at > self._loop.time():  # afterwards each heartbeat looks whether it is reachable
            at = min(at, silent_at)
        if self._queue:
            at = min(at, self._loop.time() + CONTROL_BLOCKED_RETRY_S)
        else:
            due = self.session.next_timer()
            at = at if due is None else min(at, due)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.session.expired(self._loop.time(), reachable=self._reachable()):
            self._read()  # a loop that was held up has the peer's messages waiting
        now = self._loop.time()
        if self._end is not None:
            return
        stuck = self.session.stuck(now)
        if stuck:
            self.end(stuck)
            return
        if self.session.expired(now, reachable=self._reachable()):
            silent_s = now - self.session.heard_at
            limit = "LEASE_S" if self._reachable() else "LIVENESS_TIMEOUT_S"
            self.end(f"no sign of the peer for {silent_s:.1f} s ({limit})")
            return
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_INTERVAL_S
            if not self._queue:
                self.send(self._callbacks.heartbeat(self.incarnation))
        self.send_due()


def check_hello(hello: Hello, role: str) -> None:
    """Refuse a peer of another version or of the same role.

    Raises:  PeerError, ConfigError.
    """
    check_version(hello)
    if hello.role != role:
        raise ConfigError(
            f"role: expected a {role} agent at the other end, found {hello.role!r}; a decode agent "
            "connects to a prefill agent",
            fields={"role": f"expected={role}, found={hello.role}"},
        )

"""One session's numbering, acknowledgements and resends, from one side. No sockets, no clock.

The transport under it keeps order while a connection lives and may lose, when one breaks, anything
that was on its way. So a gap is rare and healed simply: what comes behind a gap is dropped, the
receiver says at once how far it is, and the sender goes back to there and sends bursts that the
receiver's acknowledgements clock. Each numbered message is delivered once and in order, or the
session ends with an error; nothing is ever skipped.

The caller does the I/O: bytes of `wrap` and `due` leave in the order in which they were returned,
what arrives goes through `receive`, and `due` is called after each batch received and at
`next_timer`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from pdxfer.errors import LocalProtocolError, PeerError, RemoteProtocolError
from pdxfer.limits import (
    CONTROL_ACK_DELAY_S,
    CONTROL_ACK_EVERY_MESSAGES,
    CONTROL_RESEND_AFTER_MAX_S,
    CONTROL_RESEND_AFTER_S,
    CONTROL_RESEND_AGE_S,
    CONTROL_RESEND_BURST_BYTES,
    CONTROL_RESEND_BURST_MESSAGES,
    CONTROL_UNACKED_BYTES_MAX,
    CONTROL_UNACKED_MESSAGES_MAX,
    CONTROL_UNACKED_S,
    LEASE_S,
    LIVENESS_TIMEOUT_S,
)
from pdxfer.wire.codec import encode
from pdxfer.wire.messages import Envelope, Heartbeat, Hello, Reject, StaleSession

if TYPE_CHECKING:
    from pdxfer.wire.messages import Message

UNNUMBERED = (Hello, StaleSession, Heartbeat)
"""Messages outside the numbering; they may be lost or come twice."""


class Belonging(Enum):
    """To which session an envelope belongs, seen from one session."""

    CURRENT = "current"
    """The message is of this session: give it to `receive`."""
    STALE = "stale"
    """The message is of an older life of either side, or of another session: answer `StaleSession`,
    never act on it."""
    NEW_LIFE = "new_life"
    """The message is of another life of the peer: this session is over."""
    NEW_SESSION = "new_session"
    """The same lives begin anew, with a larger session counter: this session is over."""


@dataclass(slots=True)
class Backlog:
    """Bytes that the sessions of one agent keep for resending, together."""

    length_bytes: int = 0


@dataclass(slots=True)
class _Sent:
    """A numbered message that the peer has not acknowledged."""

    number: int
    data: bytes
    at: float
    """When the message was last sent."""


class Session:
    """What two incarnations share from `Hello` on, seen from one of them.

    Args:  local: this agent's incarnation. remote: the peer's, or None at the side that says
           `Hello` first and learns it from the answer. now: seconds of any monotonic clock, the
           same for all calls. session: counter given out by the decode side. backlog: of the agent.
    Threads:  one.
    """

    def __init__(
        self,
        local: bytes,
        remote: bytes | None,
        now: float,
        *,
        session: int = 1,
        backlog: Backlog | None = None,
    ) -> None:
        self.local = local
        self.remote = remote
        self.session = session
        self.heard_at = now
        """When the peer was last heard."""
        self.closed: PeerError | None = None
        """Set once a limit ended the session; every later call raises it."""
        self._sent: deque[_Sent] = deque()
        self._sent_bytes = 0
        self._backlog = backlog or Backlog()
        self._last_number = 0
        self._received = 0
        self._acked = 0
        """What the peer was last told of `_received`."""
        self._ack_at: float | None = None
        self._ask = False
        """Whether the next acknowledgement asks to send again from there."""
        self._asked_at = -CONTROL_RESEND_AGE_S
        self._asked_for = -1
        self._wait_s = CONTROL_RESEND_AFTER_S
        self._progress_at = now
        self._early: deque[Heartbeat] = deque()
        """Heartbeats that overtook what they presume: the first of them, and the last."""
        self._recover_to = 0
        """While the oldest unacknowledged number is not above this, messages are sent again."""

    @property
    def unacked(self) -> int:
        """Numbered messages not acknowledged yet; at most `CONTROL_UNACKED_MESSAGES_MAX`."""
        return len(self._sent)

    @property
    def unacked_bytes(self) -> int:
        """Bytes kept for resending; at most `CONTROL_UNACKED_BYTES_MAX`."""
        return self._sent_bytes

    def release(self) -> None:
        """Keep nothing for resending any more: the session is over. Idempotent."""
        self._backlog.length_bytes -= self._sent_bytes
        self._sent.clear()
        self._sent_bytes = 0

    # -- sending -----------------------------------------------------------------------------
    def wrap(self, message: Message | None, now: float) -> bytes:
        """`message` as a frame to send now; None is a pure acknowledgement.

        A pure acknowledgement that carries a number, the next one it waits for, asks the peer to
        send again from there.

        Numbered messages are kept until acknowledged and sent again by `due` where needed. A
        heartbeat leaves with the highest number used so far as its `after`.

        Raises:  PeerError when too much is unacknowledged: the session is closed then.
                 LocalProtocolError before the peer is known, except for `Hello`. ResourceError when
                 the message is too large; the session is unchanged.
        """
        if self.closed is not None:
            raise self.closed
        if self.remote is None and not isinstance(message, Hello):
            raise LocalProtocolError(
                f"{type(message).__name__} before the peer's Hello: its incarnation is unknown"
            )
        if isinstance(message, Heartbeat):
            message = msgspec.structs.replace(message, after=self._last_number)
        numbered = message is not None and not isinstance(message, UNNUMBERED)
        if numbered:
            number = self._last_number + 1
        else:
            number = self._received + 1 if message is None and self._ask else 0
        data = encode(
            Envelope(
                source=self.local,
                destination=self.remote or b"",
                session=self.session,
                number=number,
                ack=self._received,
                message=message,  # type: ignore[arg-type] # every Message is one of AnyMessage
            )
        )
        if numbered:
            self._keep(data, now)
        self._acked = self._received
        self._ack_at = None
        return data

    def _keep(self, data: bytes, now: float) -> None:
        over_count = len(self._sent) >= CONTROL_UNACKED_MESSAGES_MAX
        if over_count or self._sent_bytes + len(data) > CONTROL_UNACKED_BYTES_MAX:
            self.closed = PeerError(
                f"the peer has not acknowledged {len(self._sent)} messages ({self._sent_bytes} "
                f"bytes), the oldest for {now - self._sent[0].at:.1f} s; limits "
                f"{CONTROL_UNACKED_MESSAGES_MAX} messages (CONTROL_UNACKED_MESSAGES_MAX), "
                f"{CONTROL_UNACKED_BYTES_MAX} bytes; the session ends",
                retryable=True,
            )
            raise self.closed
        if not self._sent:
            self._progress_at = now
        self._last_number += 1
        self._backlog.length_bytes += len(data)
        self._sent.append(_Sent(self._last_number, data, now))
        self._sent_bytes += len(data)

    def due(self, now: float) -> list[bytes]:
        """Frames that time asks for: messages sent again, then a delayed acknowledgement."""
        if self.closed is not None or self.remote is None:
            return []
        frames = self._resend(now)
        if self._ask or (self._ack_at is not None and self._ack_at <= now):
            frames.append(self.wrap(None, now))
            self._ask = False
        return frames

    def next_timer(self) -> float | None:
        """The time at which `due` next has something; None: nothing is due."""
        if self.closed is not None or self.remote is None:
            return None
        times = [] if self._ack_at is None else [self._ack_at]
        if self._sent:
            times.append(self._resend_at)
        return min(times, default=None)

    def reconnected(self, now: float) -> None:
        """The connection was replaced: whatever was on its way is lost, both ways.

        The next `due` sends again what is unacknowledged and asks the peer to do the same.
        """
        self._recover(self._last_number)
        for sent in self._sent:
            sent.at = now - CONTROL_RESEND_AGE_S
        self._ask = True
        self._ack_at = now

    @property
    def _recovering(self) -> bool:
        return bool(self._sent) and self._sent[0].number <= self._recover_to

    @property
    def _resend_at(self) -> float:
        """When the oldest unacknowledged message is sent again.

        A reader that is slow but goes on acknowledging gets no repeats.
        """
        oldest = self._sent[0].at
        return (oldest if self._recovering else max(oldest, self._progress_at)) + self._wait_s

    def _recover(self, number: int) -> None:
        self._recover_to = max(self._recover_to, number)
        self._wait_s = CONTROL_RESEND_AGE_S

    def _resend(self, now: float) -> list[bytes]:
        """The oldest unacknowledged messages, where it is time, up to the first that is too new."""
        if not self._sent or self._resend_at > now:
            return []
        if not self._recovering:
            self._recover_to = self._sent[0].number + CONTROL_RESEND_BURST_MESSAGES - 1
        self._wait_s = min(self._wait_s * 2, CONTROL_RESEND_AFTER_MAX_S)
        frames: list[bytes] = []
        length_bytes = 0
        for sent in self._sent:
            if len(frames) == CONTROL_RESEND_BURST_MESSAGES or sent.number > self._recover_to:
                break
            length_bytes += len(sent.data)
            if frames and length_bytes > CONTROL_RESEND_BURST_BYTES:
                break
            if sent.at + CONTROL_RESEND_AGE_S > now:
                break
            sent.at = now
            frames.append(sent.data)
        return frames

    # -- receiving ---------------------------------------------------------------------------
    def belonging(self, envelope: Envelope) -> Belonging:
        """To which session the envelope belongs, and so whether `receive` may have it.

        Changes nothing.
        """
        if envelope.destination not in (self.local, b""):
            return Belonging.STALE
        if not envelope.destination and not isinstance(envelope.message, Hello):
            return Belonging.STALE
        if self.remote is not None and envelope.source != self.remote:
            return Belonging.NEW_LIFE
        if envelope.session > self.session:
            return Belonging.NEW_SESSION
        return Belonging.CURRENT if envelope.session == self.session else Belonging.STALE

    def receive(self, envelope: Envelope, now: float) -> list[Message]:
        """Messages to act on, in order: none for a repeat, a gap or a pure acknowledgement.

        A heartbeat that has overtaken numbered messages sent before it is given as a bare sign of
        life now, and as it is behind the last of those messages.

        Raises:  RemoteProtocolError for what no peer may send: a message of another session, an
                 acknowledgement of what was never sent, a wrong use of numbers. The caller ends the
                 session.
        """
        if self.closed is not None:
            raise self.closed
        found = self.belonging(envelope)
        if found is not Belonging.CURRENT:
            raise RemoteProtocolError(f"field session: a message that is {found.value}")
        message = envelope.message
        if self.remote is None:
            if not isinstance(message, Hello | Reject):
                return []  # its Hello was lost; numbered messages come again behind the next
            self.remote = envelope.source
        self.heard_at = now
        self._take_ack(envelope, now)
        if message is None:
            self._take_request(envelope)
            return []
        if isinstance(message, UNNUMBERED) != (envelope.number == 0):
            raise RemoteProtocolError(
                f"field number: {envelope.number} on {type(message).__name__}, expected "
                f"{'0' if isinstance(message, UNNUMBERED) else 'from 1'}"
            )
        if isinstance(message, Heartbeat):
            return [self._unless_early(message)]
        if envelope.number and not self._in_order(envelope.number, now):
            return []
        return [message, *self._no_longer_early()]

    def _unless_early(self, heartbeat: Heartbeat) -> Heartbeat:
        """What a heartbeat says now: nothing but life where it came ahead of numbered messages."""
        if heartbeat.after <= self._received:
            return heartbeat
        self._check_ahead("after", heartbeat.after)
        if len(self._early) > 1:  # the first is due soonest; the last says what those between did
            self._early.pop()
        self._early.append(heartbeat)
        return Heartbeat()

    def _no_longer_early(self) -> list[Heartbeat]:
        """Heartbeats that waited for the number received now."""
        due: list[Heartbeat] = []
        while self._early and self._early[0].after <= self._received:
            due.append(self._early.popleft())
        return due

    def _check_ahead(self, field: str, number: int) -> None:
        if number > self._received + CONTROL_UNACKED_MESSAGES_MAX:
            raise RemoteProtocolError(
                f"field {field}: {number} when {self._received} was received; a peer may not have "
                f"more than {CONTROL_UNACKED_MESSAGES_MAX} unacknowledged"
            )

    def expired(self, now: float, *, reachable: bool = False) -> bool:
        """Whether the peer has been silent for `LIVENESS_TIMEOUT_S`; `reachable`: for `LEASE_S`.

        The transport answers from a thread of its own: a process that is busy (an embedding one
        that holds the interpreter, an agent that registers memory) is not dead.
        """
        return now - self.heard_at >= (LEASE_S if reachable else LIVENESS_TIMEOUT_S)

    def stuck(self, now: float) -> str:
        """Why the session must end though its peer is heard; empty: it need not.

        Whoever reads acknowledges with each frame it sends. A peer that is heard and acknowledges
        nothing does not read, and what is sent to it again would pile up in the transport.
        """
        if not self._sent or now - self._progress_at < CONTROL_UNACKED_S:
            return ""
        return (
            f"the peer sends and has acknowledged none of {len(self._sent)} messages for "
            f"{now - self._progress_at:.0f} s (CONTROL_UNACKED_S): it does not read"
        )

    def _in_order(self, number: int, now: float) -> bool:
        if number == self._received + 1:
            self._received = number
            if self._received - self._acked >= CONTROL_ACK_EVERY_MESSAGES:
                self._ack_at = now
            elif self._ack_at is None:
                self._ack_at = now + CONTROL_ACK_DELAY_S
            return True
        self._check_ahead("number", number)
        if number <= self._received:  # a repeat: tell the peer again how far we are
            self._ack_at = now + CONTROL_ACK_DELAY_S if self._ack_at is None else self._ack_at
        elif self._asked_for != self._received or self._asked_at + CONTROL_RESEND_AGE_S <= now:
            self._ask = True
            self._asked_for, self._asked_at = self._received, now
        return False

    def _take_ack(self, envelope: Envelope, now: float) -> None:
        ack = envelope.ack
        if ack > self._last_number:
            raise RemoteProtocolError(f"field ack: {ack}, but only {self._last_number} were sent")
        if not self._sent or self._sent[0].number > ack:
            return
        while self._sent and self._sent[0].number <= ack:
            length_bytes = len(self._sent.popleft().data)
            self._sent_bytes -= length_bytes
            self._backlog.length_bytes -= length_bytes
        self._progress_at = now
        self._wait_s = CONTROL_RESEND_AGE_S if self._recovering else CONTROL_RESEND_AFTER_S

    def _take_request(self, envelope: Envelope) -> None:
        """A pure acknowledgement, which may ask to send again from its number."""
        if not envelope.number:
            return
        if envelope.number != envelope.ack + 1:
            raise RemoteProtocolError(
                f"field number: {envelope.number} on an acknowledgement of {envelope.ack}, "
                "expected 0 or the next number"
            )
        if self._sent and self._sent[0].number == envelope.number:
            self._recover(self._sent[-1].number)


def stale_answer(local: bytes, envelope: Envelope) -> bytes:
    """The frame that answers a message of another life or session. It is not acted on."""
    return encode(
        Envelope(
            source=local,
            destination=envelope.source,
            session=envelope.session,
            number=0,
            ack=0,
            message=StaleSession(incarnation=local),
        )
    )

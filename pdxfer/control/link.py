"""The decode end of the control channel: one DEALER socket and session per prefill address."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from pdxfer.control.connection import Connection
from pdxfer.control.peer import INTERNAL_ERROR, Callbacks, Peer, check_hello
from pdxfer.control.session import Belonging, Session, stale_answer
from pdxfer.errors import PdxferError, PeerError, RemoteProtocolError, WireError, from_wire
from pdxfer.limits import (
    CONTROL_FRAMES_PER_WAKE_MAX,
    CONTROL_HELLO_INTERVAL_S,
    CONTROL_REFUSED_RETRY_S,
)
from pdxfer.wire.codec import decode
from pdxfer.wire.messages import Bye, Heartbeat, Hello, Message, Reject, StaleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.control.keys import ClientKeys
    from pdxfer.wire.messages import Envelope

log = logging.getLogger(__name__)

_session_counter = itertools.count(1)
"""Sessions that this process asked for; an incarnation never lives in two processes."""


class ControlLink:
    """Connects to one prefill address and keeps one session with whoever lives there.

    ZeroMQ connects again by itself. A session outlives a broken connection; it ends when the peer
    is silent too long, closes, refuses, or turns out to be another life, and the next one begins by
    itself. There must be one link per prefill agent: a second one from the same decode incarnation
    takes the first one's place at the prefill agent.

    Args:  incarnation: this agent's, 16 bytes. address: `tcp://host:port`. hello: what this agent
           says of itself. keys: CURVE, None for a prefill agent without keys. The callbacks are
           those of `Callbacks`; on_broken: the connection of that life's session broke. The session
           goes on where the peer comes back, unless the owner knows better and ends it.
    Threads:  all calls and callbacks on the loop that ran `start`.
    """

    def __init__(  # noqa: PLR0913 keywords, each a setting of its own
        self,
        incarnation: bytes,
        address: str,
        *,
        hello: Hello,
        keys: ClientKeys | None = None,
        on_message: Callable[[bytes, Message], None],
        on_session: Callable[[bytes, Hello], None],
        on_lost: Callable[[bytes, str], None],
        on_broken: Callable[[bytes], None] = lambda peer: None,
        heartbeat: Callable[[bytes], Heartbeat] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.address = address
        self.remote: Hello | None = None
        """The peer's `Hello` while there is a session."""
        self._own_hello = hello
        self._callbacks = Callbacks(
            on_message, on_session, on_lost, heartbeat or (lambda _: Heartbeat())
        )
        self._connection = Connection(
            address,
            incarnation,
            keys,
            read=self._read,
            connected=self._on_connected,
            broken=self._on_disconnected,
            refused=self._settle_waiters,
        )
        self._on_broken = on_broken
        self._refusal: PdxferError | None = None
        """Why the last attempt was refused; the next attempt waits."""
        self._ready: set[asyncio.Future[Hello]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    # -- life --------------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to connect; does not wait for the peer.

        Raises:  ConfigError when the address is malformed or its host has no address; ResourceError
                 when there is no socket for it. The link is not open then.
        """
        self._loop = asyncio.get_running_loop()
        await self._connection.open()
        self._begin()

    async def ready(self, timeout_s: float) -> Hello:
        """The peer's `Hello` once there is a session.

        Raises:  PeerError after `timeout_s`, saying what the connection suffered; ConfigError at
                 once when our key is refused; what the peer refused the session with, at once. The
                 link goes on trying in each case.
        """
        if not self._connection.is_open:
            raise PeerError(f"link to {self.address} is not open")
        if self.remote is not None:
            return self.remote
        if self._refusal is not None:
            self._begin()
        self._connection.hurry()
        waiter: asyncio.Future[Hello] = self._loop.create_future()
        self._ready.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise PeerError(
                f"prefill agent at {self.address} did not answer within {timeout_s:g} s: "
                f"{self._connection.problem}",
                retryable=True,
            ) from None
        finally:
            self._ready.discard(waiter)

    async def close(self, reason: str = "") -> None:
        """Say `Bye`, close. No callback is called any more. Idempotent."""
        if not self._connection.is_open or self._is_closing:
            return
        if self.remote is not None:
            self._peer.send(Bye(reason=reason))
        self._is_closing = True  # from here on nothing begins anew
        self.remote = None
        self._peer.end("closed here")
        self._settle_waiters(PeerError(f"link to {self.address} was closed"))
        if self._timer is not None:
            self._timer.cancel()
        await self._connection.close()

    @property
    def peer(self) -> bytes:
        """The incarnation behind the address; empty without a session."""
        return self._peer.incarnation if self.remote is not None else b""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the address now, as far as its last event says."""
        return self._connection.is_connected

    @property
    def problem(self) -> str:
        """Why the peer does not answer, in words; empty where nothing is known."""
        return self._connection.problem

    @property
    def is_refused(self) -> bool:
        """Whether the last session was refused, by either side, and no other one asked for yet."""
        return self._refusal is not None

    @property
    def unacked(self) -> int:
        """Messages that the peer has not acknowledged."""
        return self._peer.session.unacked if self.remote is not None else 0

    # -- sending -----------------------------------------------------------------------------
    def send(self, message: Message) -> None:
        """Send `message` at once, or queue it in order behind what is queued.

        Raises:  PeerError without a session. ResourceError when the message is too large. In both
                 cases nothing was sent or changed.
        """
        if self.remote is None:
            raise PeerError(
                f"no session with the prefill agent at {self.address}: {self._connection.problem}",
                retryable=True,
            )
        self._peer.send(message)

    def refuse(self, error: PdxferError) -> None:
        """End the session with an error that the peer is told; `on_lost` follows.

        Another session is asked for after `CONTROL_REFUSED_RETRY_S`. Nothing without a session.
        """
        if self.remote is not None:
            self._break(error)

    def end(self, reason: str) -> None:
        """The peer is known to be gone: end the session, ask for the next one at once.

        `on_lost` is called before this returns. Nothing without a session.
        """
        if self.remote is not None:
            self._peer.end(reason)

    # -- sessions ----------------------------------------------------------------------------
    def _on_connected(self) -> None:
        self._say_hello()
        if self.remote is not None:
            self._peer.restart()

    def _on_disconnected(self) -> None:
        if self.remote is not None:
            self._on_broken(self.peer)

    def _begin(self) -> None:
        """Ask for a new session, and go on asking."""
        self._refusal = None
        self.remote = None
        session = Session(self.incarnation, None, self._loop.time(), session=next(_session_counter))
        self._peer = Peer(
            self._loop,
            session,
            self._callbacks,
            transmit=self._connection.transmit,
            reachable=lambda: self._connection.is_connected,
            read=self._read,
            ended=self._ended,
        )
        self._say_hello()

    def _say_hello(self) -> None:
        """Send `Hello` if the connection takes it, and again until it is answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closing or self.remote is not None:
            return
        if self._refusal is not None:
            self._begin()
            return
        self._connection.transmit(self._peer.session.wrap(self._own_hello, self._loop.time()))
        self._timer = self._loop.call_later(CONTROL_HELLO_INTERVAL_S, self._say_hello)

    def _ended(self, peer: Peer, reason: str) -> None:
        """A session is over: tell the owner, ask for the next one."""
        if peer is not self._peer or self._is_closing:
            return
        was_known = self.remote is not None
        self.remote = None
        self._connection.problem = reason
        if peer.rejection is not None:
            self._refused(from_wire(_wire_error(peer.rejection)))
        if was_known:
            log.debug("session_over", extra={"peer": peer.incarnation.hex(), "reason": reason})
            self._callbacks.on_lost(peer.incarnation, reason)
        if self._refusal is None:
            self._begin()

    def _refused(self, error: PdxferError) -> None:
        """The session is refused, by either side; asked for again after a while."""
        self._refusal = error
        self._connection.problem = str(error)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CONTROL_REFUSED_RETRY_S, self._say_hello)
        self._settle_waiters(error)

    def _settle_waiters(self, result: Hello | PdxferError) -> None:
        for waiter in self._ready:
            if waiter.done():
                continue
            if isinstance(result, PdxferError):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

    # -- receiving ---------------------------------------------------------------------------
    def _read(self) -> bool:
        """Read until nothing is left; True when the loop should get its turn first."""
        more = True
        for _ in range(CONTROL_FRAMES_PER_WAKE_MAX):
            frame = self._connection.receive()
            if frame is None:
                more = False
                break
            self._take(frame)
        if self.remote is not None:
            self._peer.send_due()
        return more

    def _take(self, frame: bytes) -> None:
        try:
            envelope = decode(frame)
        except RemoteProtocolError as error:
            log.warning("frame_refused", extra={"address": self.address, "reason": str(error)})
            self._connection.problem = str(error)
            self._break(error)
            return
        message, session = envelope.message, self._peer.session
        if isinstance(message, StaleSession):
            if envelope.session == session.session and envelope.destination == self.incarnation:
                self._peer.end("the prefill agent was restarted, or gave this session up")
            return
        belonging = session.belonging(envelope)
        if belonging is Belonging.NEW_LIFE:
            self._peer.end("another prefill agent answers at this address")
        elif belonging is not Belonging.CURRENT:
            self._connection.transmit(stale_answer(self.incarnation, envelope))
        elif self.remote is not None:
            self._peer.take(envelope)
        elif isinstance(message, Hello):
            self._take_hello(envelope, message)
        elif isinstance(message, Reject):
            self._refused(from_wire(_wire_error(message)))

    def _take_hello(self, envelope: Envelope, hello: Hello) -> None:
        peer = self._peer
        peer.take(envelope)
        if peer.is_over:
            return
        self.remote = hello
        try:
            check_hello(hello, "prefill")
            self._callbacks.on_session(peer.incarnation, hello)
        except PdxferError as error:
            self.remote = None  # the owner never had this session
            self._break(error)
            return
        except Exception:
            log.exception("control_callback_failed", extra={"peer": peer.incarnation.hex()})
            self._break(from_wire(INTERNAL_ERROR))
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._peer.arm()
        self._settle_waiters(hello)

    def _break(self, error: PdxferError) -> None:
        """End the session for what the peer is or sent."""
        if self._peer.incarnation:
            self._refused(error)
            self._peer.refuse(error.to_wire())


def _wire_error(reject: Reject) -> WireError:
    return WireError(
        code=reject.code, text=reject.text, retryable=reject.retryable, fields=reject.fields
    )

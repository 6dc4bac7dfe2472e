"""The decode end of the control channel: one DEALER socket and session per prefill address."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdxfer.agent.control_peer import Callbacks, Peer
from pdxfer.agent.control_server import check_hello
from pdxfer.agent.control_socket import (
    ROUTING_PREFIX,
    SharedContext,
    Wakeup,
    join_address,
    resolve,
    set_client_keys,
    set_limits,
    split_address,
)
from pdxfer.errors import (
    ConfigError,
    PdxferError,
    PeerError,
    RemoteProtocolError,
    WireError,
    from_wire,
)
from pdxfer.limits import (
    CONTROL_FRAMES_PER_WAKE_MAX,
    CONTROL_HANDSHAKE_TIMEOUT_MS,
    CONTROL_HELLO_INTERVAL_S,
    CONTROL_LINGER_MS,
    CONTROL_RECONNECT_MAX_MS,
    CONTROL_RECONNECT_MS,
    CONTROL_REFUSED_RETRY_S,
)
from pdxfer.protocol.session import Belonging, Session, stale_answer
from pdxfer.wire.codec import decode
from pdxfer.wire.messages import Bye, Heartbeat, Hello, Message, Reject, StaleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.agent.keys import ClientKeys
    from pdxfer.wire.messages import Envelope

log = logging.getLogger(__name__)

_session_counter = itertools.count(1)
"""Sessions that this process asked for; an incarnation never lives in two processes."""

_EVENTS: Final = (
    zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class ControlLink:
    """Connects to one prefill address and keeps one session with whoever lives there.

    ZeroMQ connects again by itself. A session outlives a broken connection; it ends when the peer
    is silent too long, closes, refuses, or turns out to be another life, and the next one begins by
    itself. There must be one link per prefill agent: a second one from the same decode incarnation
    takes the first one's place at the prefill agent.

    Args:  incarnation: this agent's, 16 bytes. address: `tcp://host:port`. hello: what this agent
           says of itself. keys: CURVE, None for a prefill agent without keys. The callbacks are
           those of `Callbacks`.
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
        heartbeat: Callable[[bytes], Heartbeat] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.address = address
        self.remote: Hello | None = None
        """The peer's `Hello` while there is a session."""
        self._own_hello = hello
        self._keys = keys
        self._callbacks = Callbacks(
            on_message, on_session, on_lost, heartbeat or (lambda _: Heartbeat())
        )
        self._socket: zmq.Socket[bytes] | None = None
        self._refusal: PdxferError | None = None
        """Why the last attempt was refused; the next attempt waits."""
        self._problem = "no answer yet"
        """What the connection last suffered, for the text of a timeout."""
        self._ready: set[asyncio.Future[Hello]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_connected = False
        self._retry: asyncio.TimerHandle | None = None
        """Runs while the handshake is refused."""

    # -- life --------------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to connect; does not wait for the peer.

        Raises:  ConfigError when the address is malformed or its host has no address.
        """
        self._loop = asyncio.get_running_loop()
        host, port = split_address(self.address, "prefill")
        numeric = await resolve(host, "prefill", self._loop)
        socket = self._socket = SharedContext.take().socket(zmq.DEALER)
        set_limits(socket)
        socket.setsockopt(zmq.ROUTING_ID, ROUTING_PREFIX + self.incarnation)
        # IMMEDIATE=1 drops received messages when the connection breaks before they are read;
        # instead nothing is sent while the monitor says that there is no connection
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, CONTROL_RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, CONTROL_RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONTROL_HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, int(":" in numeric))
        if self._keys is not None:
            set_client_keys(socket, self._keys)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._monitor_wakeup = Wakeup(self._loop, self._monitor, self._read_monitor)
        self._wakeup = Wakeup(self._loop, socket, self._read)
        self._begin()
        # by name, so that a host that moves is found again when ZeroMQ connects anew
        self._endpoint = join_address(host, port)
        socket.connect(self._endpoint)

    async def ready(self, timeout_s: float) -> Hello:
        """The peer's `Hello` once there is a session.

        Raises:  PeerError after `timeout_s`, saying what the connection suffered; ConfigError at
                 once when our key is refused; what the peer refused the session with, at once. The
                 link goes on trying in each case.
        """
        if self._socket is None:
            raise PeerError(f"link to {self.address} is not open")
        if self.remote is not None:
            return self.remote
        if self._refusal is not None:
            self._begin()
        if self._retry is not None:
            self._connect_anew()
        waiter: asyncio.Future[Hello] = self._loop.create_future()
        self._ready.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise PeerError(
                f"prefill agent at {self.address} did not answer within {timeout_s:g} s: "
                f"{self._problem}",
                retryable=True,
            ) from None
        finally:
            self._ready.discard(waiter)

    async def close(self, reason: str = "") -> None:
        """Say `Bye`, close. No callback is called any more. Idempotent."""
        if self._socket is None:
            return
        if self.remote is not None:
            self._peer.send(Bye(reason=reason))
        socket, self._socket = self._socket, None  # from here on nothing begins anew
        self.remote = None
        self._peer.end("closed here")
        self._settle_waiters(PeerError(f"link to {self.address} was closed"))
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._wakeup.close()
        self._monitor_wakeup.close()
        socket.disable_monitor()
        self._monitor.close(0)
        socket.close(CONTROL_LINGER_MS)
        context = SharedContext.give_back()
        if context is not None:
            await self._loop.run_in_executor(None, context.term)

    @property
    def peer(self) -> bytes:
        """The incarnation behind the address; empty without a session."""
        return self._peer.incarnation if self.remote is not None else b""

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
                f"no session with the prefill agent at {self.address}: {self._problem}",
                retryable=True,
            )
        self._peer.send(message)

    def _transmit(self, frame: bytes) -> bool:
        if self._socket is None:
            return True
        if not self._is_connected:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._wakeup.check()
        return True

    # -- sessions ----------------------------------------------------------------------------
    def _begin(self) -> None:
        """Ask for a new session, and go on asking."""
        self._refusal = None
        self.remote = None
        session = Session(self.incarnation, None, self._loop.time(), session=next(_session_counter))
        self._peer = Peer(
            self._loop,
            session,
            self._callbacks,
            transmit=self._transmit,
            read=self._read,
            ended=self._ended,
        )
        self._say_hello()

    def _say_hello(self) -> None:
        """Send `Hello` if the connection takes it, and again until it is answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is None or self.remote is not None:
            return
        if self._refusal is not None:
            self._begin()
            return
        self._transmit(self._peer.session.wrap(self._own_hello, self._loop.time()))
        self._timer = self._loop.call_later(CONTROL_HELLO_INTERVAL_S, self._say_hello)

    def _ended(self, peer: Peer, reason: str) -> None:
        """A session is over: tell the owner, ask for the next one."""
        if peer is not self._peer or self._socket is None:
            return
        was_known = self.remote is not None
        self.remote = None
        self._problem = reason
        if peer.rejection is not None:
            self._refused(from_wire(_wire_error(peer.rejection)))
        if was_known:
            log.info("session over", extra={"peer": peer.incarnation.hex(), "reason": reason})
            self._callbacks.on_lost(peer.incarnation, reason)
        if self._refusal is None:
            self._begin()

    def _refused(self, error: PdxferError) -> None:
        """The session is refused, by either side; asked for again after a while."""
        self._refusal = error
        self._problem = str(error)
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
            if self._socket is None:
                return False
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                more = False
                break
            self._take(frames)
        if self.remote is not None:
            self._peer.settle()
        return more

    def _take(self, frames: list[bytes]) -> None:
        try:
            envelope = decode(b"".join(frames))
        except RemoteProtocolError as error:
            log.warning("frame refused", extra={"address": self.address, "reason": str(error)})
            self._problem = str(error)
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
            self._transmit(stale_answer(self.incarnation, envelope))
        elif self.remote is not None:
            self._peer.take(envelope)
        elif isinstance(message, Hello):
            self._take_hello(envelope, message)
        elif isinstance(message, Reject):
            self._refused(from_wire(_wire_error(message)))

    def _take_hello(self, envelope: Envelope, hello: Hello) -> None:
        self._peer.take(envelope)
        self.remote = hello
        try:
            check_hello(hello, "prefill")
            self._callbacks.on_session(self._peer.incarnation, hello)
        except PdxferError as error:
            self.remote = None  # the owner never had this session
            self._break(error)
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

    # -- the connection ----------------------------------------------------------------------
    def _read_monitor(self) -> bool:
        while self._socket is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            event = parse_monitor_message(frames)
            self._connection_event(zmq.Event(event["event"]), int(event["value"]))
        return False

    def _connection_event(self, event: zmq.Event, value: int) -> None:
        secured = "CURVE handshake" if self._keys is not None else "handshake"
        match event:
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self._problem = "connected, but it did not answer Hello"
                self._is_connected = True
                if self._retry is not None:
                    self._retry.cancel()
                    self._retry = None
                self._say_hello()
                if self.remote is not None:
                    self._peer.restart()
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                own = "" if self._keys is None else self._keys.pair.public.decode()
                error = ConfigError(
                    f"{secured} refused by {self.address}: this agent's public key {own} is not in "
                    f"the prefill agent's allow-list (status {value}); add its .pub file there"
                )
                self._problem = str(error)
                self._connect_later()
                self._settle_waiters(error)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                remedy = (
                    "is the configured server public key the key of that prefill agent, and does "
                    "it use keys at all?"
                    if self._keys is not None
                    else "it may require keys (`pdxfer keygen`), and none are configured here"
                )
                self._problem = f"{secured} refused by {self.address}: {remedy}"
                self._connect_later()
            case zmq.Event.CONNECT_RETRIED if "refused" not in self._problem:
                self._problem = "nothing accepts connections there"
            case zmq.Event.DISCONNECTED:
                self._is_connected = False
                if "refused" not in self._problem:
                    self._problem = "the connection broke"
            case _:
                pass

    def _connect_later(self) -> None:
        """Try again after a refused handshake; ZeroMQ itself gives such an address up."""
        if self._retry is None:
            self._retry = self._loop.call_later(CONTROL_REFUSED_RETRY_S, self._connect_anew)

    def _connect_anew(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket is None:
            return
        with contextlib.suppress(zmq.ZMQError):  # it has given the address up
            self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)


def _wire_error(reject: Reject) -> WireError:
    return WireError(code=reject.code, text=reject.text, retryable=False, fields=reject.fields)

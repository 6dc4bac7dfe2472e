"""The prefill end of the control channel: one ROUTER socket, many sessions."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import zmq

from pdxfer.control.admission import Admission
from pdxfer.control.peer import INTERNAL_ERROR, Callbacks, Peer, check_hello
from pdxfer.control.session import Backlog, Belonging, Session, stale_answer
from pdxfer.control.socket import (
    ROUTING_PREFIX,
    Authenticator,
    Wakeup,
    host_and_port,
    is_loopback,
    is_wildcard,
    join_address,
    new_context,
    outward_host,
    resolve,
    set_limits,
    set_server_keys,
)
from pdxfer.errors import ConfigError, PdxferError, PeerError, RemoteProtocolError, ResourceError
from pdxfer.limits import (
    CONTROL_BLOCKED_RETRY_S,
    CONTROL_FRAMES_PER_WAKE_MAX,
    CONTROL_KEYS_CHECK_S,
    CONTROL_LINGER_MS,
    CONTROL_SESSIONS_MAX,
    CONTROL_UNACKED_BYTES_AGENT_MAX,
)
from pdxfer.wire.codec import INCARNATION_BYTES, decode
from pdxfer.wire.messages import Bye, Heartbeat, Hello, Message, StaleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.control.keys import ServerKeys
    from pdxfer.wire.messages import Envelope

log = logging.getLogger(__name__)

_FRAMES: Final = 2
"""Routing id and envelope."""


class ControlServer:
    """Binds, answers `Hello`, and keeps one session per decode incarnation.

    Args:  incarnation: this agent's, 16 bytes. bind: `tcp://host:port`, port 0 for any. keys:
           CURVE; without them only a loopback address is bound, unless `insecure`. advertise_host:
           what `start` reports where every interface is bound. The callbacks are those of
           `Callbacks`; `on_session` answers with `send(peer, Hello(...))`.
    Threads:  all calls and callbacks on the loop that ran `start`.
    """

    def __init__(  # noqa: PLR0913 keywords, each a setting of its own
        self,
        incarnation: bytes,
        bind: str,
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        advertise_host: str = "",
        on_message: Callable[[bytes, Message], None],
        on_session: Callable[[bytes, Hello], None],
        on_lost: Callable[[bytes, str], None],
        heartbeat: Callable[[bytes], Heartbeat] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.address = ""
        """What decode agents connect to; set by `start`."""
        self._bind = bind
        self._keys = keys
        self._insecure = insecure
        self._advertise_host = advertise_host
        self._callbacks = Callbacks(
            on_message, on_session, on_lost, heartbeat or (lambda _: Heartbeat())
        )
        self._peers: dict[bytes, Peer] = {}
        self._backlog = Backlog()
        self._unreachable: set[bytes] = set()
        """Live sessions whose connection was down when something was last sent."""
        self._admission = Admission(keys.allowed, self._peers) if keys is not None else None
        self._keys_timer: asyncio.TimerHandle | None = None
        self._authenticator: Authenticator | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._wakeup: Wakeup | None = None

    # -- life --------------------------------------------------------------------------------
    async def start(self) -> str:
        """Bind; returns the address for decode agents.

        Raises:  ResourceError when the address cannot be bound; ConfigError when it is open to
                 others without keys. Nothing is left open then.
        """
        loop = asyncio.get_running_loop()
        host, port = host_and_port(self._bind, "bind")
        host = await resolve(host, "bind", loop)
        if not self._keys and not self._insecure and not is_loopback(host):
            raise ConfigError(
                f"bind={self._bind!r} is reachable from other machines and no keys are configured: "
                "make them with `pdxfer keygen`, or accept any peer with --insecure",
                fields={"bind": self._bind},
            )
        self._loop = loop
        self._context = new_context()
        try:
            self._open(join_address(host, port), ipv6=host == "*" or ":" in host)
        except zmq.ZMQError as error:
            await self._release(linger_ms=0)
            raise ResourceError(f"bind={self._bind!r}: {error.strerror}") from error
        bound_port = self._bound.rpartition(":")[2]
        if is_wildcard(host):
            host = self._advertise_host or outward_host()
        self.address = join_address(host, bound_port)
        return self.address

    def _open(self, address: str, *, ipv6: bool) -> None:
        socket = self._socket = self._context.socket(zmq.ROUTER)
        set_limits(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, int(ipv6))
        if self._keys is not None:
            self._authenticator = Authenticator(self._loop, self._context, self._keys.allowed)
            set_server_keys(socket, self._keys)
        socket.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
        self._bound = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._wakeup = Wakeup(self._loop, socket, self._read)
        if self._admission is not None:
            self._keys_timer = self._loop.call_later(CONTROL_KEYS_CHECK_S, self._check_keys)

    async def close(self, reason: str = "") -> None:
        """Say `Bye` to every peer, send what is queued for up to `CONTROL_LINGER_MS`, close.

        No callback is called any more. Idempotent.
        """
        if self._socket is None:
            return
        deadline = self._loop.time() + CONTROL_LINGER_MS / 1000
        peers = list(self._peers.values())
        for peer in peers:
            peer.send(Bye(reason=reason))
        while any(peer.is_blocked for peer in peers) and self._loop.time() < deadline:
            await asyncio.sleep(CONTROL_BLOCKED_RETRY_S)
            for peer in peers:
                peer.flush()
        self._peers.clear()
        for peer in peers:
            peer.end("closed here")
        await self._release(linger_ms=CONTROL_LINGER_MS)

    async def _release(self, linger_ms: int) -> None:
        socket, self._socket = self._socket, None
        if self._keys_timer is not None:
            self._keys_timer.cancel()
        if socket is not None and not socket.closed:
            if self._wakeup is not None:
                self._wakeup.close()
            socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.close()
        await self._loop.run_in_executor(None, self._context.term)

    # -- sending -----------------------------------------------------------------------------
    def send(self, peer: bytes, message: Message) -> None:
        """Send `message` at once, or queue it in order behind what is queued.

        Raises:  PeerError when there is no session with that incarnation. ResourceError when the
                 message is too large. In both cases nothing was sent or changed.
        """
        found = self._peers.get(peer)
        if found is None:
            raise PeerError(f"no session with decode agent {peer.hex()}", retryable=True)
        if isinstance(message, Hello):
            found.answer = message
        found.send(message)
        if self._backlog.length_bytes > CONTROL_UNACKED_BYTES_AGENT_MAX:
            self._end_largest()

    def _end_largest(self) -> None:
        """All peers together have not acknowledged too much: who holds most of it ends."""
        peer = max(self._peers.values(), key=lambda each: each.session.unacked_bytes)
        reason = (
            f"this agent keeps {self._backlog.length_bytes} bytes that its peers have not "
            f"acknowledged, at most {CONTROL_UNACKED_BYTES_AGENT_MAX} "
            f"(CONTROL_UNACKED_BYTES_AGENT_MAX), and {peer.session.unacked_bytes} of them for this "
            "peer: the session ends"
        )
        log.warning("session_ended", extra={"peer": peer.incarnation.hex(), "reason": reason})
        peer.end(reason, soon=True)

    def refuse(self, peer: bytes, error: PdxferError) -> None:
        """End a session with an error that the peer is told; `on_lost` follows. Idempotent."""
        found = self._peers.get(peer)
        if found is not None:
            found.refuse(error.to_wire())

    def unacked(self, peer: bytes) -> int:
        """Messages that this peer has not acknowledged; 0 without a session."""
        found = self._peers.get(peer)
        return 0 if found is None else found.session.unacked

    @property
    def peers(self) -> tuple[bytes, ...]:
        """Incarnations of the live sessions."""
        return tuple(self._peers)

    def _transmit(self, peer: bytes, frame: bytes) -> bool:
        if self._socket is None:
            return True
        try:
            self._socket.send_multipart((ROUTING_PREFIX + peer, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if peer in self._peers:
                self._unreachable.add(peer)
            # its connection is down; the session sends again once it is back
        else:
            self._unreachable.discard(peer)
        if self._wakeup is not None:
            self._wakeup.check()
        return True

    # -- receiving ---------------------------------------------------------------------------
    def _read(self) -> bool:
        """Read until nothing is left; True when the loop should get its turn first."""
        touched: set[Peer] = {peer for peer in self._peers.values() if peer.is_blocked}
        more = True
        for _ in range(CONTROL_FRAMES_PER_WAKE_MAX):
            if self._socket is None:
                return False
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                more = False
                break
            peer = self._take(frames)
            if peer is not None:
                touched.add(peer)
        for peer in touched:
            peer.send_due()
        return more

    def _take(self, frames: list[zmq.Frame]) -> Peer | None:
        """One frame from the socket; the peer whose session it moved."""
        routing_id = frames[0].bytes
        source = routing_id.removeprefix(ROUTING_PREFIX)
        if len(frames) != _FRAMES or len(source) != INCARNATION_BYTES or source == routing_id:
            log.warning("frame_dropped", extra={"routing_id": routing_id.hex()})
            return None
        if not self._is_its_key(source, frames[1]):
            return None
        peer = self._peers.get(source)
        try:
            envelope = _decode_from(source, frames[1].bytes)
        except RemoteProtocolError as error:
            log.warning("frame_refused", extra={"peer": source.hex(), "reason": str(error)})
            if peer is not None:
                peer.refuse(error.to_wire())
            return None
        return self._dispatch(envelope, peer)

    def _dispatch(self, envelope: Envelope, peer: Peer | None) -> Peer | None:
        message = envelope.message
        here = envelope.destination in (self.incarnation, b"")
        if isinstance(message, StaleSession):
            if peer is not None and here and envelope.session == peer.session.session:
                peer.end("the peer does not know this session any more")
            return None
        belonging = Belonging.STALE if peer is None else peer.session.belonging(envelope)
        is_new = peer is None or belonging is Belonging.NEW_SESSION
        if isinstance(message, Hello) and here and is_new:
            return self._begin(envelope, message, peer)
        if peer is None or belonging is not Belonging.CURRENT:
            self._transmit(envelope.source, stale_answer(self.incarnation, envelope))
            return None
        if isinstance(message, Hello) and peer.answer is not None:
            peer.send(peer.answer)  # the answer was lost
        peer.take(envelope)
        return peer

    def _begin(self, envelope: Envelope, hello: Hello, old: Peer | None) -> Peer | None:
        """A decode agent's first `Hello` of a session."""
        source, now = envelope.source, self._loop.time()
        if old is not None:
            old.end("the peer began a new session")
        session = Session(
            self.incarnation, source, now, session=envelope.session, backlog=self._backlog
        )
        peer = Peer(
            self._loop,
            session,
            self._callbacks,
            transmit=lambda frame: self._transmit(source, frame),
            reachable=lambda: source not in self._unreachable,
            read=self._read,
            ended=self._ended,
        )
        try:
            if self._admission is not None:
                self._admission.check(source, now)
            check_hello(hello, "decode")
            self._check_room()
            self._peers[source] = peer
            peer.take(envelope)
            self._callbacks.on_session(source, hello)
        except PdxferError as error:
            log.warning("session_refused", extra={"peer": source.hex(), "reason": str(error)})
            self._peers.pop(source, None)
            peer.refuse(error.to_wire())
            return None
        except Exception:
            log.exception("control_callback_failed", extra={"peer": source.hex()})
            peer.refuse(INTERNAL_ERROR)
            return None
        peer.arm()
        return peer

    def _check_room(self) -> None:
        if len(self._peers) >= CONTROL_SESSIONS_MAX:
            raise ResourceError(
                f"{len(self._peers)} decode agents are connected, at most {CONTROL_SESSIONS_MAX} "
                "(CONTROL_SESSIONS_MAX)",
                retryable=True,
            )

    def _ended(self, peer: Peer, reason: str) -> None:
        """A session is over: forget it, then tell the owner, unless it never was one."""
        if self._peers.get(peer.incarnation) is peer:
            del self._peers[peer.incarnation]
            self._unreachable.discard(peer.incarnation)
            log.debug("session_over", extra={"peer": peer.incarnation.hex(), "reason": reason})
            self._callbacks.on_lost(peer.incarnation, reason)

    def _is_its_key(self, source: bytes, frame: zmq.Frame) -> bool:
        """Whether the frame came with the CURVE key that this incarnation first came with."""
        if self._admission is None:
            return True
        return self._admission.is_its_key(source, str(frame.get("User-Id")).encode())

    def _check_keys(self) -> None:
        """End the sessions of keys that were taken off the allow-list."""
        assert self._admission is not None
        self._keys_timer = self._loop.call_later(CONTROL_KEYS_CHECK_S, self._check_keys)
        now = self._loop.time()
        self._admission.refresh(now)
        for incarnation, peer in list(self._peers.items()):
            try:
                self._admission.check(incarnation, now)
            except ConfigError as error:
                log.warning(
                    "session_ended", extra={"peer": incarnation.hex(), "reason": str(error)}
                )
                peer.refuse(error.to_wire())


def _decode_from(source: bytes, data: bytes) -> Envelope:
    envelope = decode(data)
    if envelope.source != source:
        raise RemoteProtocolError("Envelope: field $.source is not that of the routing id")
    return envelope

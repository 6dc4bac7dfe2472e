"""The decode end's socket: one DEALER to one address, and what its connection suffers, in words."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdxfer.control.socket import (
    ROUTING_PREFIX,
    SharedContext,
    Wakeup,
    host_and_port,
    join_address,
    resolve,
    set_client_keys,
    set_limits,
)
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.limits import (
    CONTROL_HANDSHAKE_TIMEOUT_MS,
    CONTROL_LINGER_MS,
    CONTROL_RECONNECT_MAX_MS,
    CONTROL_RECONNECT_MS,
    CONTROL_REFUSED_RETRY_S,
    CONTROL_SOCKETS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.control.keys import ClientKeys

_EVENTS: Final = (
    zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Connection:
    """Keeps a connection to one address, secured where there are keys.

    ZeroMQ connects again after a break; after a refused handshake this does.

    Args:  read: reads with `receive` until None, or returns True when it left something.
           connected: the connection is there, the first time or again. broken: it is not any more,
           as when the peer's process has ended. refused: the peer does not admit our key.
    Threads:  the loop that ran `open`.
    """

    def __init__(
        self,
        address: str,
        incarnation: bytes,
        keys: ClientKeys | None,
        *,
        read: Callable[[], bool],
        connected: Callable[[], None],
        broken: Callable[[], None],
        refused: Callable[[ConfigError], None],
    ) -> None:
        self.address = address
        self.problem = "no answer yet"
        """What last went wrong with the connection, for the text of a timeout."""
        self._routing_id = ROUTING_PREFIX + incarnation
        self._keys = keys
        self._read = read
        self._connected = connected
        self._broken = broken
        self._refused = refused
        self._socket: zmq.Socket[bytes] | None = None
        self.is_connected = False
        """Whether there is a connection, as its last event says; ZeroMQ drops that of a peer which
        does not answer pings."""
        self._monitor: zmq.Socket[bytes] | None = None
        self._wakeups: list[Wakeup] = []
        self._retry: asyncio.TimerHandle | None = None
        """Runs while the handshake is refused."""

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._socket is not None

    async def open(self) -> None:
        """Begin to connect; does not wait for the peer.

        Raises:  ConfigError when the address is malformed or its host has no address; ResourceError
                 when there is no socket for it. Nothing is left open then.
        """
        self._loop = asyncio.get_running_loop()
        host, port = host_and_port(self.address, "prefill")
        numeric = await resolve(host, "prefill", self._loop)
        # by name, so that a host that moves is found again when ZeroMQ connects anew
        self._endpoint = join_address(host, port)
        context = SharedContext.take()
        try:
            self._connect(context, ipv6=":" in numeric)
        except zmq.ZMQError as error:
            last = self._release(linger_ms=0)
            if last is not None:
                last.term()
            raise ResourceError(
                f"no socket for the link to {self.address}: {error.strerror}; a link has two, all "
                f"of a process at most {CONTROL_SOCKETS_MAX}",
                retryable=True,
            ) from error

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], *, ipv6: bool) -> None:
        socket = self._socket = context.socket(zmq.DEALER)
        set_limits(socket)
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        # IMMEDIATE=1 drops received messages when the connection breaks before they are read;
        # instead nothing is sent while the monitor says that there is no connection
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, CONTROL_RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, CONTROL_RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONTROL_HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, int(ipv6))
        if self._keys is not None:
            set_client_keys(socket, self._keys)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._wakeups.append(Wakeup(self._loop, self._monitor, self._read_monitor))
        self._wakeup = Wakeup(self._loop, socket, self._read)
        self._wakeups.append(self._wakeup)
        socket.connect(self._endpoint)

    async def close(self) -> None:
        """Send what was taken for up to `CONTROL_LINGER_MS`, close. Idempotent."""
        if self._socket is None:
            return
        context = self._release(linger_ms=CONTROL_LINGER_MS)
        if context is not None:
            await self._loop.run_in_executor(None, context.term)

    def _release(self, linger_ms: int) -> zmq.Context[zmq.Socket[bytes]] | None:
        """Close what is open; the context if this was its last user."""
        if self._retry is not None:
            self._retry.cancel()
        while self._wakeups:
            self._wakeups.pop().close()
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
            socket.close(linger_ms)
        return SharedContext.give_back()

    # -- frames ------------------------------------------------------------------------------
    def transmit(self, frame: bytes) -> bool:
        """Send at once; False when there is no connection or its queue is full."""
        if self._socket is None:
            return True
        if not self.is_connected:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._wakeup.check()
        return True

    def receive(self) -> bytes | None:
        """The next frame; None when there is none or the connection is closed."""
        if self._socket is None:
            return None
        try:
            return b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    # -- the connection ----------------------------------------------------------------------
    def hurry(self) -> None:
        """Somebody waits: where the handshake was refused, connect anew at once."""
        if self._retry is not None:
            self._connect_anew()

    def _read_monitor(self) -> bool:
        while self._socket is not None and self._monitor is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            event = parse_monitor_message(frames)
            self._on_event(zmq.Event(event["event"]), int(event["value"]))
        return False

    def _on_event(self, event: zmq.Event, value: int) -> None:
        match event:
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self.problem = "connected, but it did not answer Hello"
                self.is_connected = True
                self._stop_retry()
                self._connected()
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._connect_later()
                self._refused(self._key_refused(value))
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self.problem = self._handshake_failed()
                self._connect_later()
            case zmq.Event.DISCONNECTED:
                self.is_connected = False
                self._suffer("the connection broke")
                self._broken()
            case _:
                self._suffer("nothing accepts connections there")

    def _suffer(self, problem: str) -> None:
        """Note what went wrong; a break does not replace the refusal before it, which says more."""
        if "handshake refused" not in self.problem:
            self.problem = problem

    def _key_refused(self, status: int) -> ConfigError:
        own = "" if self._keys is None else self._keys.pair.public.decode()
        error = ConfigError(
            f"CURVE handshake refused by {self.address}: this agent's public key {own} is not in "
            f"the prefill agent's allow-list (status {status}); add its .pub file there"
        )
        self.problem = str(error)
        return error

    def _handshake_failed(self) -> str:
        if self._keys is None:
            return (
                f"handshake refused by {self.address}: it may require keys (`pdxfer keygen`), and "
                "none are configured here"
            )
        return (
            f"CURVE handshake refused by {self.address}: is the configured server public key the "
            "key of that prefill agent, and does it use keys at all?"
        )

    def _stop_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _connect_later(self) -> None:
        """Try again after a refused handshake; ZeroMQ itself gives such an address up."""
        if self._retry is None:
            self._retry = self._loop.call_later(CONTROL_REFUSED_RETRY_S, self._connect_anew)

    def _connect_anew(self) -> None:
        self._stop_retry()
        if self._socket is None:
            return
        with contextlib.suppress(zmq.ZMQError):  # it has given the address up
            self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

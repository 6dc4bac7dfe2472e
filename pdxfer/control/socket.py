"""ZeroMQ for the control channel: contexts, options, addresses, authentication, wake-ups.

Sockets are plain (not `zmq.asyncio`): frames leave from the call that makes them, without a task,
and one wake-up reads until there is nothing left. Works under asyncio and uvloop.
"""

from __future__ import annotations

import ipaddress
import logging
import socket as sockets
import threading
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from pdxfer.errors import ConfigError
from pdxfer.limits import (
    CONTROL_HANDSHAKE_TIMEOUT_MS,
    CONTROL_HEARTBEAT_INTERVAL_MS,
    CONTROL_HEARTBEAT_TIMEOUT_MS,
    CONTROL_LINGER_MS,
    CONTROL_MESSAGE_BYTES_MAX,
    CONTROL_RECEIVE_QUEUE_MESSAGES,
    CONTROL_SEND_QUEUE_MESSAGES,
    CONTROL_SOCKETS_MAX,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdxfer.control.keys import AllowList, ClientKeys, ServerKeys

log = logging.getLogger(__name__)

ROUTING_PREFIX: Final = b"P"
"""A routing id is this byte and the incarnation."""
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_READABLE: Final = int(zmq.POLLIN)
ZAP_DOMAIN: Final = b"pdxfer"
ZAP_FRAMES: Final = 7
"""Version, request id, domain, address, identity, mechanism, CURVE key."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with the agent's limits; the caller ends it with `term`, off the loop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, CONTROL_SOCKETS_MAX)
    return context


class SharedContext:
    """One context for all links of a process, made by the first and ended after the last.

    Each context costs two threads, and a decode agent has a link per prefill agent.
    """

    _context: zmq.Context[zmq.Socket[bytes]] | None = None
    _users = 0
    _lock = threading.Lock()

    @classmethod
    def take(cls) -> zmq.Context[zmq.Socket[bytes]]:
        """The context; `give_back` it once. Any thread."""
        with cls._lock:
            if cls._context is None:
                cls._context = new_context()
            cls._users += 1
            return cls._context

    @classmethod
    def give_back(cls) -> zmq.Context[zmq.Socket[bytes]] | None:
        """The context after its last user, else None; the caller ends it with `term`."""
        with cls._lock:
            cls._users -= 1
            if cls._users:
                return None
            context, cls._context = cls._context, None
            return context


def set_limits(socket: zmq.Socket[bytes]) -> None:
    """Options that both ends share; libzmq's defaults are unbounded or lose messages silently."""
    socket.setsockopt(zmq.SNDHWM, CONTROL_SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, CONTROL_RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.LINGER, CONTROL_LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, CONTROL_HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, CONTROL_HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, CONTROL_HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, CONTROL_HANDSHAKE_TIMEOUT_MS)


def set_server_keys(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Make `socket` a CURVE server that asks the allow-list, and refuses all where none answers."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def set_client_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Make `socket` a CURVE client of the one server key."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)


# -- addresses -------------------------------------------------------------------------------
def host_and_port(address: str, field: str) -> tuple[str, str]:
    """(host, port) of `tcp://host:port`; brackets of an IPv6 host are taken off.

    Raises:  ConfigError naming `field`.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or "/" in host or not _is_port(port):
        raise ConfigError(f"{field}={address!r}: expected tcp://host:port")
    return host.removeprefix("[").removesuffix("]"), port


def join_address(host: str, port: int | str) -> str:
    """`tcp://host:port`, an IPv6 host in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def resolve(host: str, field: str, loop: asyncio.AbstractEventLoop) -> str:
    """The numeric address of `host`, IPv4 first; `*` stays.

    Raises:  ConfigError where the name has none.
    """
    if host == "*":
        return host
    try:
        found = await loop.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{field}: host {host!r} has no address: {error}") from error
    found.sort(key=lambda info: info[0] != sockets.AF_INET)
    return str(found[0][4][0])


def is_loopback(host: str) -> bool:
    """Whether a numeric host can be reached from this machine only."""
    return host != "*" and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether a numeric host means every interface."""
    return host == "*" or ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def outward_host() -> str:
    """The address by which this machine goes out; loopback where it has no route. Sends nothing."""
    for family, target in ((sockets.AF_INET, "192.0.2.1"), (sockets.AF_INET6, "2001:db8::1")):
        with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < 1 << 16


# -- wake-ups --------------------------------------------------------------------------------
class Wakeup:
    """Calls `read` whenever its socket may have something to read or may take more.

    libzmq's descriptor tells changes only, and any call on the socket may swallow one, so `check`
    belongs behind every send.

    Args:  read: reads until EAGAIN, or returns True when it left something.
    Threads:  the loop's.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], read: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._read = read
        self._closed = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._wake)
        self._handle: asyncio.Handle | None = loop.call_soon(self._wake)

    def check(self) -> None:
        """Make sure that what a send may have swallowed is read."""
        if self._handle is None and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._handle = self._loop.call_soon(self._wake)

    def close(self) -> None:
        """Stop; before the socket is closed. Idempotent."""
        self._loop.remove_reader(self._descriptor)
        if self._handle is not None:
            self._handle.cancel()
        self._closed = True

    def _wake(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        more = self._read()
        if self._closed:
            return
        if more:
            self._handle = self._loop.call_soon(self._wake)
        else:
            self.check()


# -- authentication --------------------------------------------------------------------------
class Authenticator:
    """Answers libzmq's question (ZAP, RFC 27) whether a CURVE client may connect.

    One per context, started before the server's socket is bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: AllowList,
    ) -> None:
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._wakeup = Wakeup(loop, self._socket, self._read)

    def close(self) -> None:
        """Stop answering: nobody may connect any more. Idempotent."""
        if not self._socket.closed:
            self._wakeup.close()
            self._socket.close()

    def _read(self) -> bool:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._socket.send_multipart(self._answer(frames), zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> tuple[bytes, ...]:
        version, request = (*frames, b"", b"")[:2]
        name = None
        if len(frames) == ZAP_FRAMES and frames[2] == ZAP_DOMAIN and frames[5] == b"CURVE":
            key = z85.encode(frames[6])
            name = self._allowed.name_of(key)
            peer = {"host": frames[3].decode(errors="replace"), "key": key.decode()}
            if name is None:
                log.warning(
                    "client_refused", extra=peer | {"reason": "its key is not in the allow-list"}
                )
            else:
                log.debug("client_allowed", extra=peer | {"client": name})
            if name is not None:
                return (version, request, b"200", b"OK", key, b"")
        return (version, request, b"400", b"not in the allow-list", b"", b"")

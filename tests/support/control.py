"""Ends of the control channel that record what they are told, and a TCP proxy to break it."""

from __future__ import annotations

import asyncio
import contextlib
import os

import zmq

from pdxfer.control.link import ControlLink
from pdxfer.control.server import ControlServer
from pdxfer.wire.codec import decode, encode
from pdxfer.wire.messages import Envelope, Heartbeat, Hello, Matched

TIMEOUT_S = 10.0


def matched(number: int, padding: int = 0) -> Matched:
    return Matched(generation=number, source_worker=padding)


class Recorder:
    """Callbacks that keep what they are told."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, object]] = []
        self.events: list[tuple[str, bytes, object]] = []
        self.heartbeats: list[Heartbeat] = []
        self.refusal: Exception | None = None
        self.hook = lambda message: None
        """What a test does at each message."""

    def on_message(self, peer, message) -> None:
        if isinstance(message, Heartbeat):
            self.heartbeats.append(message)
        else:
            self.messages.append((peer, message))
            self.hook(message)

    def on_session(self, peer, hello) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.events.append(("session", peer, hello))

    def on_lost(self, peer, reason) -> None:
        self.events.append(("lost", peer, reason))

    @property
    def numbers(self) -> list[int]:
        return [message.generation for _, message in self.messages]

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]

    @property
    def callbacks(self) -> dict:
        return {
            "on_message": self.on_message,
            "on_session": self.on_session,
            "on_lost": self.on_lost,
        }


class Server(Recorder):
    """A prefill end that answers `Hello`."""

    def __init__(self, bind="tcp://127.0.0.1:0", *, incarnation=None, version=0, **settings):
        super().__init__()
        self.incarnation = incarnation or os.urandom(16)
        self.hello = Hello(version=version, role="prefill")
        self.control = ControlServer(self.incarnation, bind, **settings, **self.callbacks)

    def on_session(self, peer, hello) -> None:
        super().on_session(peer, hello)
        self.control.send(peer, self.hello)

    async def __aenter__(self):
        self.address = await self.control.start()
        return self

    async def __aexit__(self, *_):
        await self.control.close()


class Link(Recorder):
    """A decode end."""

    def __init__(self, address, *, incarnation=None, version=0, role="decode", **settings):
        super().__init__()
        self.incarnation = incarnation or os.urandom(16)
        hello = Hello(version=version, role=role)
        self.control = ControlLink(
            self.incarnation, address, hello=hello, **settings, **self.callbacks
        )

    async def __aenter__(self):
        await self.control.start()
        return self

    async def __aexit__(self, *_):
        await self.control.close()


async def until(condition, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition()`; the deadline fails the test."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 what it waits for has no event
            await asyncio.sleep(0.005)


class Proxy:
    """A TCP proxy in front of an address: cuts, stops or lets through."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._tasks: set[asyncio.Task] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection; new ones are served."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def stop(self) -> None:
        """Keep the connections, but let nothing through."""
        self._open.clear()

    def go(self) -> None:
        self._open.set()

    async def _serve(self, reader, writer) -> None:
        self.connections += 1
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward}
        for source, sink in ((reader, onward), (onward_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source, sink) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


class RawPeer:
    """A DEALER socket that says whatever a test wants."""

    def __init__(self, address, *, routing_id=None, incarnation=None, keys=None):
        self.incarnation = incarnation or os.urandom(16)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if routing_id is None:
            routing_id = b"P" + self.incarnation
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        self.socket.connect(address)

    def send(self, server: bytes, message=None, *, session=1, number=0, ack=0, source=None):
        envelope = Envelope(
            source=source or self.incarnation,
            destination=server,
            session=session,
            number=number,
            ack=ack,
            message=message,
        )
        self.socket.send(encode(envelope))

    def hello(self, session=1) -> None:
        self.send(b"", Hello(version=0, role="decode"), session=session)

    async def receive(self, kind) -> Envelope:
        """The next envelope with a message of `kind`; others are passed over."""
        found = None

        def look() -> bool:
            nonlocal found
            while found is None:
                try:
                    envelope = decode(self.socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    return False
                if isinstance(envelope.message, kind):
                    found = envelope
            return True

        await until(look)
        assert found is not None
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self._context.term()

"""Frames on the Unix socket between a worker and its agent: messages, and descriptors beside them.

    u32 length of the body | u32 descriptors | body (msgpack)          little-endian

Descriptors ride with the first byte of their frame. `Inbox` and `Outbox` are the two directions of
a non-blocking socket; neither waits, and neither gives up the GIL for its one system call: a busy
thread beside the caller would keep it for milliseconds. The caller decides what to do when they
cannot go on.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from types import UnionType
from typing import Final, Generic, TypeVar

import msgspec

from pdxfer import _core, limits
from pdxfer.errors import RemoteProtocolError, ResourceError
from pdxfer.local.descriptors import shortage
from pdxfer.local.messages import LocalMessage

HEADER: Final = struct.Struct("<II")
_RECEIVE_BYTES: Final = 256 << 10
_COALESCE_BYTES: Final = 256 << 10
_COALESCE_FRAMES: Final = 64
_ENCODER: Final = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=LocalMessage)


def encode(message: LocalMessage, descriptors: int = 0) -> bytes:
    """One frame.

    Raises: ResourceError when it is larger than `limits` allow; nothing was sent.
    """
    return framed(encode_body(message, descriptors), descriptors)


def framed(body: bytes, descriptors: int = 0) -> bytes:
    """The frame of a body that `encode_body` has made."""
    return HEADER.pack(len(body), descriptors) + body


def encode_body(message: LocalMessage, descriptors: int = 0) -> bytes:
    """What a frame carries, without its header.

    Raises: ResourceError when it is larger than `limits` allow; nothing was sent.
    """
    body = _ENCODER.encode(message)
    if len(body) > limits.LOCAL_MESSAGE_BYTES_MAX or descriptors > limits.LOCAL_FDS_MAX:
        raise ResourceError(
            f"{type(message).__name__} has {len(body)} bytes and {descriptors} descriptors; a "
            f"local message may have {limits.LOCAL_MESSAGE_BYTES_MAX} and {limits.LOCAL_FDS_MAX}"
        )
    return body


class Inbox(Generic[M]):
    """What comes in: bytes and descriptors, cut into messages. Owns descriptors not yet taken."""

    def __init__(self, messages: UnionType) -> None:
        """Accept the messages of this union and no others."""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> bool:
        """One read; False when nothing is there now.

        Raises: EOFError at the end of the stream; OSError; RemoteProtocolError when descriptors
            were lost; ResourceError when they were because none are free here.
        """
        received = _core.receive_now(sock.fileno(), _RECEIVE_BYTES, limits.LOCAL_FDS_MAX)
        if received is None:
            return False
        data, fds, lost = received
        self._fds.extend(fds)
        if lost:
            if len(fds) < limits.LOCAL_FDS_MAX:
                raise shortage("this process")
            raise RemoteProtocolError(f"more than {limits.LOCAL_FDS_MAX} descriptors came at once")
        if not data:
            raise EOFError
        self._data += data
        return True

    def next(self) -> tuple[M, list[int]] | None:
        """The next whole message and its descriptors, which are the caller's now; None: not yet.

        Raises: RemoteProtocolError when the bytes are no frame, or no message of the union.
        """
        if len(self._data) < HEADER.size:
            if self._fds and not self._data:
                raise RemoteProtocolError(f"{len(self._fds)} descriptors came without a frame")
            return None
        length, count = HEADER.unpack_from(self._data)
        if length > limits.LOCAL_MESSAGE_BYTES_MAX or count > limits.LOCAL_FDS_MAX:
            raise RemoteProtocolError(
                f"a frame says it has {length} bytes and {count} descriptors; at most "
                f"{limits.LOCAL_MESSAGE_BYTES_MAX} and {limits.LOCAL_FDS_MAX} are allowed"
            )
        end = HEADER.size + length
        if len(self._data) < end:
            # The frame's own descriptors are here, those of a later one cannot be.
            if len(self._fds) != count:
                raise RemoteProtocolError(
                    f"a frame says {count} descriptors, {len(self._fds)} came"
                )
            return None
        if len(self._fds) < count:
            raise RemoteProtocolError(f"a frame says {count} descriptors, {len(self._fds)} came")
        message = self._decode(bytes(memoryview(self._data)[HEADER.size : end]))
        del self._data[:end]
        return message, [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close every descriptor that no message took, and forget what came. Idempotent."""
        while self._fds:
            os.close(self._fds.popleft())
        self._data.clear()

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"a local message does not decode: {error}") from error


class Outbox:
    """What goes out: frames in order, with their descriptors. Owns duplicates of what it queues."""

    def __init__(self) -> None:
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self.queued_bytes = 0
        """Bytes that the kernel has not been given yet."""

    def append(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame made by `encode`; the descriptors stay the caller's, to close at once."""
        owned: list[int] = []
        try:
            for fd in fds:
                owned.append(os.dup(fd))  # noqa: PERF401 those before a failing one must be closed
        except OSError:
            _close_all(owned)
            raise
        self._queue.append((memoryview(frame), owned))
        self.queued_bytes += len(frame)

    def flush(self, sock: socket.socket) -> bool:
        """Give the kernel what it takes; True when nothing is left.

        Raises: OSError; what is queued stays queued, to be dropped by `close`.
        """
        while self._queue:
            views, fds = self._head()
            sent = _core.send_now(sock.fileno(), views, fds)
            if sent < 0:
                return False
            if fds:
                # They went with the first byte, however few bytes the kernel took.
                _close_all(fds)
                fds.clear()
            self._consume(sent)
        return True

    def close(self) -> None:
        """Drop what is queued and close its descriptors. Idempotent."""
        for _, fds in self._queue:
            _close_all(fds)
        self._queue.clear()
        self.queued_bytes = 0

    def _head(self) -> tuple[list[memoryview], list[int]]:
        """The first frames as one write: with descriptors alone, since they mark its first byte."""
        first, fds = self._queue[0]
        views = [first]
        if fds:
            return views, fds
        total = len(first)
        for view, later_fds in islice(self._queue, 1, _COALESCE_FRAMES):
            total += len(view)
            if later_fds or total > _COALESCE_BYTES:
                break
            views.append(view)
        return views, fds

    def _consume(self, sent: int) -> None:
        self.queued_bytes -= sent
        while sent:
            view, fds = self._queue[0]
            if sent < len(view):
                self._queue[0] = (view[sent:], fds)
                return
            sent -= len(view)
            self._queue.popleft()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

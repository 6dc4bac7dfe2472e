"""One JSON object a line over a socket pair: what a command and the processes it starts say.

Standard output stays free for people, whatever a library prints in a child.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

Event = Mapping[str, object]
_LINE_BYTES_MAX = 16 << 20


class ChannelClosedError(Exception):
    """The process at the other end is gone."""


class Channel:
    """One end of the pair.

    Threads:  one at a time.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    def send(self, **event: object) -> None:
        """Send one object."""
        self._end.settimeout(None)
        try:
            self._end.sendall(json.dumps(event).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None) -> Event:
        """The next object.

        Args:     timeout_s: None only in a child, whose end comes with its parent's.
        Raises:   TimeoutError; ChannelClosedError when the other end is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._end.settimeout(left_s)
            try:
                data = self._end.recv(1 << 16)
            except TimeoutError:
                raise TimeoutError(f"no message within {timeout_s} s") from None
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data or len(self._rest) > _LINE_BYTES_MAX:
                raise ChannelClosedError("closed")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        event = json.loads(line)
        if not isinstance(event, dict):
            raise ChannelClosedError(f"not an object: {line[:80]!r}")
        return event

    def close(self) -> None:
        """Close this end; the other one reads the end of the stream."""
        self._end.close()


def number(event: Event, name: str) -> int:
    """An integer field of an event."""
    value = event[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not an integer")
    return value


def real(event: Event, name: str) -> float:
    """A number field of an event."""
    value = event[name]
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return float(value)


def text(event: Event, name: str) -> str:
    """A text field of an event."""
    return str(event[name])


def numbers(event: Event, name: str) -> list[int]:
    """A list of integers in an event."""
    value = event[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}, not a list")
    return [int(item) for item in value]


def texts(event: Event, name: str) -> list[str]:
    """A list of texts in an event."""
    value = event[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}, not a list")
    return [str(item) for item in value]

"""Structured logs: one line an event on stderr, as `key=value` text or as JSON.

A call site names the event and gives the rest as fields:

    logger.info("transfer", extra={"fields": {"generation": 7, "state": "MOVING"}})

A daemon logs several lines a transfer on the thread that serves it, so a line has to be cheap: no
caller lookup, the second of the time stamp formatted once, one write.
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "fields",
    "taskName",
}
_NEEDS_QUOTES: Final = re.compile(r'[\s"=\\]|^$')
_STDERR: Final = 2
_RED: Final = "\x1b[31m"
_PLAIN_AGAIN: Final = "\x1b[0m"


def in_red(text: str, *, terminal: bool) -> str:
    """`text`, in red where it goes to a terminal."""
    return f"{_RED}{text}{_PLAIN_AGAIN}" if terminal else text


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    """The event's fields: those under `fields`, and whatever else `extra` brought."""
    given: Mapping[str, object] = getattr(record, "fields", {})
    if record.__dict__.keys() <= _PLAIN:
        return given
    loose = {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
    return {**given, **loose}


def _bytes_as_hex(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _other(value: object) -> object:
    """A value of a type that the JSON encoder does not know, as text."""
    return str(value)


_encode: Final = msgspec.json.Encoder(enc_hook=_other).encode


class _Clock:
    """UTC time stamps in microseconds; the part down to the second is made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def stamp(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._text}.{int((created - second) * 1e6):06d}Z"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock()

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; an exception stands under `exception`."""
        line: dict[str, object] = {
            "time": self._clock.stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line[name] = _bytes_as_hex(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


class TextFormatter(logging.Formatter):
    """`time level event key=value ...`; a value with spaces or quotes is quoted as in JSON.

    Warnings and errors are red on a terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock()

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; an exception follows on lines of its own."""
        words = [
            self._clock.stamp(record.created),
            record.levelname.lower(),
            _quoted(record.getMessage()),
        ]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if record.levelno >= logging.WARNING:
            return in_red(line, terminal=os.isatty(_STDERR))
        return line


def _word(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int | float):
        return str(value)
    value = _bytes_as_hex(value)
    return value if isinstance(value, str) else _encode(value).decode()


def _quoted(text: str) -> str:
    return _encode(text).decode() if _NEEDS_QUOTES.search(text) else text


class StderrHandler(logging.Handler):
    """Writes each line to stderr with one system call."""

    def __init__(self, write: Callable[[int, bytes], int] = os.write) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; a closed or full stderr loses the line and nothing else."""
        try:
            self._write(_STDERR, (self.format(record) + "\n").encode(errors="replace"))
        except OSError:
            self.handleError(record)


def configure(level: str, style: str) -> None:
    """Send every event of this process to stderr, from `level` up. Replaces earlier handlers."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # documented: no walk up the stack to name the caller
    logging.raiseExceptions = False
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

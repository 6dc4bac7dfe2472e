"""Structured logs: one line an event on stderr, as `key=value` text or as JSON.

A call site names the event and gives the rest as fields:

    logger.info("transfer", extra={"fields": {"generation": 7, "state": "MOVING"}})
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "fields",
    "taskName",
}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The event's fields: those under `fields`, and whatever else `extra` brought."""
    given: Mapping[str, object] = getattr(record, "fields", {})
    loose = {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
    return {**given, **loose}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return str(value)


def _head(record: logging.LogRecord) -> dict[str, object]:
    moment = datetime.fromtimestamp(record.created, UTC)
    return {
        "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; an exception stands under `exception`."""
        line = {**_head(record), **{name: _plain(v) for name, v in _fields(record).items()}}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time level event key=value ...`; values that hold spaces or quotes are quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; an exception follows on lines of its own."""
        head = _head(record)
        pairs = [f"{name}={_quoted(_plain(value))}" for name, value in _fields(record).items()]
        line = " ".join([f"{head['time']} {head['level']}", _quoted(head["event"]), *pairs])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(value: object) -> str:
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )
    plain = text and not any(character in text for character in ' "=\n\\')
    return text if plain or not isinstance(value, str) else json.dumps(text, ensure_ascii=False)


def configure(level: str, style: str) -> None:
    """Send every event of this process to stderr, from `level` up. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

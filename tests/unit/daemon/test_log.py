"""Log lines: one an event, machine-readable, nothing lost."""

import json
import logging
import sys

from pdxfer.daemon.log import JsonFormatter, StderrHandler, TextFormatter


def record(event="transfer", fields=None, **loose):
    made = logging.LogRecord("pdxfer.agent", logging.INFO, "f.py", 1, event, (), None)
    if fields is not None:
        made.fields = fields
    made.__dict__.update(loose)
    return made


def test_json_holds_event_and_fields():
    line = json.loads(JsonFormatter().format(record(fields={"generation": 7, "state": "MOVING"})))
    assert line["event"] == "transfer"
    assert line["level"] == "info"
    assert line["generation"] == 7
    assert line["state"] == "MOVING"
    assert line["time"].endswith("Z")


def test_bytes_and_objects_become_text():
    line = json.loads(JsonFormatter().format(record(fields={"peer": b"\x01\xff", "at": {1: (2,)}})))
    assert line["peer"] == "01ff"
    assert line["at"] == {"1": [2]}


def test_text_is_one_line_of_pairs():
    line = TextFormatter().format(record(fields={"a": 1, "why": 'it "broke"\nhere', "e": ""}))
    assert "\n" not in line
    assert line.split(" ", 2)[1] == "info"
    assert line.endswith('transfer a=1 why="it \\"broke\\"\\nhere" e=""')


def test_loose_extra_is_kept():
    assert TextFormatter().format(record(room=5)).endswith("transfer room=5")


def test_an_exception_is_shown():
    try:
        int("inner")
    except ValueError:
        made = record()
        made.exc_info = sys.exc_info()
    assert "'inner'" in json.loads(JsonFormatter().format(made))["exception"]
    assert "'inner'" in TextFormatter().format(made)


def test_the_second_is_kept_and_the_microsecond_is_not():
    formatter = TextFormatter()
    first, second = record(), record()
    first.created, second.created = 1_700_000_000.25, 1_700_000_000.75
    assert formatter.format(first).startswith("2023-11-14T22:13:20.250000Z ")
    assert formatter.format(second).startswith("2023-11-14T22:13:20.750000Z ")


def test_a_line_is_one_write_and_a_broken_stderr_is_survived(monkeypatch):
    written = []
    handler = StderrHandler(lambda fd, data: written.append((fd, data)) or len(data))
    handler.setFormatter(TextFormatter())
    handler.emit(record(fields={"a": 1}))
    assert len(written) == 1
    assert written[0][0] == 2
    assert written[0][1].endswith(b"transfer a=1\n")

    def closed(fd, data):
        raise BrokenPipeError

    monkeypatch.setattr(logging, "raiseExceptions", False)
    broken = StderrHandler(closed)
    broken.setFormatter(TextFormatter())
    broken.emit(record())

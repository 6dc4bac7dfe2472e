#!/usr/bin/env python3
"""Writes what is derived from the messages: `schema.yaml`, the tables of `SPEC.md`, golden vectors.

    proto/regen.py           write what differs
    proto/regen.py --check   change nothing; exit 1 and name what differs

Vectors of a released protocol version are never rewritten: a change of what they hold is another
version. A test runs `--check`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from samples import SAMPLES

from pdxfer import limits
from pdxfer.wire import codec, messages
from pdxfer.wire.version import PROTOCOL_VERSION, RELEASED_VERSIONS

ROOT = Path(__file__).resolve().parent
VECTORS = ROOT / "vectors" / f"v{PROTOCOL_VERSION}"
MARK = "<!-- {0}: written by regen.py -->\n"
MARK_END = "<!-- end of {0} -->\n"
LIMITS = (
    "CONTROL_MESSAGE_BYTES_MAX",
    "CONTROL_ARRAY_ITEMS_MAX",
    "CONTROL_MAP_ITEMS_MAX",
    "CONTROL_TEXT_BYTES_MAX",
    "PAGES_PER_MESSAGE_MAX",
    "AUX_BYTES_MAX",
    "COMMIT_BYTES_MAX",
    "CHUNKS_PER_TRANSFER_MAX",
    "SEGMENT_BYTES",
    "GROUPS_MAX",
    "PLANES_MAX",
    "REGIONS_MAX",
    "WORKERS_PER_AGENT_MAX",
    "RANKS_PER_INSTANCE_MAX",
    "CONTROL_SESSIONS_MAX",
    "CONTROL_UNACKED_MESSAGES_MAX",
    "CONTROL_UNACKED_BYTES_MAX",
    "CONTROL_ACK_DELAY_S",
    "CONTROL_ACK_EVERY_MESSAGES",
    "CONTROL_RESEND_AFTER_S",
    "CONTROL_RESEND_AFTER_MAX_S",
    "CONTROL_RESEND_AGE_S",
    "CONTROL_RESEND_BURST_MESSAGES",
    "CONTROL_RESEND_BURST_BYTES",
    "CONTROL_UNACKED_S",
    "CONTROL_HELLO_INTERVAL_S",
    "NEIGHBOUR_TIMEOUT_S",
    "HEARTBEAT_INTERVAL_S",
    "LIVENESS_TIMEOUT_S",
    "UNMATCHED_PER_SESSION_MAX",
    "PLACED_BYTES_PER_SESSION_MAX",
    "PLACED_BYTES_MAX",
    "TOMBSTONES_PER_SESSION_MAX",
    "UNMATCHED_DEADLINE_S",
    "NO_PROGRESS_DEADLINE_S",
    "PROGRESS_PER_HEARTBEAT_MAX",
    "LEASE_S",
    "FENCE_DEADLINE_S",
)
"""Limits that a peer sees."""


@dataclass(frozen=True)
class Field:
    """One field of a record, as its source says it."""

    name: str
    type: str
    default: str
    """Source of the default; empty: the field is required."""
    meaning: str


@dataclass(frozen=True)
class Record:
    """One record of `messages.py`."""

    name: str
    tag: str
    """Empty: not a message by itself."""
    meaning: str
    fields: tuple[Field, ...]


def records() -> list[Record]:
    """The records of `messages.py`, in its order."""
    tree = ast.parse(inspect.getsource(messages))
    found = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name == "Message":
            continue
        tags = [word.value for word in node.keywords if word.arg == "tag"]
        tag = ast.literal_eval(tags[0]) if tags else ""
        found.append(Record(node.name, tag, _flat(ast.get_docstring(node)), _fields(node)))
    return found


def _fields(node: ast.ClassDef) -> tuple[Field, ...]:
    fields = []
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        meaning = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = _flat(str(following.value.value))
        if not meaning:
            raise SystemExit(f"{node.name}.{item.target.id} has no text that says what it means")
        default = ast.unparse(item.value) if item.value is not None else ""
        fields.append(Field(item.target.id, ast.unparse(item.annotation), default, meaning))
    return tuple(fields)


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


# -- outputs ---------------------------------------------------------------------------------
def schema() -> str:
    """`schema.yaml`."""
    lines = [
        "# Written by regen.py from pdxfer/wire/messages.py.",
        f"version: {PROTOCOL_VERSION}",
        "records:",
    ]
    for record in records():
        lines.append(f"  {record.name}:")
        if record.tag:
            lines.append(f"    tag: {record.tag}")
        lines.append("    fields:")
        for field in record.fields:
            default = f", default: {json.dumps(field.default)}" if field.default else ""
            lines.append(f"      {field.name}: {{type: {json.dumps(field.type)}{default}}}")
    return "\n".join(lines) + "\n"


def tables() -> str:
    """The tables of SPEC.md, one a record: messages first."""
    parts = []
    found = records()
    ordered = [r for r in found if r.name == "Envelope"]
    ordered += [r for r in found if r.tag] + [r for r in found if not r.tag and r not in ordered]
    for record in ordered:
        title = f"`{record.name}`" + (f", `t` = `{record.tag}`" if record.tag else "")
        parts.append(f"\n#### {title}\n\n{record.meaning}\n")
        parts.append("\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n")
        for field in record.fields:
            kind = field.type.replace("|", "\\|")
            default = f"`{field.default}`" if field.default else "required"
            meaning = field.meaning.replace("|", "\\|")
            parts.append(f"| `{field.name}` | `{kind}` | {default} | {meaning} |\n")
    return "".join(parts) + "\n"


def limits_table() -> str:
    """The limits that a peer sees."""
    texts = {}
    body = ast.parse(inspect.getsource(limits)).body
    for item, following in itertools.pairwise(body):
        if isinstance(item, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[ast.unparse(item.target)] = _flat(ast.literal_eval(following.value))
    rows = [f"| `{name}` | {getattr(limits, name)} | {texts[name]} |\n" for name in LIMITS]
    return "\n| limit | value | meaning |\n| --- | --- | --- |\n" + "".join(rows) + "\n"


def spec() -> str:
    """SPEC.md with its generated parts written anew."""
    text = (ROOT / "SPEC.md").read_text(encoding="utf-8")
    for name, content in (("tables", tables()), ("limits", limits_table())):
        begin, end = MARK.format(name), MARK_END.format(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"SPEC.md has lost the marks around its {name}")
        text = before + begin + content + end + after
    return text


def vectors() -> dict[Path, str]:
    """The golden vectors of this version: path to content."""
    files = {}
    for name, record in SAMPLES.items():
        is_commit = isinstance(record, messages.CommitPayload)
        data = codec.encode_commit(record) if is_commit else codec.encode(record)
        vector = {
            "name": name,
            "version": PROTOCOL_VERSION,
            "record": type(record).__name__,
            "value": _plain(msgspec.to_builtins(record, builtin_types=(bytes,))),
            "hex": data.hex(),
        }
        files[VECTORS / f"{name}.json"] = json.dumps(vector, indent=1) + "\n"
    return files


def _plain(value: object) -> object:
    """JSON form: bytes become `{"bytes": hex}`."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on a change")
    check = parser.parse_args().check
    golden = vectors()
    wanted = {ROOT / "schema.yaml": schema(), ROOT / "SPEC.md": spec(), **golden}
    differing = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    differing += [path for path in sorted(VECTORS.glob("*")) if path not in wanted]
    for path in differing:
        sys.stdout.write(f"{path.relative_to(ROOT)} differs\n")
    frozen = [path for path in differing if path.parent == VECTORS]
    if PROTOCOL_VERSION in RELEASED_VERSIONS and frozen:
        sys.stdout.write(
            f"protocol version {PROTOCOL_VERSION} is released: its vectors are never rewritten; "
            "raise PROTOCOL_VERSION in pdxfer/wire/version.py\n"
        )
        return 1
    if check:
        return int(bool(differing))
    VECTORS.mkdir(parents=True, exist_ok=True)
    for path in differing:
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

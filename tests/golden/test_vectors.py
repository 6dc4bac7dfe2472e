"""Golden vectors of the protocol, both ways; SPEC.md and schema.yaml held equal to the code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgpack
import msgspec
import pytest
import yaml

from pdxfer.errors import RemoteProtocolError
from pdxfer.wire import codec, messages
from pdxfer.wire.messages import AnyMessage, CommitPayload, Envelope
from pdxfer.wire.version import PROTOCOL_VERSION, RELEASED_VERSIONS, SUPPORTED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
FILES = sorted((PROTO / "vectors").glob("v*/*.json"))
IDS = [f"{file.parent.name}-{file.stem}" for file in FILES]


def from_plain(value):
    if isinstance(value, dict):
        if value.keys() == {"bytes"}:
            return bytes.fromhex(value["bytes"])
        return {key: from_plain(item) for key, item in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value


def load(file):
    """(record, bytes, decoder, encoder) of a vector."""
    vector = json.loads(file.read_text())
    is_commit = vector["record"] == "CommitPayload"
    kind = CommitPayload if is_commit else Envelope
    record = msgspec.convert(from_plain(vector["value"]), kind, builtin_types=(bytes,))
    decode, encode = (
        (codec.decode_commit, codec.encode_commit) if is_commit else (codec.decode, codec.encode)
    )
    return record, bytes.fromhex(vector["hex"]), decode, encode


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_bytes_mean_the_record_and_the_record_makes_the_bytes(file):
    record, data, decode, encode = load(file)
    assert decode(data) == record
    assert encode(record) == data


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_every_truncation_is_refused(file):
    _, data, decode, _ = load(file)
    for length in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:length])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\x00")


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_field_of_a_newer_peer_is_accepted(file):
    record, data, decode, _ = load(file)
    plain = msgpack.unpackb(data)
    plain["zz_later"] = {"a": [1, b"x", None]}
    if plain.get("message") is not None:
        plain["message"]["zz_later"] = 1.5
    assert decode(msgpack.packb(plain)) == record


@pytest.mark.parametrize("file", [file for file in FILES if '"t":' in file.read_text()])
def test_another_message_type_is_never_taken_for_one_of_ours(file):
    _, data, decode, _ = load(file)
    plain = msgpack.unpackb(data)
    plain["message"]["t"] = "later"
    with pytest.raises(RemoteProtocolError, match=r"\$\.message\.t"):
        decode(msgpack.packb(plain))


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_every_required_field_is_required_and_named(file):
    record, data, decode, _ = load(file)
    required = [f.name for f in msgspec.structs.fields(record) if f.required]
    for name in required:
        plain = msgpack.unpackb(data)
        del plain[name]
        with pytest.raises(RemoteProtocolError, match=name):
            decode(msgpack.packb(plain))


def test_every_message_has_a_vector():
    seen = {type(load(file)[0].message) for file in FILES if load(file)[0].__class__ is Envelope}
    assert seen == {*get_args(AnyMessage), type(None)}


def regen(*arguments, root=ROOT):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, root / "proto" / "regen.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_specification_schema_and_vectors_are_those_of_the_code():
    done = regen("--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def copy_of_proto(tmp_path):
    target = tmp_path / "proto"
    for file in PROTO.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            copy = target / file.relative_to(PROTO)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return target


def test_vectors_of_a_released_version_are_never_rewritten(tmp_path):
    proto = copy_of_proto(tmp_path)
    script = proto / "regen.py"
    script.write_text(
        script.read_text().replace(
            "\nROOT =", "\nRELEASED_VERSIONS = frozenset({PROTOCOL_VERSION})\nROOT ="
        )
    )
    assert regen(root=tmp_path).returncode == 0
    vector = proto / "vectors" / f"v{PROTOCOL_VERSION}" / "bye.json"
    edited = vector.read_text().replace("SIGTERM", "SIGKILL")
    vector.write_text(edited)
    refused = regen(root=tmp_path)
    assert refused.returncode == 1
    assert "never rewritten" in refused.stdout
    assert vector.read_text() == edited


def test_vectors_of_an_unreleased_version_are_written(tmp_path):
    proto = copy_of_proto(tmp_path)
    vector = proto / "vectors" / f"v{PROTOCOL_VERSION}" / "bye.json"
    before = vector.read_text()
    vector.unlink()
    assert regen("--check", root=tmp_path).returncode == 1
    assert regen(root=tmp_path).returncode == 0
    assert vector.read_text() == before


def test_the_schema_names_the_fields_that_the_records_have():
    schema = yaml.safe_load((PROTO / "schema.yaml").read_text())
    assert schema["version"] == PROTOCOL_VERSION
    for name, record in schema["records"].items():
        kind = getattr(messages, name)
        assert record.get("tag") == kind.__struct_config__.tag
        fields = msgspec.structs.fields(kind)
        assert list(record["fields"]) == [field.encode_name for field in fields]
        assert [("default" not in text) for text in record["fields"].values()] == [
            field.required for field in fields
        ]


def test_versions():
    assert PROTOCOL_VERSION in SUPPORTED_VERSIONS
    assert SUPPORTED_VERSIONS | set(range(PROTOCOL_VERSION)) >= RELEASED_VERSIONS


def test_the_worked_example_of_the_canonical_order_is_right():
    cell_bytes, lines, offset = {"k": 4, "v": 2}, [], 0
    pages, page_size, first, end = [5, 9], 2, 1, 4
    for position, page in enumerate(pages):
        for layer in (0, 1):
            for part in sorted(cell_bytes):
                for row in range(page_size):
                    if not first <= position * page_size + row < end:
                        continue
                    for head in (0, 1):
                        lines.append(
                            f"| {offset} | {page} | {layer} | {part} | {row} | {head} "
                            f"| {cell_bytes[part]} |\n"
                        )
                        offset += cell_bytes[part]
    spec = (PROTO / "SPEC.md").read_text()
    assert "".join(lines) in spec
    assert f"`Chunk.length_bytes` is {offset}." in spec

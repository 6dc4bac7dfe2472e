"""What the codec refuses, and how it says so."""

from __future__ import annotations

import msgpack
import pytest

from pdxfer.errors import PeerError, RemoteProtocolError, ResourceError
from pdxfer.limits import (
    AUX_BYTES_MAX,
    COMMIT_BYTES_MAX,
    CONTROL_ARRAY_ITEMS_MAX,
    CONTROL_MAP_ITEMS_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    CONTROL_TEXT_BYTES_MAX,
)
from pdxfer.wire.codec import decode, decode_commit, encode, encode_commit
from pdxfer.wire.messages import CommitPayload, Envelope, Hello, Matched, Reject
from pdxfer.wire.version import PROTOCOL_VERSION, check_version

PLAIN = {"source": b"a" * 16, "destination": b"b" * 16, "session": 1, "number": 1, "ack": 0}
COMMIT = {
    "decode_incarnation": b"d" * 16,
    "generation": 1,
    "source_worker": 0,
    "sender_index": 0,
    "length_bytes": 1,
    "runs": 1,
    "digest": b"",
}


def packed(message=None, **changes) -> bytes:
    return msgpack.packb(PLAIN | changes | {"message": message})


def test_a_memoryview_is_as_good_as_bytes():
    assert decode(memoryview(packed())) == Envelope(**PLAIN)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", r"\$"),
        (b"\xc1", r"\$"),
        (b"\x90", r"\$"),
        (b"\x80", "source"),
        (packed() + b"\x80", r"\$"),
        (msgpack.packb({1: 2}), r"\$"),
        (b"\x91" * 4000 + b"\x90", r"\$"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len"),
        (b"\xdb\xff\xff\xff\xff", r"\$"),
        (b"\xc6\xff\xff\xff\xff", r"\$"),
        (b"\xd4\x05\x00", "max_ext_len"),
        (b"\x81\xa1\xff\x00", r"\$"),
        (packed(source=b"short"), r"\$\.source"),
        (packed(source="a" * 16), r"\$\.source"),
        (packed(destination=b"short"), "destination"),
        (packed(destination=b"x" * 17), "destination"),
        (packed(session=0), r"\$\.session"),
        (packed(number=-1), r"\$\.number"),
        (packed(ack=1.0), r"\$\.ack"),
        (packed(ack=True), r"\$\.ack"),
        (packed(5), r"\$\.message"),
        (packed({}), r"\$\.message"),
        (packed({"t": "nothing_we_know"}), r"\$\.message\.t"),
        (packed({"t": 7}), r"\$\.message\.t"),
        (packed({"t": "matched", "generation": 0, "source_worker": 0}), "generation"),
        (packed({"t": "matched", "generation": "1", "source_worker": 0}), "generation"),
        (packed({"t": "abort", "generation": 0, "decode_incarnation": b"x"}), "incarnation"),
        (packed({"t": "drained", "decode_incarnation": b"x" * 15}), "incarnation"),
        (packed({"t": "stale", "incarnation": b""}), r"\$\.message\.incarnation"),
    ],
)
def test_what_is_no_envelope_is_refused_by_field(data, field):
    with pytest.raises(RemoteProtocolError, match=field):
        decode(data)


def test_lengths_are_limited_before_anything_is_built():
    for limit, value in (
        ("max_array_len", [None] * (CONTROL_ARRAY_ITEMS_MAX + 1)),
        ("max_map_len", {str(n): None for n in range(CONTROL_MAP_ITEMS_MAX + 1)}),
        ("max_str_len", "x" * (CONTROL_TEXT_BYTES_MAX + 1)),
    ):
        with pytest.raises(RemoteProtocolError, match=limit):
            decode(packed(later=value))


def test_a_frame_above_the_limit_is_not_even_parsed():
    with pytest.raises(RemoteProtocolError, match=str(CONTROL_MESSAGE_BYTES_MAX)):
        decode(b"\xc1" * (CONTROL_MESSAGE_BYTES_MAX + 1))


def test_a_message_that_the_peer_would_refuse_is_not_made():
    envelope = Envelope(**PLAIN, message=Reject(code="x", text="y" * CONTROL_MESSAGE_BYTES_MAX))
    with pytest.raises(ResourceError, match=r"Reject.*CONTROL_MESSAGE_BYTES_MAX"):
        encode(envelope)


def test_the_largest_unsigned_number_survives():
    message = Matched(generation=2**64 - 1, source_worker=2**64 - 1)
    envelope = Envelope(**PLAIN | {"number": 2**64 - 1}, message=message)
    assert decode(encode(envelope)) == envelope


def test_a_commit_with_too_much_aux_is_refused_on_both_sides():
    largest = CommitPayload(**COMMIT, aux=b"x" * AUX_BYTES_MAX)
    assert decode_commit(encode_commit(largest)) == largest
    with pytest.raises(ResourceError, match="AUX_BYTES_MAX"):
        encode_commit(CommitPayload(**COMMIT, aux=b"x" * (AUX_BYTES_MAX + 1)))
    with pytest.raises(RemoteProtocolError, match="aux"):
        decode_commit(msgpack.packb(COMMIT | {"aux": b"x" * (AUX_BYTES_MAX + 1)}))
    with pytest.raises(RemoteProtocolError, match=str(COMMIT_BYTES_MAX)):
        decode_commit(b"\x00" * (COMMIT_BYTES_MAX + 1))


def test_hello_of_any_later_version_can_be_read():
    later = {"t": "hello", "version": 99, "role": "decode", "new": [1], "lanes": ["later"]}
    hello = decode(packed(later, number=0, even_newer={"a": 1})).message
    assert hello == Hello(version=99, role="decode", lanes=["later"])
    with pytest.raises(PeerError, match=f"speaks {PROTOCOL_VERSION}, the decode agent speaks 99"):
        check_version(hello)
    check_version(Hello(version=PROTOCOL_VERSION, role="decode"))

"""Bytes to messages and back: the only place where control frames are encoded or decoded.

Encoding is `msgspec.msgpack` with `order="deterministic"`: the fields of a record in the order of
its definition, the keys of a plain map sorted, every number in its shortest form, so that one
message has one encoding and golden vectors compare byte for byte. It needs no intermediate maps,
which `to_builtins` and a second encoder would.

Decoding is `msgpack`, which refuses a length above its limit before it allocates (msgspec trusts a
declared array length), then `msgspec.convert`, which gives every field its type. A field that this
version does not know is ignored; a message type that it does not know is an error.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec

from pdxfer.errors import RemoteProtocolError, ResourceError
from pdxfer.limits import (
    AUX_BYTES_MAX,
    COMMIT_BYTES_MAX,
    CONTROL_ARRAY_ITEMS_MAX,
    CONTROL_MAP_ITEMS_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    CONTROL_TEXT_BYTES_MAX,
)
from pdxfer.wire.messages import Abort, CommitPayload, Drained, Envelope

INCARNATION_BYTES: Final = 16
"""Length of an incarnation."""

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_Record = TypeVar("_Record", bound=msgspec.Struct)


def encode(envelope: Envelope) -> bytes:
    """The one encoding of `envelope`.

    Raises:  ResourceError when it is larger than a peer accepts; nothing is sent then.
    """
    data = _ENCODER.encode(envelope)
    if len(data) > CONTROL_MESSAGE_BYTES_MAX:
        raise ResourceError(
            f"control message {type(envelope.message).__name__}: {len(data)} bytes, at most "
            f"{CONTROL_MESSAGE_BYTES_MAX} (CONTROL_MESSAGE_BYTES_MAX); send fewer page ids or "
            "regions in one message"
        )
    return data


def decode(data: bytes | memoryview) -> Envelope:
    """The envelope in `data`, whatever a peer sent.

    Raises:  RemoteProtocolError naming the field, for everything that is not exactly one envelope.
    """
    envelope = unpack(data, Envelope, CONTROL_MESSAGE_BYTES_MAX)
    _check_incarnation(envelope.destination, "destination")
    match envelope.message:
        case Abort(decode_incarnation=incarnation) | Drained(decode_incarnation=incarnation):
            _check_incarnation(incarnation, "message.decode_incarnation")
        case _:
            pass
    return envelope


def encode_commit(payload: CommitPayload) -> bytes:
    """The one encoding of what travels on the lane behind the bytes.

    Raises:  ResourceError when `aux` is larger than `AUX_BYTES_MAX`.
    """
    if len(payload.aux) > AUX_BYTES_MAX:
        raise ResourceError(
            f"aux: {len(payload.aux)} bytes, at most {AUX_BYTES_MAX} (AUX_BYTES_MAX)"
        )
    return _ENCODER.encode(payload)


def decode_commit(data: bytes | memoryview) -> CommitPayload:
    """The commit payload in `data`.

    Raises:  RemoteProtocolError naming the field.
    """
    payload = unpack(data, CommitPayload, COMMIT_BYTES_MAX)
    if len(payload.aux) > AUX_BYTES_MAX:
        raise RemoteProtocolError(
            f"commit field aux: {len(payload.aux)} bytes, at most {AUX_BYTES_MAX}"
        )
    return payload


def unpack(data: bytes | memoryview, kind: type[_Record], bytes_max: int) -> _Record:
    """One msgpack map as a record of `kind`, limits first.

    Raises:  RemoteProtocolError naming the record and, where one is wrong, the field.
    """
    name = kind.__name__
    if len(data) > bytes_max:
        raise RemoteProtocolError(f"{name}: {len(data)} bytes, at most {bytes_max}")
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_bin_len=bytes_max,
            max_str_len=CONTROL_TEXT_BYTES_MAX,
            max_array_len=CONTROL_ARRAY_ITEMS_MAX,
            max_map_len=CONTROL_MAP_ITEMS_MAX,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise RemoteProtocolError(f"{name}: field $ is not valid msgpack: {reason}") from error
    try:
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"{name}: {_with_field(str(error))}") from error


def _with_field(text: str) -> str:
    """The validator's text with the field's path named (`$` is the whole record)."""
    what, found, path = text.rpartition(" - at ")
    return f"field {path.strip('`')}: {what}" if found else f"field $: {text}"


def _check_incarnation(value: bytes, field: str) -> None:
    if len(value) not in (0, INCARNATION_BYTES):
        raise RemoteProtocolError(
            f"Envelope: field $.{field}: {len(value)} bytes, expected 0 or {INCARNATION_BYTES}"
        )

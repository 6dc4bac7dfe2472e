"""Every envelope survives the codec; no bytes can do more than raise `RemoteProtocolError`."""

from __future__ import annotations

import contextlib
import functools

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as types

from pdxfer.errors import RemoteProtocolError
from pdxfer.wire.codec import decode, decode_commit, encode, encode_commit
from pdxfer.wire.messages import CommitPayload, Envelope
from pdxfer.wire.pages import ENCODINGS, pack_ids, unpack_ids

COMMON = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@functools.cache
def values(kind: type) -> st.SearchStrategy:
    return _values(types.type_info(kind))


def _values(kind: types.Type) -> st.SearchStrategy:
    match kind:
        case types.IntType(ge=low):
            return st.integers(-(2**63) if low is None else low, 2**64 - 1)
        case types.BytesType(min_length=low, max_length=high):
            if (low, high) == (None, 16):
                return st.sampled_from((b"", b"i" * 16))
            return st.binary(min_size=low or 0, max_size=high or 40)
        case types.StrType():
            return st.text(max_size=12)
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.AnyType() | types.CustomType():
            return PLAIN
        case types.ListType(item_type=item):
            return st.lists(_values(item), max_size=3)
        case types.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case types.UnionType(types=choices):
            return st.one_of([_values(choice) for choice in choices])
        case types.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
    raise AssertionError(kind)


@COMMON
@given(values(Envelope))
def test_decode_is_the_inverse_of_encode(envelope):
    data = encode(envelope)
    found = decode(data)
    assert found == envelope
    assert encode(found) == data


@COMMON
@given(values(CommitPayload))
def test_a_commit_survives(payload):
    assert decode_commit(encode_commit(payload)) == payload


@COMMON
@given(st.binary(max_size=300))
def test_any_bytes_only_raise_remote_protocol_error(data):
    for decoder in (decode, decode_commit):
        with contextlib.suppress(RemoteProtocolError):
            decoder(data)


@COMMON
@given(values(Envelope), st.data())
def test_a_damaged_frame_is_an_envelope_or_an_error(envelope, data):
    frame = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        found = decode(bytes(frame))
        assert decode(encode(found)) == found


@COMMON
@given(PLAIN)
def test_any_msgpack_is_an_envelope_or_an_error(plain):
    with contextlib.suppress(RemoteProtocolError):
        decode(msgspec.msgpack.encode(plain))


RUNS = st.lists(st.tuples(st.integers(0, 2**63 - 40), st.integers(1, 30)), max_size=8)


@COMMON
@given(RUNS, st.lists(st.integers(0, 2**63 - 1), max_size=20))
def test_ids_survive_and_cost_no_more_than_plain_ones(runs, single):
    ids = [first + step for first, count in runs for step in range(count)] + single
    array = np.array(ids, dtype=np.int64)
    encoding, data = pack_ids(array)
    assert unpack_ids(encoding, data).tolist() == ids
    width = 4 if max(ids, default=0) < 2**31 else 8
    assert len(data) <= width * len(ids)
    assert encoding[1] == str(width)


@COMMON
@given(st.sampled_from(ENCODINGS), st.binary(max_size=200))
def test_any_bytes_are_ids_of_the_layout_range_or_an_error(encoding, data):
    with contextlib.suppress(RemoteProtocolError):
        found = unpack_ids(encoding, data)
        assert (found >= 0).all()
        assert unpack_ids(*pack_ids(found)).tolist() == found.tolist()

"""Page ids: the shortest encoding, exact both ways, refused before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from pdxfer.errors import ConfigError, RemoteProtocolError, ResourceError
from pdxfer.limits import PAGES_PER_MESSAGE_MAX
from pdxfer.wire.codec import encode
from pdxfer.wire.messages import (
    Chunk,
    Committed,
    Envelope,
    GroupPages,
    Matched,
    Place,
    Receive,
    TokenRange,
)
from pdxfer.wire.pages import pack_ids, unpack_ids


@pytest.mark.parametrize(
    ("ids", "encoding", "data"),
    [
        ([], "i4", b""),
        ([7], "i4", struct.pack("<i", 7)),
        ([7, 8], "i4", struct.pack("<ii", 7, 8)),
        ([7, 8, 9], "r4", struct.pack("<ii", 7, 3)),
        ([9, 8, 7], "i4", struct.pack("<iii", 9, 8, 7)),
        ([1, 2, 3, 4, 9, 10], "r4", struct.pack("<iiii", 1, 4, 9, 2)),
        ([1, 2, 3, 9], "i4", struct.pack("<iiii", 1, 2, 3, 9)),
        ([2**31 - 1], "i4", struct.pack("<i", 2**31 - 1)),
        ([2**31], "i8", struct.pack("<q", 2**31)),
        ([2**62, 2**62 + 1, 2**62 + 2], "r8", struct.pack("<qq", 2**62, 3)),
        ([2**63 - 1, 0], "i8", struct.pack("<qq", 2**63 - 1, 0)),
        ([5, 5, 5], "i4", struct.pack("<iii", 5, 5, 5)),
    ],
)
def test_the_shortest_encoding_is_taken(ids, encoding, data):
    array = np.array(ids, dtype=np.int64)
    assert pack_ids(array) == (encoding, data)
    found = unpack_ids(encoding, data)
    assert found.dtype == np.int64
    assert found.tolist() == ids


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64, np.int64])
def test_any_integer_type_is_packed(dtype):
    assert pack_ids(np.array([3, 1], dtype=dtype)) == ("i4", struct.pack("<ii", 3, 1))


def test_a_strided_array_is_packed():
    assert pack_ids(np.arange(10)[::2]) == ("i4", struct.pack("<5i", 0, 2, 4, 6, 8))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (np.array([4, -1]), "-1 at position 1"),
        (np.array([2**63], dtype=np.uint64), "9223372036854775808 at position 0"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.zeros((2, 2), dtype=np.int64), "2-d"),
    ],
)
def test_ids_that_are_none_are_not_packed(ids, text):
    with pytest.raises(ConfigError, match=text):
        pack_ids(ids)


def test_more_ids_than_a_message_holds_are_not_packed():
    assert pack_ids(np.arange(PAGES_PER_MESSAGE_MAX))[0] == "r4"
    with pytest.raises(ResourceError, match="PAGES_PER_MESSAGE_MAX"):
        pack_ids(np.arange(PAGES_PER_MESSAGE_MAX + 1))


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        ("i2", b"", "encoding: 'i2'"),
        ("", b"", "encoding"),
        ("r4x", b"", "encoding"),
        ("i4", b"\x00" * 3, "3 bytes"),
        ("r4", b"\x00" * 4, "4 bytes"),
        ("r8", b"\x00" * 8, "8 bytes"),
        ("i4", struct.pack("<ii", 1, -5), "page id -5 at 1"),
        ("i8", struct.pack("<q", -(2**63)), "page id -9223372036854775808 at 0"),
        ("r4", struct.pack("<ii", -1, 1), "first=-1"),
        ("r4", struct.pack("<ii", 1, 0), "count=0"),
        ("r4", struct.pack("<ii", 1, -1), "count=-1"),
        ("r4", struct.pack("<ii", 2**31 - 1, 2), "first=2147483647"),
        ("r8", struct.pack("<qq", 2**63 - 1, 2), "first=9223372036854775807"),
        ("r8", struct.pack("<qq", 0, 2**63 - 1), "count=9223372036854775807"),
        ("r8", struct.pack("<qq", 0, -(2**63)), "count=-9223372036854775808"),
        ("r8", struct.pack("<qq", -(2**63), 1), "first=-9223372036854775808"),
        ("r4", struct.pack("<iiii", 0, PAGES_PER_MESSAGE_MAX, 0, 1), "page ids, at most"),
        ("i4", b"\x00" * 4 * (PAGES_PER_MESSAGE_MAX + 1), "at most"),
        ("r8", b"\x00" * 16 * (PAGES_PER_MESSAGE_MAX + 1), "at most"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(encoding, data, text):
    with pytest.raises(RemoteProtocolError, match=text):
        unpack_ids(encoding, data)


def test_the_last_ids_of_each_width_are_accepted():
    assert unpack_ids("r4", struct.pack("<ii", 2**31 - 2, 2)).tolist() == [2**31 - 2, 2**31 - 1]
    assert unpack_ids("r8", struct.pack("<qq", 2**63 - 2, 2)).tolist() == [2**63 - 2, 2**63 - 1]


def test_counts_that_lie_allocate_nothing():
    data = struct.pack("<ii", 0, PAGES_PER_MESSAGE_MAX) * 1000
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack_ids("r4", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(("high", "bytes_per_page"), [(2**31, 4), (2**62, 8)])
@pytest.mark.parametrize("chunks", [1, 8])
def test_a_transfer_of_15000_random_pages_costs_its_ids_and_little_more(
    high, bytes_per_page, chunks
):
    ids = np.random.default_rng(3).integers(1, high, 15_000)
    encoding, data = pack_ids(ids)
    generation, tokens = 2**40, 15_000 * 16
    place = Place(
        generation=generation,
        source_worker=0,
        tokens=tokens,
        groups={"full": GroupPages(first_token=0, encoding=encoding, ids=data)},
    )
    receive = Receive(
        room=2**63,
        generation=generation,
        source_worker=0,
        destination_worker=0,
        receiver_index=0,
        receiver_count=1,
    )
    step = tokens // chunks
    announced = [
        Chunk(
            generation=generation,
            source_worker=0,
            number=number,
            ranges={"full": TokenRange(first=number * step, end=(number + 1) * step)},
            length_bytes=2**40,
            last=number == chunks - 1,
        )
        for number in range(chunks)
    ]
    matched = Matched(generation=generation, source_worker=0)
    sent = [receive, place, matched, *announced, Committed(generation=generation), None, None]
    cost = sum(
        len(
            encode(
                Envelope(
                    source=b"a" * 16,
                    destination=b"b" * 16,
                    session=2**32,
                    number=0 if message is None else 2**40,
                    ack=2**40,
                    message=message,
                )
            )
        )
        for message in sent
    )
    assert cost <= bytes_per_page * len(ids) + 4096

"""Local frames: however they are cut they come back whole; junk raises one kind of error."""

import contextlib
import os
import socket

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.errors import RemoteProtocolError
from pdxfer.local.connection import HEADER, Inbox, Outbox, encode
from pdxfer.local.messages import ChunkTerms, FromWorker, ReleaseSlot, SendChunk
from pdxfer.wire.messages import GroupPages

MESSAGES = st.one_of(
    st.builds(
        ReleaseSlot,
        transfer=st.integers(-(2**63), 2**64 - 1),
        sequence=st.integers(0, 2**56 - 1),
    ),
    st.builds(
        SendChunk,
        transfer=st.integers(0, 4095),
        sequence=st.integers(0, 2**56 - 1),
        chunk=st.builds(
            ChunkTerms,
            groups=st.dictionaries(
                st.text(max_size=5),
                st.builds(
                    GroupPages,
                    first_token=st.integers(0, 2**31),
                    encoding=st.sampled_from(["i4", "r8"]),
                    ids=st.binary(max_size=2000),
                ),
                max_size=3,
            ),
            tokens=st.none() | st.integers(0, 2**40),
            layers=st.none() | st.lists(st.integers(0, 100), max_size=4),
            last=st.booleans(),
            aux=st.binary(max_size=50),
        ),
    ),
)
FRAMES = st.lists(st.tuples(MESSAGES, st.integers(0, 3)), min_size=1, max_size=8)


class Ends:
    """A socket pair and a pipe to take descriptors from; counts what is left open."""

    def __enter__(self):
        self.left, self.right = socket.socketpair()
        self.left.setblocking(False)
        self.right.setblocking(False)
        self.pipe = os.pipe()
        self.inbox = Inbox(FromWorker)
        self.open_fds = len(os.listdir("/proc/self/fd"))
        return self

    def __exit__(self, *exc_info):
        self.inbox.close()
        left_open = len(os.listdir("/proc/self/fd")) - self.open_fds
        for fd in self.pipe:
            os.close(fd)
        self.left.close()
        self.right.close()
        assert left_open == 0


def read_all(ends):
    got = []
    while ends.inbox.receive(ends.right):
        while (item := ends.inbox.next()) is not None:
            message, fds = item
            got.append((message, len(fds)))
            for fd in fds:
                os.close(fd)
    return got


@settings(max_examples=100, deadline=None)
@given(FRAMES, st.integers(4096, 20_000))
def test_messages_and_descriptors_survive_any_socket_buffer(frames, buffer_bytes):
    with Ends() as ends:
        ends.left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        outbox = Outbox()
        for message, count in frames:
            outbox.append(encode(message, count), [ends.pipe[0]] * count)
        got = []
        while not outbox.flush(ends.left):
            got += read_all(ends)
        got += read_all(ends)
        assert got == frames


@settings(max_examples=100, deadline=None)
@given(FRAMES, st.data())
def test_messages_survive_any_cut(frames, data):
    stream = b"".join(encode(message) for message, _ in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    with Ends() as ends:
        got = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            ends.left.sendall(stream[start:end])
            got += read_all(ends)
        assert got == [(message, 0) for message, _ in frames]


JUNK = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.binary(max_size=100).map(lambda body: HEADER.pack(len(body), 0) + body),
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
    )
    .map(msgspec.msgpack.encode)
    .map(lambda body: HEADER.pack(len(body), 0) + body),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(JUNK, st.integers(0, 2)), min_size=1, max_size=4))
def test_junk_raises_one_error_and_leaks_no_descriptor(pieces):
    with Ends() as ends:
        for data, count in pieces:
            socket.send_fds(ends.left, [data], [ends.pipe[0]] * count)
        with contextlib.suppress(RemoteProtocolError):
            read_all(ends)

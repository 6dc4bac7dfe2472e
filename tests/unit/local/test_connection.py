"""Frames and descriptors over a socket pair."""

import os
import socket

import msgspec
import pytest

from pdxfer import _core, limits
from pdxfer.errors import RemoteProtocolError, ResourceError
from pdxfer.local.connection import HEADER, Inbox, Outbox, encode
from pdxfer.local.messages import (
    AbortTransfer,
    ChunkTerms,
    FromWorker,
    ReleaseSlot,
    SendChunk,
    WorkerHello,
)
from pdxfer.wire.messages import GroupPages


class Pair:
    """Two ends: what goes into `outbox` comes out of `inbox`."""

    def __init__(self):
        self.left, self.right = socket.socketpair()
        self.left.setblocking(False)
        self.right.setblocking(False)
        self.inbox = Inbox(FromWorker)
        self.outbox = Outbox()

    def push(self, data, fds=()):
        """Raw bytes, as a peer of bad manners sends them."""
        if fds:
            socket.send_fds(self.left, [data], list(fds))
        else:
            self.left.sendall(data)

    def pull(self):
        """All whole messages that are there."""
        got = []
        while self.inbox.receive(self.right):
            while (item := self.inbox.next()) is not None:
                got.append(item)
        return got

    def close(self):
        self.inbox.close()
        self.outbox.close()
        self.left.close()
        self.right.close()


@pytest.fixture
def pair():
    both = Pair()
    yield both
    both.close()


@pytest.fixture
def pipes():
    """Read ends to pass on; every descriptor of this test must be closed at its end."""
    made = []

    def make(count):
        ends = [os.pipe() for _ in range(count)]
        made.extend(fd for end in ends for fd in end)
        return [reader for reader, _ in ends]

    yield make
    for fd in made:
        os.close(fd)


def release(number):
    return ReleaseSlot(transfer=number, sequence=1)


def same(left, right):
    one, two = os.fstat(left), os.fstat(right)
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def close_all(fds):
    for fd in fds:
        os.close(fd)


def test_a_message_crosses(pair):
    pair.outbox.append(encode(WorkerHello(request=3, version="1", role="decode", pid=4)))
    assert pair.outbox.flush(pair.left)
    assert pair.pull() == [(WorkerHello(request=3, version="1", role="decode", pid=4), [])]


def test_one_byte_at_a_time(pair):
    frame = encode(release(1)) + encode(release(2))
    got = []
    for byte in frame:
        pair.push(bytes([byte]))
        got += pair.pull()
    assert [message.transfer for message, _ in got] == [1, 2]


def test_descriptors_stay_with_their_message(pair, pipes):
    fds = pipes(5)
    pair.outbox.append(encode(release(0)))
    pair.outbox.append(encode(release(1), 2), fds[:2])
    pair.outbox.append(encode(release(2)))
    pair.outbox.append(encode(release(3)))
    pair.outbox.append(encode(release(4), 3), fds[2:])
    pair.outbox.append(encode(release(5)))
    assert pair.outbox.flush(pair.left)
    got = pair.pull()
    assert [(message.transfer, len(mine)) for message, mine in got] == [
        (0, 0), (1, 2), (2, 0), (3, 0), (4, 3), (5, 0),
    ]  # fmt: skip
    received = [fd for _, mine in got for fd in mine]
    assert all(same(one, two) for one, two in zip(fds, received, strict=True))
    assert not any(os.get_inheritable(fd) for fd in received)
    close_all(received)


def test_the_sender_may_close_at_once(pair):
    reader, writer = os.pipe()
    pair.outbox.append(encode(release(1), 1), [reader])
    os.close(reader)
    assert pair.outbox.flush(pair.left)
    [(_, [received])] = pair.pull()
    os.write(writer, b"x")
    assert os.read(received, 1) == b"x"
    close_all([received, writer])


def test_large_frames_with_descriptors_through_a_small_buffer(pair, pipes):
    """Partial writes: descriptors go once, with the first byte, and later frames keep theirs."""
    fds = pipes(3)
    pair.left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sent = []
    for number in range(3):
        pages = GroupPages(first_token=number, encoding="i4", ids=bytes([number]) * 300_000)
        chunk = ChunkTerms(groups={"full": pages}, tokens=None, layers=None, last=False, aux=b"")
        message = SendChunk(transfer=number, sequence=1, chunk=chunk)
        sent.append(message)
        pair.outbox.append(encode(message, 1), [fds[number]])
    assert not pair.outbox.flush(pair.left)
    assert pair.outbox.queued_bytes > 0
    got = []
    while len(got) < 3:
        pair.outbox.flush(pair.left)
        got += pair.pull()
    assert pair.outbox.queued_bytes == 0
    assert [message for message, _ in got] == sent
    received = [fd for _, mine in got for fd in mine]
    assert all(same(one, two) for one, two in zip(fds, received, strict=True))
    close_all(received)


def test_many_small_frames_are_one_write(pair, monkeypatch):
    writes = []
    send_now = _core.send_now

    def counting(*args):
        writes.append(args)
        return send_now(*args)

    monkeypatch.setattr(_core, "send_now", counting)
    for number in range(20):
        pair.outbox.append(encode(release(number)))
    assert pair.outbox.flush(pair.left)
    assert len(writes) == 1
    assert [message.transfer for message, _ in pair.pull()] == list(range(20))


def test_end_of_stream(pair):
    pair.push(encode(release(1))[:-1])
    pair.left.close()
    assert pair.inbox.receive(pair.right)
    assert pair.inbox.next() is None
    with pytest.raises(EOFError):
        pair.inbox.receive(pair.right)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (HEADER.pack(limits.LOCAL_MESSAGE_BYTES_MAX + 1, 0), "bytes"),
        (HEADER.pack(1 << 31, 0), "bytes"),
        (HEADER.pack(1, limits.LOCAL_FDS_MAX + 1), "descriptors"),
        (HEADER.pack(1, 1) + b"\xc0", "1 descriptors, 0 came"),
        (HEADER.pack(9, 1), "1 descriptors, 0 came"),
        (HEADER.pack(1, 0) + b"\xc1", "decode"),
        (HEADER.pack(0, 0), "decode"),
        (HEADER.pack(1, 0) + b"\x80", "decode"),
    ],
)
def test_what_is_no_frame_is_refused(pair, data, text):
    pair.push(data)
    with pytest.raises(RemoteProtocolError, match=text):
        pair.pull()


@pytest.mark.parametrize(
    "value",
    [
        {"t": "nothing"},
        {"t": "attached", "worker_id": 1},
        {"t": "release", "transfer": "1", "sequence": 1},
        {"t": "release", "transfer": 1},
        {"t": "attach", "instance": "", "rank": 1},
        [1, 2],
        None,
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(pair, value):
    body = msgspec.msgpack.encode(value)
    pair.push(HEADER.pack(len(body), 0) + body)
    with pytest.raises(RemoteProtocolError, match="decode"):
        pair.pull()


def test_deep_nesting_is_refused(pair):
    body = b"\x91" * 100_000 + b"\xc0"
    pair.push(HEADER.pack(len(body), 0) + body)
    with pytest.raises(RemoteProtocolError, match="decode"):
        pair.pull()


def test_descriptors_of_a_refused_frame_are_closed(pair, pipes):
    fds = pipes(2)
    before = len(os.listdir("/proc/self/fd"))
    pair.push(HEADER.pack(1, 0) + b"\xc0", fds)
    with pytest.raises(RemoteProtocolError):
        pair.pull()
    pair.inbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_without_a_frame_are_refused(pair, pipes):
    pair.push(encode(release(1)), pipes(1))
    assert pair.inbox.receive(pair.right)
    assert pair.inbox.next() == (release(1), [])
    with pytest.raises(RemoteProtocolError, match="without a frame"):
        pair.inbox.next()


def test_more_descriptors_than_fit_are_refused(pair, pipes):
    fds = pipes(limits.LOCAL_FDS_MAX + 1)
    before = len(os.listdir("/proc/self/fd"))
    pair.push(encode(release(1), 1), fds)
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        pair.pull()
    pair.inbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_large_to_send_is_refused(pair):
    with pytest.raises(ResourceError, match="AbortTransfer"):
        encode(AbortTransfer(transfer=0, sequence=0, reason="x" * limits.LOCAL_MESSAGE_BYTES_MAX))
    with pytest.raises(ResourceError, match="65 descriptors"):
        encode(release(1), 65)


def test_dropping_a_queue_closes_its_duplicates(pair, pipes):
    fds = pipes(3)
    before = len(os.listdir("/proc/self/fd"))
    pair.outbox.append(encode(release(1), 3), fds)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    pair.outbox.close()
    pair.outbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bad_descriptor_leaves_nothing_queued(pair, pipes):
    fds = pipes(1)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair.outbox.append(encode(release(1), 2), [fds[0], 1 << 20])
    assert len(os.listdir("/proc/self/fd")) == before
    assert pair.outbox.queued_bytes == 0

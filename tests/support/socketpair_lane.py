"""A made-up lane whose receiver places the bytes: one socket pair a path, all ends in one process.

It is here to show what a lane takes: this file and a row in `pdxfer.fabric.lanes.LANES`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
from collections import deque

import msgpack
import numpy as np

from pdxfer.errors import LocalProtocolError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    Capabilities,
    CommitArrived,
    CommitSent,
    GenerationClosed,
    LocalRegion,
    PathClosed,
    PathOpened,
    PlacingFailed,
    Scope,
    SenderLost,
    Tickets,
)
from pdxfer.fabric.lanes import Lane, Reach
from pdxfer.layout.request import spans_of

CAPABILITIES = Capabilities(
    places_at_receiver=True, revoke_scope=Scope.GENERATION, needs_pidfd=False
)
RECEIVERS = {}
"""Address of a receive side to (fabric, sender)."""


def bytes_at(address, length):
    return np.frombuffer((ctypes.c_char * length).from_address(address), dtype=np.uint8)


class End:
    """One end of a socket pair: frames of msgpack, each behind its length."""

    def __init__(self, sock):
        sock.setblocking(False)
        self.sock = sock
        self.out = deque()
        self.begun = False
        self.inbox = bytearray()
        self.ended = False

    def flush(self):
        while self.out:
            frame = self.out[0][1]
            try:
                sent = self.sock.send(frame)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            self.begun = sent < len(frame)
            if not self.begun:
                self.out.popleft()
            else:
                self.out[0] = (self.out[0][0], frame[sent:])

    def send(self, owner, record):
        body = msgpack.packb(record)
        self.out.append((owner, len(body).to_bytes(8, "little") + body))
        self.flush()

    def receive(self):
        while not self.ended:
            try:
                data = self.sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self.inbox += data
        while len(self.inbox) >= 8:
            length = int.from_bytes(self.inbox[:8], "little")
            if len(self.inbox) < 8 + length:
                return
            body = bytes(self.inbox[8 : 8 + length])
            del self.inbox[: 8 + length]
            yield msgpack.unpackb(body, strict_map_key=False)


class SocketpairPath:
    """The sending end. A ticket ends when the receiver says that it has placed its bytes."""

    def __init__(self, fabric, peer, sock):
        self.fabric, self.peer = fabric, peer
        self.end = End(sock)
        self.tickets = {}
        """Ticket to (generation, bytes, runs, is a commit)."""
        self.failed = {}
        self.cancelling = set()
        self.closed = False

    def post(self, write):
        self._check_open()
        chunk = write.chunk
        pieces = chunk.source_pieces()
        gathered = []
        for region, offset, length in pieces.tolist():
            part = write.source[region] if 0 <= region < len(write.source) else None
            if part is None or offset < 0 or offset + length > part.length_bytes:
                raise LocalProtocolError(f"a piece leaves source region {region}")
            gathered.append(bytes_at(part.address + offset, length))
        data = np.concatenate(gathered).tobytes()
        ticket = self._ticket(write.generation, len(data), len(pieces), False)
        layers = None if chunk.layers is None else list(chunk.layers)
        ranges = {name: spans_of(moved) for name, moved in chunk.exact_ranges.items()}
        head = [ticket, write.generation, write.source_worker, ranges, layers, chunk.first_byte]
        self.end.send(ticket, ["bytes", *head, data])
        return Tickets((ticket,), len(data), len(pieces))

    def commit(self, generation, payload):
        self._check_open()
        ticket = self._ticket(generation, 0, 0, True)
        if generation in self.failed:
            self._finish(ticket, self.failed[generation])
        else:
            self.end.send(ticket, ["commit", ticket, payload])
        return ticket

    def cancel(self, generation):
        self._check_open()
        first = self.end.out[0] if self.end.out and self.end.begun else None
        kept, dropped = deque(), []
        for item in self.end.out:
            owned = self.tickets.get(item[0], (None,))[0] == generation
            (dropped if owned and item is not first else kept).append(item)
        self.end.out = kept
        for owner, _ in dropped:
            self._finish(owner, "cancelled")
        self.cancelling.add(generation)
        self._settle(generation)

    def close(self):
        self.fail("")

    def fail(self, reason):
        if self.closed:
            return
        self.closed = True
        unplaced = any(not entry[3] for entry in self.tickets.values())
        self.end.sock.close()
        for ticket in list(self.tickets):
            self._finish(ticket, reason or "the path was closed")
        self.fabric.paths.remove(self)
        self.fabric.tell(PathClosed(self.peer, reason, drained=not unplaced))

    def step(self):
        self.end.flush()
        for ticket, error in self.end.receive():
            self._finish(ticket, error)
        if self.end.ended:
            self.fail("the receiver is gone")

    def _ticket(self, *entry):
        self.fabric.tickets += 1
        self.tickets[self.fabric.tickets] = entry
        return self.fabric.tickets

    def _finish(self, ticket, error):
        generation, length, runs, is_commit = self.tickets.pop(ticket)
        if error:
            self.failed.setdefault(generation, error)
        if is_commit:
            self.fabric.tell(CommitSent(self.peer, generation, ticket, error))
        else:
            placed = 0 if error else length
            self.fabric.tell(BatchEnded(self.peer, generation, ticket, placed, runs, error))
        self._settle(generation)

    def _settle(self, generation):
        busy = any(entry[0] == generation for entry in self.tickets.values())
        if generation in self.cancelling and not busy and not self.closed:
            self.cancelling.discard(generation)
            self.fabric.tell(Cancelled(self.peer, generation))

    def _check_open(self):
        if self.closed:
            raise LocalProtocolError("the path is closed")


class SocketpairFabric:
    """One agent's end of the lane."""

    lane = "socketpair"
    version = ""
    capabilities = CAPABILITIES

    def __init__(self):
        self.paths = []
        self.receivers = {}
        """Sender to the address of its receive side."""
        self.incoming = {}
        """Sender to the receiving end of its path."""
        self.generations = {}
        self.tickets = 0
        self.regions = {}
        self.events = []
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poll = select.epoll()
        self.poll.register(self.eventfd, select.EPOLLIN)

    def fileno(self):
        return self.poll.fileno()

    def tell(self, event):
        self.events.append(event)
        os.eventfd_write(self.eventfd, 1)

    def take_events(self):
        if self.eventfd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.eventfd)
            for path in list(self.paths):
                path.step()
            for sender in list(self.incoming):
                self._receive(sender)
        events, self.events = self.events, []
        return events

    def register(self, address, length_bytes, owner):
        region = LocalRegion(len(self.regions) + 1, address, length_bytes, b"")
        self.regions[region.region_id] = owner
        return region

    def deregister(self, region):
        self.regions[region.region_id] = None

    # prefill
    def send_address(self):
        return b"none"

    def connect(self, peer, address, timeout_s):
        found = RECEIVERS.pop(address, None)
        ours, theirs = socket.socketpair()
        path = SocketpairPath(self, peer, ours)
        if found is None:
            path.closed = True
            ours.close()
            theirs.close()
            self.tell(PathOpened(peer, "", "nobody is there"))
            return path
        receiver, sender = found
        receiver.incoming[sender] = End(theirs)
        receiver.poll.register(theirs, select.EPOLLIN)
        self.paths.append(path)
        self.poll.register(ours, select.EPOLLIN)
        self.tell(PathOpened(peer, "socketpair"))
        return path

    # decode
    def open_receiver(self, peer):
        address = self.receivers[peer] = os.urandom(8)
        RECEIVERS[address] = (self, peer)
        return address

    def watch_sender(self, peer, address):
        """The end of the socket pair is watched anyway."""

    def open_generation(self, peer, generation, destination):
        self.generations[peer, generation, destination.source_worker] = destination

    def close_generation(self, peer, generation):
        for key in [key for key in self.generations if key[:2] == (peer, generation)]:
            del self.generations[key]
        self.tell(GenerationClosed(peer, generation))

    def close_receiver(self, peer):
        RECEIVERS.pop(self.receivers.pop(peer, None), None)
        end = self.incoming.pop(peer, None)
        if end is not None:
            end.sock.close()
        for key in [key for key in self.generations if key[0] == peer]:
            del self.generations[key]

    def close(self, deadline_s):
        for path in list(self.paths):
            path.fail("the fabric was closed")
        for peer in list(self.receivers):
            self.close_receiver(peer)
        if self.eventfd >= 0:
            self.poll.close()
            os.close(self.eventfd)
            self.eventfd = -1

    def _receive(self, sender):
        end = self.incoming[sender]
        for kind, ticket, *rest in end.receive():
            error = ""
            if kind == "commit":
                self.tell(CommitArrived(sender, rest[0]))
            else:
                error = self._place(sender, *rest)
            end.send(ticket, [ticket, error])
        end.flush()
        if end.ended and self.incoming.pop(sender, None) is not None:
            self.receivers.pop(sender, None)
            end.sock.close()
            self.tell(SenderLost(sender, "the path has ended"))

    def _place(self, sender, generation, worker, ranges, layers, first_byte, data):
        """Scatter one interval by our own plan; what is wrong with it, in words."""
        destination = self.generations.get((sender, generation, worker))
        if destination is None:
            return "the generation is closed"
        spans = {name: [tuple(span) for span in moved] for name, moved in ranges.items()}
        pieces = destination.plan.destination_pieces(destination.pages, spans, layers)
        ends = np.cumsum(pieces[:, 2])
        if not len(ends) or first_byte + len(data) > ends[-1]:
            return self._refuse(sender, generation, "more bytes than planned")
        todo, at = [], 0
        for (region, offset, length), end in zip(pieces.tolist(), ends.tolist(), strict=True):
            begin = end - length
            skip = max(first_byte, begin) - begin
            take = min(first_byte + len(data), end) - begin - skip
            if take > 0:
                part = destination.regions[region]
                if offset + length > part.length_bytes:
                    return self._refuse(sender, generation, f"it leaves region {region}")
                todo.append((part.address + offset + skip, at, take))
                at += take
        for address, begin, length in todo:
            ctypes.memmove(address, data[begin : begin + length], length)
        return ""

    def _refuse(self, sender, generation, why):
        self.close_generation(sender, generation)
        self.tell(PlacingFailed(sender, generation, why))
        return why


def make(lane, settings):
    return SocketpairFabric()


ROW = Lane(
    name="socketpair",
    board_code=200,
    reach=Reach.PROCESS,
    library="",
    capabilities=CAPABILITIES,
    factory="tests.support.socketpair_lane:make",
    purpose="a made-up lane of the tests",
)

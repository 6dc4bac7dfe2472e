"""An agent that does what a test tells it: the real local server, no lanes and peers behind it."""

import asyncio
import queue
import threading
import typing

import pdxfer
from pdxfer.errors import PdxferError
from pdxfer.local.board import BoardWriter
from pdxfer.local.messages import (
    AbortTransfer,
    AgentHello,
    Attached,
    AttachWorker,
    ConnectPeer,
    FromWorker,
    OpenReceive,
    OpenSend,
    Outcome,
    Refused,
    ReleaseSlot,
    Together,
    WorkerHello,
)
from pdxfer.local.server import LocalServer
from pdxfer.memory import map_sealed
from pdxfer.protocol.state import State

INCARNATION = b"fake agent life "
WAIT_S = 20


class FakeAgent:
    """Answers hello, attach and opens by itself; `on[Type] = f(conn, message)` replaces an answer.

    Its server runs on a thread; every method may be called from the test's thread.
    """

    def __init__(self, socket_path, role, *, slots=8, version=pdxfer.__version__):
        self.socket_path = str(socket_path)
        self.role = role
        self.slots = slots
        self.version = version
        self.on = {}
        self.boards = {}
        """By connection."""
        self.memory = []
        """What workers handed over, mapped; or `MemoryInfo` of kind address."""
        self.rooms = {}
        """Room to (connection, slot, sequence)."""
        # All of them now: made on demand, two threads could each make one for the same kind.
        self._received = {kind: queue.Queue() for kind in typing.get_args(FromWorker)}
        self._closed = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake agent")
        self._server = LocalServer(self.socket_path, self)

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(WAIT_S)
        return self

    def __exit__(self, *exc_info):
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        for mapped in self.memory:
            if hasattr(mapped, "close"):
                mapped.close()

    def _run(self):
        self._loop.run_forever()

    # -- what a test calls ---------------------------------------------------------------------
    def run(self, function, *args):
        """Call on the agent's thread, and wait for it."""

        async def call():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(WAIT_S)

    def next(self, kind):
        """The next message of a type, waiting for it."""
        return self._received[kind].get(timeout=WAIT_S)

    def count(self, kind):
        """Messages of a type not yet taken; true of all that were sent before the last answer."""
        return self._received[kind].qsize()

    def closed(self):
        """Why the next connection ended, waiting for it."""
        return self._closed.get(timeout=WAIT_S)

    def show(self, room, state, *, outcome=True, publish=True, error=None, **fields):
        """Move a room: its outcome first, then the board's word."""

        def act():
            conn, slot, sequence = self.rooms[room]
            if outcome:
                refused = None if error is None else Refused(**error.to_wire())
                conn.send(
                    Outcome(transfer=slot, sequence=sequence, state=state, error=refused, **fields)
                )
            if publish:
                self.boards[conn].publish(slot, State(state))

        self.run(act)

    def board(self):
        """Of the only worker."""
        [board] = self.boards.values()
        return board

    def die(self):
        """Close every connection, as the kernel does for a killed daemon."""
        self.run(self._server.close)

    # -- handler -------------------------------------------------------------------------------
    def on_connected(self, conn):
        pass

    def on_message(self, conn, message, fds):
        if isinstance(message, Together):
            self._received[Together].put(message)
            for each in message.messages:
                self._on_one(conn, each, fds)
        else:
            self._on_one(conn, message, fds)

    def _on_one(self, conn, message, fds):
        self._received[type(message)].put(message)
        act = self.on.get(type(message), getattr(self, f"_on_{type(message).__name__}", None))
        try:
            if isinstance(message, AttachWorker):
                self._map(message, fds)
            if act is not None:
                act(conn, message)
        except PdxferError as error:
            self.refuse(conn, message, error)

    def on_closed(self, conn, reason):
        board = self.boards.pop(conn, None)
        if board is not None:
            board.close()
        self._closed.put(reason)

    def _map(self, message, fds):
        for part in message.memory:
            if part.kind == "address":
                self.memory.append(part)
            else:
                end = part.offset_bytes + part.length_bytes
                self.memory.append(map_sealed(fds[part.fd_index], end))

    def _on_WorkerHello(self, conn, message):
        board = self.boards[conn] = BoardWriter(self.slots, INCARNATION)
        conn.send(
            AgentHello(
                request=message.request,
                version=self.version,
                role=self.role,
                incarnation=INCARNATION,
                addresses=["tcp://127.0.0.1:4711"] if self.role == "prefill" else [],
                board_slots=self.slots,
            ),
            [board.fd, board.eventfd],
        )

    def _on_AttachWorker(self, conn, message):
        conn.send(Attached(request=message.request, worker_id=1))

    def answer_open(self, conn, message):
        """Answer an open: show the transfer in the slot that the worker has chosen."""
        self.boards[conn].take(message.transfer, message.sequence, message.room)
        self.rooms[message.room] = (conn, message.transfer, message.sequence)
        self.boards[conn].publish(message.transfer, State.WAITING)

    def refuse(self, conn, message, error):
        """Refuse a request; an open takes its slot all the same, and shows FAILED there."""
        conn.send(Refused(request=message.request, **error.to_wire()))
        if isinstance(message, OpenSend | OpenReceive):
            board = self.boards[conn]
            if not board.in_use(message.transfer, message.sequence):
                board.take(message.transfer, message.sequence, message.room)
            board.publish(message.transfer, State.FAILED)

    _on_OpenSend = answer_open
    _on_OpenReceive = answer_open

    def _on_ReleaseSlot(self, conn, message):
        self.boards[conn].release(message.transfer, message.sequence)


def refuse_with(error):
    """An answer for `FakeAgent.on`."""

    def act(conn, message):
        raise error

    return act


def ignore(conn, message):
    """An answer for `FakeAgent.on`: none."""


__all__ = [
    "INCARNATION",
    "AbortTransfer",
    "ConnectPeer",
    "FakeAgent",
    "OpenReceive",
    "OpenSend",
    "ReleaseSlot",
    "WorkerHello",
    "ignore",
    "refuse_with",
]

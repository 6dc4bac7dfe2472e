"""The local server over real sockets, on both event loops: descriptors, death, bad manners."""

import array
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys

import pytest
import uvloop

from pdxfer import limits, memory
from pdxfer.errors import ConfigError, ResourceError
from pdxfer.local.connection import HEADER, Inbox, Outbox, encode
from pdxfer.local.messages import Attached, FromAgent, Refused, ReleaseSlot, WorkerHello
from pdxfer.local.server import LocalServer

HELLO = WorkerHello(request=1, version="1", role="decode", pid=1)
WAIT_S = 20


class Recorder:
    """A handler that notes what happens, and lets a test wait for it."""

    def __init__(self):
        self.events = asyncio.Queue()
        self.connections = []
        self.on = lambda conn, message, fds: None

    def on_connected(self, conn):
        self.connections.append(conn)
        self.events.put_nowait(("connected", conn))

    def on_message(self, conn, message, fds):
        self.events.put_nowait(("message", message))
        self.on(conn, message, fds)

    def on_closed(self, conn, reason):
        self.events.put_nowait(("closed", reason))

    async def next(self, kind):
        got, value = await asyncio.wait_for(self.events.get(), WAIT_S)
        assert got == kind, value
        return value


class RawWorker:
    """A worker's end without a client."""

    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.sock.setblocking(False)
        self.inbox = Inbox(FromAgent)

    def send(self, message, fds=()):
        outbox = Outbox()
        outbox.append(encode(message, len(fds)), fds)
        assert outbox.flush(self.sock)

    async def receive(self):
        """The next message, without blocking the loop that answers."""
        while (got := self.inbox.next()) is None:
            if not self.inbox.receive(self.sock):
                await asyncio.sleep(0)
        return got

    async def end(self):
        """Wait for the agent's hang-up."""
        with pytest.raises((EOFError, ConnectionResetError)):
            await self.receive_for_ever()

    async def receive_for_ever(self):
        while True:
            await self.receive()

    def close(self):
        self.inbox.close()
        self.sock.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def serve(request, tmp_path):
    """Runs a coroutine function with a started server, its recorder and a maker of workers."""

    def run(body, **options):
        async def main():
            recorder = Recorder()
            path = str(tmp_path / "agent.sock")
            server = LocalServer(path, recorder, **options)
            await server.start()
            workers = []

            def worker():
                workers.append(RawWorker(path))
                return workers[-1]

            try:
                await asyncio.wait_for(body(server, recorder, worker), 60)
            finally:
                for each in workers:
                    each.close()
                server.close()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.sleep(0))  # uvloop keeps a pipe of its own from its first loop on
        before = len(os.listdir("/proc/self/fd"))
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())
        assert len(os.listdir("/proc/self/fd")) <= before

    return run


def test_messages_and_descriptors_both_ways(serve):
    async def body(server, recorder, worker):
        agent_memory = []

        def on(conn, message, fds):
            agent_memory.extend(memory.map_sealed(fd, 4096) for fd in fds)
            conn.send(Attached(request=message.request, worker_id=7), [fds[0]])

        recorder.on = on
        one = worker()
        with memory.allocate(4096) as shared:
            one.send(HELLO, [shared.fd, shared.fd])
            conn = await recorder.next("connected")
            assert (conn.pid, conn.uid) == (os.getpid(), os.geteuid())
            assert await recorder.next("message") == HELLO
            message, [fd] = await one.receive()
            assert message == Attached(request=1, worker_id=7)
            assert os.fstat(fd).st_ino == os.fstat(shared.fd).st_ino
            os.close(fd)
            shared.buffer[5] = 55
            assert [mapped.buffer[5] for mapped in agent_memory] == [55, 55]
        for mapped in agent_memory:
            mapped.close()

    serve(body)


def test_descriptors_the_handler_takes_stay_open(serve):
    async def body(server, recorder, worker):
        taken = []
        recorder.on = lambda conn, message, fds: taken.append(fds.pop(0))
        one = worker()
        with memory.allocate(4096) as shared:
            one.send(HELLO, [shared.fd, shared.fd])
            await recorder.next("connected")
            await recorder.next("message")
            assert os.fstat(taken[0]).st_size == 4096
            os.close(taken[0])

    serve(body)


def test_socket_file(serve, tmp_path):
    async def body(server, recorder, worker):
        status = os.stat(server.path)
        assert stat.S_IMODE(status.st_mode) == 0o600
        with pytest.raises(ResourceError, match="another agent listens there"):
            await LocalServer(server.path, recorder).start()
        server.close()
        server.close()
        assert os.listdir(tmp_path) == []

    serve(body)


def test_stale_socket_file_is_replaced(serve, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "agent.sock"))

    async def body(server, recorder, worker):
        worker().send(HELLO)
        await recorder.next("connected")

    serve(body)


def test_a_file_that_is_no_socket_is_not_touched(tmp_path):
    path = tmp_path / "agent.sock"
    path.write_text("mine")

    async def main():
        with pytest.raises(ConfigError, match="is no socket"):
            await LocalServer(str(path), Recorder()).start()

    asyncio.run(main())
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "kind"), [("x" * 200, ConfigError), ("/no/such/folder/agent.sock", ResourceError)]
)
def test_a_path_that_cannot_be_bound_is_named(path, kind):
    async def main():
        with pytest.raises(kind, match=f"socket_path={path}"):
            await LocalServer(path, Recorder()).start()

    asyncio.run(main())


def test_another_server_took_over_the_path(serve, tmp_path):
    async def body(server, recorder, worker):
        os.unlink(server.path)
        later = LocalServer(server.path, recorder)
        await later.start()
        server.close()
        assert stat.S_ISSOCK(os.stat(later.path).st_mode)
        later.close()

    serve(body)


def test_other_users_are_refused_by_name(serve):
    async def body(server, recorder, worker):
        one = worker()
        message, _ = await one.receive()
        assert isinstance(message, Refused)
        assert message.code == "config"
        assert f"user {os.geteuid()} may not attach" in message.text
        assert "allowed_uids=[12345]" in message.text
        await one.end()
        assert recorder.events.empty()

    serve(body, allowed_uids={12345})


def test_foreign_users_need_an_open_mode(serve):
    async def body(server, recorder, worker):
        assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o666
        worker().send(HELLO)
        await recorder.next("connected")

    serve(body, allowed_uids={12345, os.geteuid()})


def test_too_many_workers_are_refused(serve, monkeypatch):
    monkeypatch.setattr(limits, "WORKERS_PER_AGENT_MAX", 2)

    async def body(server, recorder, worker):
        one, _ = worker(), worker()
        await recorder.next("connected")
        await recorder.next("connected")
        message, _ = await worker().receive()
        assert isinstance(message, Refused)
        assert "2 workers already" in message.text
        one.close()
        assert await recorder.next("closed") == "the worker closed its connection"
        worker().send(HELLO)
        await recorder.next("connected")

    serve(body)


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(2, 0) + b"\xc1\xc1", HEADER.pack(1, 3) + b"\xc0"],
    ids=["http", "body", "descriptors"],
)
def test_malformed_frame_ends_only_its_connection(serve, junk):
    async def body(server, recorder, worker):
        bad, good = worker(), worker()
        await recorder.next("connected")
        await recorder.next("connected")
        bad.sock.sendall(junk)
        message, _ = await bad.receive()
        assert isinstance(message, Refused)
        assert (message.request, message.code) == (0, "remote_protocol")
        assert await recorder.next("closed") == message.text
        await bad.end()
        good.send(HELLO)
        assert await recorder.next("message") == HELLO
        assert len(server.connections) == 1

    serve(body)


def test_messages_before_the_junk_count(serve):
    async def body(server, recorder, worker):
        worker().sock.sendall(encode(HELLO) + b"\xff" * 8)
        await recorder.next("connected")
        assert await recorder.next("message") == HELLO
        await recorder.next("closed")

    serve(body)


def test_a_bug_in_the_handler_ends_only_that_connection(serve):
    async def body(server, recorder, worker):
        reported = []
        server.loop.set_exception_handler(lambda loop, context: reported.append(context))

        def on(conn, message, fds):
            if fds:
                raise ZeroDivisionError

        recorder.on = on
        bad, good = worker(), worker()
        await recorder.next("connected")
        await recorder.next("connected")
        with memory.allocate(4096) as shared:
            bad.send(HELLO, [shared.fd])
        await recorder.next("message")
        assert await recorder.next("closed") == "internal error: ZeroDivisionError()"
        assert isinstance(reported[0]["exception"], ZeroDivisionError)
        good.send(HELLO)
        assert await recorder.next("message") == HELLO

    serve(body)


def test_worker_that_does_not_read_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(limits, "LOCAL_QUEUE_BYTES_MAX", 1 << 20)

    async def body(server, recorder, worker):
        worker()
        conn = await recorder.next("connected")
        refused = Refused(code="x", text="y" * 100_000, retryable=False, fields={})
        sent = 0
        while not conn.closed:
            conn.send(refused)
            sent += 1
            assert sent < 1000
        assert sent > 10
        reason = await recorder.next("closed")
        assert "does not read" in reason
        assert "at most 1048576" in reason
        conn.send(refused)  # dropped, as the worker's death may come at any time

    serve(body)


def test_slow_reader_gets_everything(serve):
    async def body(server, recorder, worker):
        one = worker()
        conn = await recorder.next("connected")
        for number in range(200):
            conn.send(Attached(request=number, worker_id=0))
            conn.send(Refused(code="x", text="y" * 20_000, retryable=False, fields={}))
        for number in range(200):
            message, _ = await one.receive()
            assert message.request == number
            await one.receive()

    serve(body)


def test_close_by_the_agent(serve):
    async def body(server, recorder, worker):
        one = worker()
        conn = await recorder.next("connected")
        conn.close("enough")
        conn.close("twice")
        assert await recorder.next("closed") == "enough"
        await one.end()
        assert recorder.events.empty()

    serve(body)


CHILD = """
import os, socket, sys, time
from pdxfer.local.connection import encode
from pdxfer.local.messages import WorkerHello
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
if sys.argv[2] == "fork" and os.fork() == 0:
    os.read(0, 1)  # keeps the socket open behind its parent's back
    os._exit(0)
s.sendall(encode(WorkerHello(request=1, version="1", role="decode", pid=os.getpid())))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_killed_worker_is_noticed(serve, how):
    """By the end of the stream, or by its pidfd where a forked child keeps the stream open."""

    async def body(server, recorder, worker):
        child = subprocess.Popen(  # noqa: ASYNC220 returns at once
            [sys.executable, "-c", CHILD, server.path, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            conn = await recorder.next("connected")
            assert conn.pid == child.pid
            await recorder.next("message")
            child.send_signal(signal.SIGKILL)
            reason = await recorder.next("closed")
            assert how == "alone" or reason == f"the worker's process {child.pid} has ended"
        finally:
            child.kill()
            child.stdin.close()
            child.stdout.close()
            child.wait(WAIT_S)

    serve(body)


@contextlib.contextmanager
def descriptors_left(count):
    """This process has `count` descriptors left, at any limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # other tests left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 64), hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", range(6))
def test_an_agent_out_of_descriptors_says_so_and_serves_again_once_it_has_some(serve, left):
    """Whatever the shortage meets: accepting, the pidfd, what a message brings, what it needs."""

    async def body(server, recorder, worker):
        def on(conn, message, fds):
            board = []
            try:
                board.extend(os.dup(fd) for fd in fds * 2)
                conn.send(Attached(request=message.request, worker_id=7), board)
            finally:
                for fd in board:
                    os.close(fd)

        recorder.on = on
        gone = RawWorker.__new__(RawWorker)
        gone.sock, gone.inbox = socket.socket(socket.AF_UNIX), Inbox(FromAgent)
        outbox = Outbox()
        reader, writer = os.pipe()
        outbox.append(encode(HELLO, 1), [reader])
        gone.sock.connect(server.path)
        gone.sock.setblocking(False)
        assert outbox.flush(gone.sock)
        with descriptors_left(left):
            message, fds = await gone.receive()
        for fd in [*fds, reader, writer]:
            os.close(fd)
        gone.close()
        assert isinstance(message, Refused)
        assert (message.request, message.code, message.retryable) == (0, "resource", True)
        assert "the agent has no file descriptor left" in message.text
        assert bool(recorder.connections) == (left >= 2)  # never without its pidfd
        while not recorder.events.empty():
            recorder.events.get_nowait()

        again = worker()
        again.send(HELLO)
        assert (await again.receive())[0] == Attached(request=1, worker_id=7)

    serve(body)


def test_no_descriptors_left_to_accept_with(serve, monkeypatch, caplog):
    """The server neither spins nor dies when the process is out of descriptors."""
    failures = []

    async def body(server, recorder, worker):
        real = server._listener

        class Starved:
            def accept(self):
                if len(failures) < 4:  # twice, each time also with the descriptor that is kept back
                    failures.append(1)
                    raise OSError(24, "Too many open files")
                return real.accept()

            def __getattr__(self, name):
                return getattr(real, name)

        server._listener = Starved()
        worker().send(HELLO)
        await recorder.next("connected")
        assert len(failures) == 4

    with caplog.at_level(logging.ERROR):
        serve(body)
    assert sum(record.message == "worker_not_accepted" for record in caplog.records) == 2


def test_truncated_ancillary_data_closes_the_connection(serve):
    """A frame cannot bring more descriptors than are allowed at once; none of them leaks."""

    async def body(server, recorder, worker):
        one = worker()
        await recorder.next("connected")
        reader, writer = os.pipe()
        rights = array.array("i", [reader] * (limits.LOCAL_FDS_MAX + 8))
        one.sock.sendmsg([encode(HELLO, 64)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(reader)
        os.close(writer)
        assert "descriptors" in await recorder.next("closed")

    serve(body)


def test_release_and_hello_in_one_write(serve):
    async def body(server, recorder, worker):
        release = ReleaseSlot(transfer=1, sequence=2)
        worker().sock.sendall(encode(HELLO) + encode(release))
        await recorder.next("connected")
        assert await recorder.next("message") == HELLO
        assert await recorder.next("message") == release

    serve(body)

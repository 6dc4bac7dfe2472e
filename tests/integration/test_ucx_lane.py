"""The UCX lanes between two processes: bytes, commits, and the death of either side.

Run as a script, this file is the other process: `receive LANE`, `send LANE`, `cut LANE HOW SEED`,
`undecided LANE SEED` or `race LANE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from pdxfer.errors import ConfigError, LocalProtocolError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    CommitArrived,
    CommitSent,
    PathClosed,
    PathOpened,
    RemoteRegion,
    Scope,
    SenderLost,
)
from pdxfer.fabric.ucx import UcxFabric
from pdxfer.fabric.ucx_loader import ucx_available

AVAILABLE, WHY = ucx_available()
pytestmark = [
    pytest.mark.ucx,
    pytest.mark.skipif(not AVAILABLE, reason=WHY),
]

SENDER = b"P" * 16
RECEIVER = b"D" * 16
BYTES = 64 << 20
PIECE = 32 << 10


def fabric(lane, **settings):
    return UcxFabric(lane, net_device="lo", **settings)


def wait_for(lane_fabric, kind, seen, timeout_s=20.0, **fields):
    """The first event of a kind with these fields; everything seen stays in `seen`."""
    end = time.monotonic() + timeout_s
    while True:
        for event in seen:
            if isinstance(event, kind) and all(
                getattr(event, name) == value for name, value in fields.items()
            ):
                return event
        assert time.monotonic() < end, f"no {kind.__name__} {fields} within {timeout_s} s: {seen}"
        lane_fabric.wait(0.1)
        seen += lane_fabric.take_events()


def shuffled(seed, length=PIECE, total=BYTES):
    """Runs that put each piece somewhere else, and where each goes."""
    count = total // length
    order = np.random.default_rng(seed).permutation(count)
    runs = np.zeros((count, 5), dtype=np.int64)
    runs[:, 1] = np.arange(count) * length
    runs[:, 3] = order * length
    runs[:, 4] = length
    return runs, order


def random_bytes(seed, total=BYTES):
    return np.random.default_rng(seed).integers(0, 256, size=total, dtype=np.uint8)


def say(**fields):
    print(json.dumps(fields), flush=True)


def receive(lane):
    """Child: a receiver that tells the digest of its memory at each commit."""
    memory = np.zeros(BYTES, dtype=np.uint8)
    lane_fabric = fabric(lane)
    region = lane_fabric.register(memory.ctypes.data, BYTES, memory)
    say(
        address=lane_fabric.open_receiver(SENDER).hex(),
        base=region.address,
        rkey=region.rkey.hex(),
    )
    lane_fabric.watch_sender(SENDER, bytes.fromhex(json.loads(sys.stdin.readline())["address"]))
    while True:
        lane_fabric.wait(1.0)
        for event in lane_fabric.take_events():
            if isinstance(event, CommitArrived):
                say(payload=event.payload.hex(), digest=hashlib.sha256(memory).hexdigest())
            if isinstance(event, SenderLost):
                say(lost=event.error)


def send(lane):
    """Child: a sender that writes until it is killed."""
    source = random_bytes(1)
    lane_fabric = fabric(lane)
    region = lane_fabric.register(source.ctypes.data, BYTES, source)
    say(address=lane_fabric.send_address().hex())
    told = json.loads(sys.stdin.readline())
    path = lane_fabric.connect(RECEIVER, bytes.fromhex(told["address"]), 10.0)
    seen = []
    wait_for(lane_fabric, PathOpened, seen, error="")
    remote = [RemoteRegion(told["base"], BYTES, bytes.fromhex(told["rkey"]))]
    generation = 1
    while True:
        runs, _ = shuffled(generation)
        ticket = path.post_runs(generation, runs, np.array([0, len(runs)]), [region], remote)[0]
        wait_for(lane_fabric, BatchEnded, seen, ticket=ticket)
        say(posted=generation)
        generation += 1


def cut(lane, how, seed):
    """Child: paths that end while they write, to receivers that live on and are closed later."""
    rng = np.random.default_rng(int(seed))
    sender, receiver = fabric(lane), fabric(lane)
    source, target = (np.ones(16 << 20, dtype=np.uint8) for _ in range(2))
    local = sender.register(source.ctypes.data, source.nbytes, source)
    region = receiver.register(target.ctypes.data, target.nbytes, target)
    remote = [RemoteRegion(region.address, region.length_bytes, region.rkey)]
    runs, _ = shuffled(1, 4096, source.nbytes)
    for generation in range(1, 9):
        peer = bytes([generation])
        seen = []
        path = sender.connect(peer, receiver.open_receiver(peer), 10.0)
        wait_for(sender, PathOpened, seen, error="")
        path.post_runs(generation, runs, np.array([0, len(runs)]), [local], remote)
        until = time.perf_counter() + rng.random() * 0.004
        while time.perf_counter() < until:
            pass
        if how == "cancel":
            path.cancel(generation, 1e-9)
        path.close()
        wait_for(sender, PathClosed, seen)
        assert [event for event in seen if isinstance(event, BatchEnded)]
        time.sleep(0.02 * rng.integers(2))
        receiver.close_receiver(peer)
    sender.close(5.0)
    receiver.close(5.0)


def undecided(lane, seed):
    """Child: paths that end, or whose receivers do, while they open."""
    rng = np.random.default_rng(int(seed))
    sender, receiver = fabric(lane), fabric(lane)
    for number in range(40):
        peer, seen = bytes([number]), []
        path = sender.connect(peer, receiver.open_receiver(peer), 10.0)
        time.sleep(rng.random() * 0.01)
        if number % 3 == 0:
            receiver.close_receiver(peer)
        if number % 3 != 1:
            path.close()
        if not wait_for(sender, PathOpened, seen).error:
            path.close()
            wait_for(sender, PathClosed, seen)
        receiver.close_receiver(peer)
    sender.close(5.0)
    receiver.close(5.0)


def race(lane):
    """Child: posts that are still being built when the engine closes."""
    memory = np.zeros(4096, dtype=np.uint8)
    runs = np.zeros((1_000_000, 5), dtype=np.int64)
    runs[:, 4] = 64
    for i in range(4):
        sender, receiver = fabric(lane), fabric(lane)
        local = sender.register(memory.ctypes.data, memory.nbytes, memory)
        remote = [RemoteRegion(local.address, local.length_bytes, local.rkey)]
        path = sender.connect(RECEIVER, receiver.open_receiver(SENDER), 10.0)
        wait_for(sender, PathOpened, [], error="")

        def post(path=path, local=local, remote=remote):
            with contextlib.suppress(LocalProtocolError):
                path.post_runs(1, runs, np.array([0, len(runs)]), [local], remote)

        thread = threading.Thread(target=post)
        thread.start()
        time.sleep(0.004 * i)
        sender.close(5.0)
        thread.join()
        receiver.close(5.0)


class Child:
    """The other process."""

    def __init__(self, role, lane):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, __file__, role, lane],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"the child ended: {self.process.poll()}"
        return json.loads(line)

    def tell(self, **fields):
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def kill(self):
        assert self.process.poll() is None
        self.process.send_signal(signal.SIGKILL)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def child():
    children = []

    def start(role, lane):
        children.append(Child(role, lane))
        return children[-1]

    yield start
    for each in children:
        each.close()


@pytest.fixture
def start_fabric():
    made = []

    def start(lane, **settings):
        made.append(fabric(lane, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close(5.0)


class Sender:
    """This process as the sender to a receiving child."""

    def __init__(self, lane_fabric, child, seed=1):
        self.fabric = lane_fabric
        self.seen = []
        self.source = random_bytes(seed)
        self.region = lane_fabric.register(self.source.ctypes.data, BYTES, self.source)
        told = child.hear()
        self.remote = [RemoteRegion(told["base"], BYTES, bytes.fromhex(told["rkey"]))]
        self.path = lane_fabric.connect(RECEIVER, bytes.fromhex(told["address"]), 10.0)
        self.opened = self.wait(PathOpened, error="")
        child.tell(address=lane_fabric.send_address().hex())

    def wait(self, kind, timeout_s=20.0, **fields):
        return wait_for(self.fabric, kind, self.seen, timeout_s, **fields)

    def post(self, generation, runs, batches=1):
        splits = np.linspace(0, len(runs), batches + 1).astype(np.int64)
        return self.path.post_runs(generation, runs, splits, [self.region], self.remote)


lanes = pytest.mark.parametrize("lane", ["tcp", "cma"])


@lanes
def test_bytes_land_before_their_commit(lane, child, start_fabric):
    other = child("receive", lane)
    sender = Sender(start_fabric(lane), other)
    assert ("cma/memory" in sender.opened.transports) == (lane == "cma")
    expected = np.zeros(BYTES, dtype=np.uint8)
    for generation in (1, 2):
        runs, order = shuffled(generation)
        tickets = sender.post(generation, runs, batches=4)
        commit = sender.path.commit(generation, f"payload {generation}".encode())
        told = other.hear()
        expected.reshape(-1, PIECE)[order] = sender.source.reshape(-1, PIECE)
        assert bytes.fromhex(told["payload"]) == f"payload {generation}".encode()
        assert told["digest"] == hashlib.sha256(expected).hexdigest()
        posted = [sender.wait(BatchEnded, ticket=ticket) for ticket in tickets]
        assert [event.error for event in posted] == [""] * 4
        assert sum(event.length_bytes for event in posted) == BYTES
        assert sum(event.runs for event in posted) == len(runs)
        assert sender.wait(CommitSent, ticket=commit).error == ""
    sender.path.cancel(3)
    assert sender.wait(Cancelled).generation == 3
    sender.path.close()
    closed = sender.wait(PathClosed)
    assert closed.drained
    with pytest.raises(LocalProtocolError, match="is closed"):
        sender.post(4, runs)


@lanes
def test_a_killed_receiver_fails_every_batch_at_once(lane, child, start_fabric):
    other = child("receive", lane)
    sender = Sender(start_fabric(lane), other)
    runs, _ = shuffled(1)
    tickets = [ticket for i in range(8) for ticket in sender.post(1 + i, runs, batches=4)]
    commit = sender.path.commit(8, b"never")
    sender.wait(BatchEnded, ticket=tickets[0])
    other.kill()
    closed = sender.wait(PathClosed, timeout_s=5.0)
    assert closed.error
    assert closed.drained == (lane == "cma")
    assert {event.ticket for event in sender.seen if isinstance(event, BatchEnded)} == set(tickets)
    assert sender.wait(BatchEnded, ticket=tickets[-1]).error
    assert sender.wait(CommitSent, ticket=commit).error


@lanes
def test_a_killed_sender_is_lost_and_on_tcp_silent(lane, child, start_fabric):
    other = child("send", lane)
    receiver = start_fabric(lane)
    memory = np.zeros(BYTES, dtype=np.uint8)
    region = receiver.register(memory.ctypes.data, BYTES, memory)
    address = other.hear()["address"]
    other.tell(
        address=receiver.open_receiver(SENDER).hex(), base=region.address, rkey=region.rkey.hex()
    )
    receiver.watch_sender(SENDER, bytes.fromhex(address))
    assert other.hear() == {"posted": 1}
    other.kill()
    lost = wait_for(receiver, SenderLost, [], timeout_s=5.0)
    assert (lost.peer, bool(lost.error)) == (SENDER, True)
    if receiver.capabilities.revoke_scope is not Scope.NOTHING:
        after = memory.copy()
        assert not receiver.wait(0.5)
        assert np.array_equal(after, memory)
    # The sender's next life gets a worker of its own; this one's is gone.
    with pytest.raises(LocalProtocolError, match="no receive worker"):
        receiver.watch_sender(SENDER, bytes.fromhex(address))
    assert receiver.open_receiver(SENDER)
    receiver.close_receiver(SENDER)
    receiver.close_receiver(SENDER)


def test_a_run_outside_its_region_posts_nothing(child, start_fabric):
    sender = Sender(start_fabric("tcp"), child("receive", "tcp"))
    runs, _ = shuffled(1)
    runs[-1, 3] = BYTES - PIECE + 1
    text = f"run {len(runs) - 1}: destination offset {BYTES - PIECE + 1} and length {PIECE} leave"
    with pytest.raises(LocalProtocolError, match=text):
        sender.post(1, runs)
    assert not sender.fabric.wait(0.1)
    runs[-1, 3] = BYTES - PIECE
    assert sender.wait(BatchEnded, ticket=sender.post(1, runs)[0]).error == ""


def test_memory_is_kept_until_nothing_reads_from_it(child, start_fabric):
    class Owner:
        """Stands for a mapping."""

    sender = Sender(start_fabric("tcp"), child("receive", "tcp"))
    owner = Owner()
    gone = weakref.ref(owner)
    region = sender.fabric.register(sender.source.ctypes.data, BYTES, owner)
    del owner
    runs, _ = shuffled(1)
    ticket = sender.path.post_runs(1, runs, np.array([0, len(runs)]), [region], sender.remote)[0]
    sender.fabric.deregister(region)
    assert gone() is not None
    assert sender.wait(BatchEnded, ticket=ticket).error == ""
    end = time.monotonic() + 5.0
    while gone() is not None and time.monotonic() < end:
        sender.fabric.wait(0.1)
        sender.fabric.take_events()
        gc.collect()
    assert gone() is None


async def test_the_descriptor_wakes_a_loop(start_fabric):
    sender, receiver = start_fabric("tcp"), start_fabric("tcp")
    loop = asyncio.get_running_loop()
    events: asyncio.Queue = asyncio.Queue()
    for each in (sender, receiver):
        loop.add_reader(
            each.fileno(), lambda each=each: [*map(events.put_nowait, each.take_events())]
        )
    try:
        path = sender.connect(RECEIVER, receiver.open_receiver(SENDER), 5.0)
        assert (await asyncio.wait_for(events.get(), 10)).error == ""
        path.commit(1, b"x" * 60_000)
        got = [await asyncio.wait_for(events.get(), 10) for _ in range(2)]
        assert CommitArrived(SENDER, b"x" * 60_000) in got
    finally:
        for each in (sender, receiver):
            loop.remove_reader(each.fileno())


def test_what_cannot_work_is_refused_by_name(start_fabric):
    with pytest.raises(ConfigError, match="lane: 'rdma'"):
        fabric("rdma")
    with pytest.raises(ConfigError, match="net_device: 'nosuch0'"):
        UcxFabric("tcp", net_device="nosuch0")
    with pytest.raises(ConfigError, match="tcp_port_range"):
        fabric("tcp", tcp_port_range="9")
    with pytest.raises(ConfigError, match="one process has one UCX"):
        fabric("tcp", ucx="/somewhere/else")
    one = start_fabric("tcp")
    with pytest.raises(LocalProtocolError, match="lane address"):
        one.connect(RECEIVER, b"junk", 1.0)
    top = 1 << 64
    for address, length in [(top - 8, 16), (top - 4096, 4096), (4096, top - 4096)]:
        text = rf"address {address} and length {length} leave .* end above 2\^63"
        with pytest.raises(LocalProtocolError, match=text):
            one.register(address, length, None)
    one.open_receiver(SENDER)
    with pytest.raises(LocalProtocolError, match="has a receive worker already"):
        one.open_receiver(SENDER)
    one.close(5.0)
    one.close(5.0)
    with pytest.raises(LocalProtocolError, match="engine is closed"):
        one.register(4096, 16, None)


@lanes
def test_keys_and_addresses_that_are_none_are_refused(lane, start_fabric):
    sender, receiver = start_fabric(lane), start_fabric(lane)
    memory = np.zeros(4096, dtype=np.uint8)
    source = sender.register(memory.ctypes.data, 4096, memory)
    target = receiver.register(memory.ctypes.data, 4096, memory)
    address = receiver.open_receiver(SENDER)
    path = sender.connect(RECEIVER, address, 10.0)
    seen = []
    wait_for(sender, PathOpened, seen, error="")
    rng = np.random.default_rng(1)
    junk = [rng.bytes(length) for length in (0, 1, 8, 9, 10, 35, len(address), 4096)]
    run = np.array([[0, 0, 0, 0, 64]])
    for rkey in [*junk, *(target.rkey[:length] for length in range(len(target.rkey)))]:
        remote = [RemoteRegion(target.address, 4096, rkey)]
        with pytest.raises(LocalProtocolError, match="destination region 0: the remote key"):
            path.post_runs(1, run, np.array([0, 1]), [source], remote)
    changed = [bytes([*address[:i], address[i] ^ 0x10, *address[i + 1 :]]) for i in range(8, 80)]
    for wrong in [*junk, *changed, *(address[:length] for length in range(len(address)))]:
        with pytest.raises(LocalProtocolError, match="lane address"):
            sender.connect(RECEIVER, wrong, 1.0)
        with pytest.raises(LocalProtocolError, match="lane address"):
            receiver.watch_sender(SENDER, wrong)
    remote = [RemoteRegion(target.address, 4096, target.rkey)]
    ticket = path.post_runs(1, run, np.array([0, 1]), [source], remote)[0]
    assert wait_for(sender, BatchEnded, seen, ticket=ticket).error == ""


def runs_to_its_end(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{arguments}: status {done.returncode}: {done.stderr[-4000:]}"


@lanes
@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_path_that_ends_while_it_writes_harms_neither_process(lane, how):
    for seed in range(3):
        runs_to_its_end("cut", lane, how, str(seed))


@lanes
def test_a_path_that_ends_while_it_opens_harms_neither_process(lane):
    for seed in range(2):
        runs_to_its_end("undecided", lane, str(seed))


def test_a_post_may_race_with_close():
    runs_to_its_end("race", "tcp")


def test_a_receiver_that_does_not_answer_is_told_in_time(start_fabric):
    gone = start_fabric("tcp")
    address = gone.open_receiver(SENDER)
    gone.close(5.0)
    sender = start_fabric("tcp")
    sender.connect(RECEIVER, address, 1.0)
    seen = []
    assert wait_for(sender, PathOpened, seen, timeout_s=5.0).error
    assert not any(isinstance(event, PathClosed) for event in seen)


if __name__ == "__main__":
    {"receive": receive, "send": send, "cut": cut, "undecided": undecided, "race": race}[
        sys.argv[1]
    ](*sys.argv[2:])

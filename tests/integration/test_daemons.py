"""Real daemons, real lanes, real workers: bytes cross, refusals are the same on both sides, deaths
of workers and daemons end in a state that is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pdxfer import limits
from pdxfer.client import DecodeClient, PrefillClient, State
from pdxfer.control import keys
from pdxfer.errors import (
    DaemonUnavailableError,
    LayoutMismatchError,
    PdxferError,
    PeerError,
)
from pdxfer.launch.daemons import DaemonProcess
from tests.support.caches import PAGE, SeededCache, expect, small, small_token_major

pytestmark = pytest.mark.ucx
LANES = ["tcp", "cma"]
WAIT_S = 20.0


@contextlib.contextmanager
def daemons(folder: Path, *, lane="tcp", prefill=(), decode=(), count=(1, 1)):
    """(prefill daemons, decode daemons), each with its facts."""
    with contextlib.ExitStack() as stack:
        started = {"prefill": [], "decode": []}
        for role, settings, number in (
            ("prefill", prefill, count[0]),
            ("decode", decode, count[1]),
        ):
            for index in range(number):
                place = folder / f"{role}{index}"
                place.mkdir(exist_ok=True)
                process = DaemonProcess(role, place, ["--lanes", lane, *settings])
                stack.enter_context(process)
                started[role].append((process, process.wait_ready()))
        yield started["prefill"], started["decode"]


@contextlib.contextmanager
def workers(prefill, decode, source=None, destination=None, **options):
    """A client on each side with a cache of its own."""
    source = SeededCache(source or small(), 1)
    destination = SeededCache(destination or small(), 2)
    with (
        PrefillClient(prefill[1].socket, source, **options) as sender,
        DecodeClient(decode[1].socket, destination, **options) as receiver,
    ):
        yield sender, receiver, source, destination


def cross(sender, receiver, source, destination, room=1, tokens=75, chunks=2):
    """One request over shuffled pages; whole pools compared."""
    rng = np.random.default_rng(room)
    count = -(-tokens // PAGE)
    source_pages = rng.permutation(np.arange(1, 64))[:count]
    destination_pages = rng.permutation(np.arange(1, 64))[:count]
    before = destination.snapshot()
    receiving = receiver.receive(room, sender.addresses, destination_pages, tokens=tokens)
    sending = sender.open(room)
    for index, part in enumerate(np.array_split(source_pages, chunks)):
        last = index == chunks - 1
        sending.send(part, tokens=tokens, last=last, aux=b"aux" if last else b"")
    commit = receiving.wait(WAIT_S)
    assert commit.aux == b"aux"
    sending.wait(WAIT_S)
    expect(source, destination, before, source_pages, destination_pages, tokens)
    assert receiving.pages_returned
    assert sending.pages_returned
    return commit


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("layout", [small, small_token_major])
def test_pages_cross(tmp_path, lane, layout):
    with daemons(tmp_path, lane=lane) as ([prefill], [decode]):
        with workers(prefill, decode, layout(), layout()) as pair:
            pair[1].connect(pair[0].addresses[0])
            for room in range(1, 6):
                commit = cross(*pair, room=room, tokens=20 + 37 * room, chunks=room)
                assert commit.lane == lane


def test_send_before_receive_and_a_room_held_without_pages(tmp_path):
    with (
        daemons(tmp_path) as ([prefill], [decode]),
        workers(prefill, decode) as (sender, receiver, source, destination),
    ):
        before = destination.snapshot()
        sending = sender.send(7, [3, 9], tokens=30, aux=b"x")
        assert sending.poll() is State.WAITING
        receiving = receiver.receive(7, sender.addresses[0])
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert receiving.poll() is State.WAITING
        receiving.place([8, 5], tokens=30)
        assert receiving.wait(WAIT_S).aux == b"x"
        sending.wait(WAIT_S)
        expect(source, destination, before, [3, 9], [8, 5], 30)
        assert sending.prefix_tokens == 0
        assert sending in sender.finished()
        assert receiving in receiver.finished()


@pytest.mark.parametrize("lane", LANES)
def test_many_workers_many_daemons(tmp_path, lane):
    with daemons(tmp_path, lane=lane, count=(2, 2)) as (prefills, decodes):
        with contextlib.ExitStack() as stack:
            senders, receivers = [], []
            for index, (_, facts) in enumerate(prefills):
                for name in ("a", "b"):
                    cache = SeededCache(small(), 10 * index + ord(name))
                    client = PrefillClient(facts.socket, cache, instance=name)
                    senders.append((stack.enter_context(client), cache, name))
            for index, (_, facts) in enumerate(decodes):
                for number in range(2):
                    cache = SeededCache(small(), 1000 + 10 * index + number)
                    client = DecodeClient(facts.socket, cache, instance=f"d{number}")
                    receivers.append((stack.enter_context(client), cache))
            room = 100
            checks = []
            for sender, source, name in senders:
                for receiver, destination in receivers:
                    room += 1
                    page = room % 60 + 1
                    assert sender.addresses[0].endswith(f"#{name}")
                    receiving = receiver.receive(room, sender.addresses, [page], tokens=PAGE)
                    sender.send(room, [page], tokens=PAGE)
                    checks.append((receiving, source, destination, page))
            for receiving, source, destination, page in checks:
                receiving.wait(WAIT_S)
                size = source.layout.item_lens[0]
                part = slice(page * size, (page + 1) * size)
                assert np.array_equal(source.regions[0][part], destination.regions[0][part])


@pytest.mark.parametrize("send_first", [False, True])
def test_a_refusal_is_the_same_on_both_sides_and_the_daemons_go_on(tmp_path, send_first):
    with daemons(tmp_path) as ([prefill], [decode]):
        with workers(prefill, decode, small(), small_token_major()) as pair:
            sender, receiver, _, destination = pair
            before = destination.snapshot()
            with pytest.raises(LayoutMismatchError) as connected:
                receiver.connect(sender.addresses[0])
            text = str(connected.value)
            assert text.startswith(
                "PD KV layout mismatch on the whole-envelope path: prefill has 1 KV region(s) with "
                f"item_lens=[{small().item_lens[0]}], decode has 8 with item_len="
            )
            assert isinstance(connected.value, RuntimeError)
            if send_first:
                sending = sender.send(5, [1], tokens=PAGE)
            with pytest.raises(LayoutMismatchError) as received:
                receiver.receive(5, sender.addresses[0], [1], tokens=PAGE)
            assert str(received.value) == text
            with pytest.raises(LayoutMismatchError) as sent:
                (sending if send_first else sender.send(5, [1], tokens=PAGE)).wait(WAIT_S)
            assert str(sent.value) == text
            assert all(map(np.array_equal, before, destination.regions))
        with workers(prefill, decode) as pair:
            cross(*pair)
        assert prefill[0].running
        assert decode[0].running


def test_page_ids_out_of_range_are_refused(tmp_path):
    with daemons(tmp_path) as ([prefill], [decode]), workers(prefill, decode) as pair:
        sender, receiver, _, _ = pair
        for ids in ([0], [64], [-1]):
            with pytest.raises(PdxferError, match=str(ids[0])):
                receiver.receive(5, sender.addresses[0], ids, tokens=PAGE)
            with pytest.raises(PdxferError, match=str(ids[0])):
                sender.send(6, ids, tokens=PAGE)
        cross(*pair)


def test_curve_keys_right_wrong_and_missing(tmp_path):
    def pair_of(name):
        return keys.generate(tmp_path, name)

    server, client, stranger = pair_of("server"), pair_of("client"), pair_of("stranger")
    allowed = tmp_path / "allowed"
    allowed.write_text(client[1].read_text())
    prefill_keys = ["--key-file", str(server[0]), "--client-keys", str(allowed)]

    def decode_keys(own, of):
        return ["--key-file", str(own[0]), "--server-key", str(of[1])]

    with daemons(tmp_path, prefill=prefill_keys, count=(1, 0)) as ([prefill], _):
        for index, settings in enumerate(
            [decode_keys(stranger, server), decode_keys(client, stranger), []]
        ):
            place = tmp_path / f"bad{index}"
            place.mkdir()
            with daemons(place, decode=settings, count=(0, 1)) as (_, [decode]):
                with workers(prefill, decode) as (sender, receiver, _, _):
                    began = time.monotonic()
                    with pytest.raises(PdxferError) as refused:
                        receiver.connect(sender.addresses[0], timeout_s=4.0)
                    assert time.monotonic() - began < 8
                    assert sender.addresses[0].removeprefix("tcp://") in str(refused.value)
        with daemons(tmp_path, decode=decode_keys(client, server), count=(0, 1)) as (_, [decode]):
            with workers(prefill, decode) as pair:
                cross(*pair)


def test_a_public_address_without_keys_is_refused(tmp_path):
    process = subprocess.run(
        [
            *[sys.executable, "-m", "pdxfer.daemon", "prefill"],
            *["--bind", "tcp://0.0.0.0:0", "--socket-path", str(tmp_path / "s")],
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert "--insecure" in process.stderr
    assert "keygen" in process.stderr


@pytest.mark.parametrize("lane", LANES)
def test_restart_of_either_daemon_between_requests(tmp_path, lane):
    with daemons(tmp_path, lane=lane) as ([prefill], [decode]):
        address = prefill[1].addresses[0]
        with workers(prefill, decode) as pair:
            cross(*pair)
        assert prefill[0].stop() == 0
        with daemons(tmp_path, lane=lane, prefill=["--bind", address], count=(1, 0)) as (
            [again],
            _,
        ):
            assert again[1].addresses[0] == address
            with workers(again, decode) as pair:
                cross(*pair, room=2)
            assert decode[0].stop() == 0
            with daemons(tmp_path, lane=lane, count=(0, 1)) as (_, [other]):
                with workers(again, other) as pair:
                    cross(*pair, room=3)


def hold(role, socket_path, room, *prefill):
    """A worker process that holds a transfer; returns it and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.holder", role, socket_path, str(room), *prefill],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("lane", LANES)
def test_a_killed_prefill_worker_fails_its_room(tmp_path, lane):
    with daemons(tmp_path, lane=lane) as ([prefill], [decode]):
        process, address = hold("prefill", prefill[1].socket, 9)
        with workers(prefill, decode) as pair:
            _, receiver, _, destination = pair
            receiving = receiver.receive(9, address, [1, 2, 3, 4], tokens=4 * PAGE)
            receiving_state = receiving.poll()
            deadline = time.monotonic() + WAIT_S
            while receiving_state is not State.MOVING and time.monotonic() < deadline:
                receiving_state = receiving.poll()
            assert receiving_state is State.MOVING
            process.kill()
            process.communicate()
            with pytest.raises(PeerError, match="went away"):
                receiving.wait(WAIT_S)
            while receiving.poll() is State.FENCING:
                time.sleep(0.01)
            assert receiving.poll() is State.FAILED
            assert receiving.pages_returned
            after = destination.snapshot()
            cross(*pair, tokens=PAGE, chunks=1)
            assert len(after) == len(destination.regions)


def test_a_killed_decode_worker_ends_the_send(tmp_path):
    with daemons(tmp_path) as ([prefill], [decode]), workers(prefill, decode) as pair:
        sender = pair[0]
        process, _ = hold("decode", decode[1].socket, 9, sender.addresses[0])
        sending = sender.send(9, [1], tokens=4 * PAGE, last=False)
        deadline = time.monotonic() + WAIT_S
        while sending.poll() is not State.MOVING and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        with pytest.raises(PdxferError, match="went away"):
            sending.wait(WAIT_S)
        cross(*pair)


@pytest.mark.parametrize(("lane", "fence"), [("tcp", "revoked"), ("cma", "dead")])
def test_a_killed_prefill_daemon_leaves_nothing_quarantined(tmp_path, lane, fence):
    with daemons(tmp_path, lane=lane) as ([prefill], [decode]), workers(prefill, decode) as pair:
        sender, receiver, _, _ = pair
        receiving = receiver.receive(9, sender.addresses[0], [1, 2], tokens=2 * PAGE)
        sending = sender.send(9, [1], last=False)
        deadline = time.monotonic() + WAIT_S
        while receiving.poll() is not State.MOVING and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(prefill[1].pid, signal.SIGKILL)
        with pytest.raises(PdxferError):
            receiving.wait(40)
        while not receiving.pages_returned and time.monotonic() < deadline:
            time.sleep(0.01)
        assert receiving.poll() is State.FAILED
        assert receiving.error.fields["fence"] == fence
        with pytest.raises(DaemonUnavailableError):
            sending.wait(WAIT_S)
        other = tmp_path / "next"
        other.mkdir()
        with daemons(other, lane=lane, count=(1, 0)) as ([again], _):
            source = SeededCache(small(), 1)
            with PrefillClient(again[1].socket, source) as fresh:
                good = receiver.receive(10, fresh.addresses[0], [5], tokens=PAGE)
                fresh.send(10, [6], tokens=PAGE)
                good.wait(WAIT_S)


def test_sigterm_drains_and_says_so(tmp_path):
    with daemons(tmp_path, prefill=["--drain-deadline-s", "0.5"]) as ([prefill], [decode]):
        with workers(prefill, decode) as (sender, receiver, _, _):
            receiving = receiver.receive(9, sender.addresses[0], [1, 2], tokens=2 * PAGE)
            sender.send(9, [1], last=False)
            receiving.wait(WAIT_S, until=State.READY)
            assert prefill[0].stop() == 4
            with pytest.raises(PdxferError):
                receiving.wait(WAIT_S)
        assert decode[0].stop() == 0


def test_an_abort_at_decode_returns_its_pages(tmp_path):
    with daemons(tmp_path) as ([prefill], [decode]), workers(prefill, decode) as pair:
        sender, receiver, _, destination = pair
        receiving = receiver.receive(9, sender.addresses[0], [1, 2], tokens=2 * PAGE)
        sending = sender.send(9, [1], last=False)
        receiving.abort("the user left")
        with pytest.raises(PdxferError, match="the user left"):
            receiving.wait(WAIT_S)
        with pytest.raises(PdxferError, match="the user left"):
            sending.wait(WAIT_S)
        before = destination.snapshot()
        time.sleep(0.3)
        assert all(map(np.array_equal, before, destination.regions))
        cross(*pair, room=9)


def test_the_log_has_one_line_a_state_change(tmp_path):
    with daemons(tmp_path, prefill=["--log-format", "json"], decode=["--log-format", "json"]) as (
        [prefill],
        [decode],
    ):
        with workers(prefill, decode) as pair:
            cross(*pair)
        for process, states in (
            (prefill[0], ["WAITING", "READY", "MOVING", "SENT", "COMMITTED"]),
            (decode[0], ["WAITING", "READY", "MOVING", "COMMITTED"]),
        ):
            assert process.stop() == 0
            lines = [json.loads(line) for line in process.log_file.read_text().splitlines()]
            seen = [line["state"] for line in lines if line.get("event") == "transfer"]
            # Bytes leave before anybody is told: at decode the commit may be the first to come.
            assert seen == [state for state in states if state in seen]
            assert (seen[0], seen[-1]) == (states[0], states[-1])
            assert process is not prefill[0] or seen == states


@pytest.mark.slow
def test_a_held_interpreter_is_not_taken_for_death(tmp_path):
    busy_s = int(limits.LIVENESS_TIMEOUT_S) + 3
    with daemons(tmp_path) as ([prefill], _):
        with PrefillClient(prefill[1].socket, SeededCache(small(), 1)) as sender:
            command = [sys.executable, "-m", "tests.support.busy_decode", str(busy_s)]
            with subprocess.Popen(
                [*command, sender.addresses[0]], stdout=subprocess.PIPE, text=True
            ) as child:
                assert child.stdout.readline() == "busy\n"
                sending = sender.send(7, [5], tokens=16)
                started = time.monotonic()
                length_bytes = sending.wait(busy_s + WAIT_S).length_bytes
                assert time.monotonic() - started > limits.LIVENESS_TIMEOUT_S
                assert child.stdout.readline() == f"{length_bytes}\n"

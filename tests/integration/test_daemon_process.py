"""The daemons as processes: ready file, status, signals, exit codes."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from pdxfer import memory
from pdxfer.bench.cases import one_page
from pdxfer.bench.one_page import Cache
from pdxfer.cli.main import main
from pdxfer.client import PrefillClient
from pdxfer.launch.daemons import DaemonPair, DaemonProcess

pytestmark = pytest.mark.ucx


def run_daemon(role, *settings):
    return subprocess.run(
        [sys.executable, "-m", "pdxfer.daemon", role, *settings],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_daemon_says_when_it_is_ready_and_ends_in_order(tmp_path, role):
    daemon = DaemonProcess(role, tmp_path, ["--lanes", "tcp", "--log-format", "json"])
    facts = daemon.wait_ready()
    assert len(facts.addresses) == (1 if role == "prefill" else 0)
    assert not any(address.endswith(":0") for address in facts.addresses)
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log_file.read_text().splitlines()]
    assert [line["event"] for line in lines if line["logger"] == "pdxfer.daemon"] == [
        "ucx_listener",
        "ready",
        "stopping",
        "stopped",
    ]
    assert lines[-1]["exit_code"] == 0
    assert not (tmp_path / f"{role}.ready").exists()


def test_a_killed_daemon_leaves_its_files_and_is_started_again_the_same_way(tmp_path):
    settings = ["--lanes", "tcp"]
    killed = DaemonProcess("prefill", tmp_path, settings)
    facts = killed.wait_ready()
    killed.signal(signal.SIGKILL)
    assert killed.stop() == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    (for_neighbours,) = [path.name for path in tmp_path.glob("prefill.sock.*")]
    assert left == {"prefill.ready", "prefill.sock", "prefill.log", for_neighbours}
    (tmp_path / "prefill.ready").unlink()  # it tells of the dead one
    with DaemonProcess("prefill", tmp_path, [*settings, "--bind", facts.addresses[0]]) as again:
        new = again.wait_ready()
        assert new.pid != facts.pid
        assert (new.socket, new.addresses) == (facts.socket, facts.addresses)
        assert main(["status", "prefill", "--socket-path", new.socket]) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


def test_status_of_a_running_daemon(capsys):
    with DaemonPair("tcp") as daemons:
        assert main(["status", "prefill", "--socket-path", daemons.prefill.socket]) == 0
        out = capsys.readouterr().out
        assert daemons.prefill.addresses[0] in out
        arguments = ["status", "decode", "--json", "--socket-path", daemons.decode.socket]
        assert main(arguments) == 0
        status = json.loads(capsys.readouterr().out)
    assert status["role"] == "decode"
    assert status["pid"] == daemons.decode.pid
    assert status["live_transfers"] == 0
    assert status["workers"] == []


def test_status_shows_workers_and_waiting_transfers(capsys):
    layout = one_page()
    with (
        DaemonPair("tcp") as daemons,
        memory.allocate(layout.regions[0].length_bytes) as shared,
        PrefillClient(daemons.prefill.socket, Cache(layout, [shared.range()])) as client,
    ):
        client.open(7)
        main(["status", "prefill", "--json", "--socket-path", daemons.prefill.socket])
        status = json.loads(capsys.readouterr().out)
        assert main(["status", "prefill", "--socket-path", daemons.prefill.socket]) == 0
        assert "room 7 generation 0 worker 0 WAITING peers none" in capsys.readouterr().out
    assert status["live_transfers"] == 1
    assert status["transfers"][0]["room"] == 7
    assert status["workers"][0]["length_bytes"] == layout.regions[0].length_bytes


def test_status_without_a_daemon(tmp_path, capsys):
    assert main(["status", "decode", "--socket-path", str(tmp_path / "none.sock")]) == 1
    assert "none.sock" in capsys.readouterr().err


def test_a_bad_setting_is_exit_code_2(tmp_path):
    file = tmp_path / "daemon.toml"
    file.write_text("lane = 'tcp'\n")
    ended = run_daemon("prefill", "--config", str(file))
    assert ended.returncode == 2
    assert "did you mean 'lanes'?" in ended.stderr


def test_an_address_in_use_is_exit_code_3(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        ended = run_daemon("prefill", "--bind", address, "--socket-path", str(tmp_path / "p.sock"))
    assert ended.returncode == 3
    assert address in ended.stderr


def test_a_lane_that_cannot_be_had_is_exit_code_3(tmp_path):
    ended = run_daemon("decode", "--ucx", str(tmp_path), "--socket-path", str(tmp_path / "d.sock"))
    assert ended.returncode == 3
    assert str(tmp_path) in ended.stderr


def test_an_open_address_without_keys_is_exit_code_2(tmp_path):
    ended = run_daemon(
        "prefill", "--bind", "tcp://0.0.0.0:0", "--socket-path", str(tmp_path / "p.sock")
    )
    assert ended.returncode == 2
    assert "insecure" in ended.stderr

"""A daemon's life around an agent that is not there: ready file, signals, exit codes."""

import asyncio
import json
import os
import signal

import pytest

from pdxfer import limits
from pdxfer.agent.run import run_agent
from pdxfer.control import keys
from pdxfer.daemon import config
from pdxfer.daemon.run import Daemon, ExitCode, main, parser, write_ready_file
from pdxfer.errors import ConfigError, PeerError, ResourceError

READY = {"addresses": ["tcp://127.0.0.1:5"], "socket": "s", "incarnation": b"\x01\x02"}


def daemon(run_agent, **settings):
    resolved = config.resolve("prefill", settings, {})
    return Daemon("prefill", resolved, None, run_agent)


async def serve_until_stopped(config, *, ready, stop):
    ready(dict(READY))
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    return 0


async def test_sigterm_ends_in_order():
    assert await daemon(serve_until_stopped).run() == ExitCode.STOPPED


async def test_the_ready_file_is_there_while_serving_and_gone_after(tmp_path):
    file = tmp_path / "ready.json"
    seen = {}

    async def agent(config, *, ready, stop):
        ready(dict(READY))
        seen.update(json.loads(file.read_text()))
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        return 0

    await daemon(agent, ready_file=str(file)).run()
    assert seen["addresses"] == READY["addresses"]
    assert seen["incarnation"] == "0102"
    assert seen["pid"] == os.getpid()
    assert seen["role"] == "prefill"
    assert not file.exists()


async def test_transfers_left_at_the_deadline_are_told_by_the_exit_code():
    async def agent(config, *, ready, stop):
        ready(dict(READY))
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        return 3

    assert await daemon(agent).run() == ExitCode.NOT_DRAINED


async def test_an_agent_that_never_closes_is_given_up(monkeypatch):
    monkeypatch.setattr(limits, "DAEMON_CLOSE_SLACK_S", 0.0)

    async def agent(config, *, ready, stop):
        ready(dict(READY))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        return 0

    assert await daemon(agent, drain_deadline_s="0").run() == ExitCode.NOT_DRAINED


@pytest.mark.parametrize(
    ("error", "before_ready", "after_ready"),
    [
        (ConfigError("no"), ExitCode.BAD_CONFIGURATION, ExitCode.BAD_CONFIGURATION),
        (OSError("address in use"), ExitCode.CANNOT_SERVE, ExitCode.FAILED),
        (ResourceError("no lane"), ExitCode.CANNOT_SERVE, ExitCode.FAILED),
        (PeerError("away"), ExitCode.CANNOT_SERVE, ExitCode.FAILED),
    ],
)
async def test_errors_map_to_exit_codes(error, before_ready, after_ready):
    async def never_ready(config, *, ready, stop):
        raise error

    async def breaks(config, *, ready, stop):
        ready(dict(READY))
        raise error

    assert await daemon(never_ready).run() == before_ready
    assert await daemon(breaks).run() == after_ready


@pytest.mark.parametrize(("role", "needed"), [("prefill", "client_keys"), ("decode", "server_key")])
async def test_a_key_without_those_of_the_others_is_a_bad_configuration(
    tmp_path, caplog, role, needed
):
    """Its agent would let nobody in, or know nobody: it does not start."""
    secret, _ = keys.generate(tmp_path, "a")
    flags = {"key_file": str(secret), "bind": "tcp://127.0.0.1:0"}
    settings = config.resolve(role, {**flags, "socket_path": str(tmp_path / "a.sock")}, {})
    agent = config.agent_config(role, settings)
    assert await Daemon(role, settings, agent, run_agent).run() == ExitCode.BAD_CONFIGURATION
    [failed] = [record for record in caplog.records if record.message == "failed"]
    assert f"key_file is '{secret}' and {needed} is not set" in failed.fields["text"]


def test_a_lane_of_no_build_is_a_bad_configuration(capsys):
    assert main("decode", ["--lanes", "rdma"]) == ExitCode.BAD_CONFIGURATION
    assert "lanes = ['rdma'] (--lanes): no lane 'rdma' in this build" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_address_that_is_none_is_a_bad_configuration(capsys, role):
    assert main(role, ["--bind", "tcp://127.0.0.1"]) == ExitCode.BAD_CONFIGURATION
    assert "bind = 'tcp://127.0.0.1' (--bind): expected tcp://HOST" in capsys.readouterr().err


def test_the_command_line_comes_from_the_table():
    text = parser("decode").format_help()
    for row in config.settings_of("decode"):
        assert row.flag in text
        assert row.variable in text
    assert "--client-keys" not in text


def test_flags_keep_the_names_of_the_table():
    flags = vars(parser("prefill").parse_args(["--bind", "tcp://127.0.0.1:0", "--insecure"]))
    assert flags == {"bind": "tcp://127.0.0.1:0", "insecure": "true"}


def test_the_ready_file_is_written_whole(tmp_path):
    write_ready_file(tmp_path / "ready", {"addresses": []})
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]

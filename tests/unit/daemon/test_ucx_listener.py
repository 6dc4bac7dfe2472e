"""A UCX port trusts whoever reaches it: the daemon at its start, doctor, status say it in red."""

import argparse
import logging
import sys

import pytest

from pdxfer.cli import doctor, status
from pdxfer.cli.doctor import Finding
from pdxfer.daemon import config, log
from pdxfer.daemon.run import Daemon
from pdxfer.fabric.lanes import library_lanes
from pdxfer.fabric.ucx_listener import LISTENING_LANES, listener_warning
from pdxfer.local.messages import AgentStatus

SAID = "can end the daemon with one packet"
RED = "\x1b[31m"


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def terminal(request, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: request.param)
    monkeypatch.setattr(log.os, "isatty", lambda file: request.param)
    return request.param


def test_every_ucx_lane_listens_and_no_other_is_accused():
    assert set(LISTENING_LANES) == set(library_lanes("ucx")) == {"cma", "tcp"}
    assert "lanes cma, tcp:" in listener_warning(["other", "cma", "tcp"])
    assert listener_warning(["other"]) == ""


@pytest.mark.parametrize("lanes", [("tcp",), ("cma",)])
async def test_the_daemon_says_it_at_its_start(lanes, terminal, caplog):
    async def serve(config, *, ready, stop):
        return 0

    with caplog.at_level(logging.INFO, logger="pdxfer.daemon"):
        daemon = Daemon("decode", config.resolve("decode", {"lanes": lanes}, {}), None, serve)
        serving = daemon._serve()
        daemon._stop.set()
        await serving
    (record,) = [r for r in caplog.records if r.getMessage() == "ucx_listener"]
    assert record.levelno == logging.WARNING
    line = log.TextFormatter().format(record)
    assert SAID in line
    assert line.startswith(RED) == terminal
    assert (log.JsonFormatter().format(record)).count(SAID) == 1


@pytest.mark.parametrize("good", [True, False])
def test_doctor_says_it_of_lanes_that_can_serve(good, terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor, "lane_works", lambda lane, ucx: Finding(lane, good, "", (lane,)))
    doctor.run(argparse.Namespace(lane=["tcp"], ucx="auto"))
    out = capsys.readouterr().out
    assert (SAID in out) == good
    assert (RED in out) == (good and terminal)


@pytest.mark.parametrize("lanes", [["tcp"], []])
@pytest.mark.parametrize("as_json", [True, False])
def test_status_says_it(as_json, lanes, terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    answer = AgentStatus(
        version="1", role="prefill", pid=1, incarnation=b"", addresses=[], lanes=lanes,
        lanes_in_use=[], ucx_version="", workers=[], live_transfers=0, transfers=[],
        stopping=False, request=1,
    )  # fmt: skip
    monkeypatch.setattr(status, "ask", lambda path, timeout_s: answer)
    status.run(argparse.Namespace(role="prefill", socket_path="s", json=as_json, timeout_s=1.0))
    out = capsys.readouterr().out
    assert (SAID in out) == bool(lanes)
    assert (RED in out) == (bool(lanes) and terminal and not as_json)

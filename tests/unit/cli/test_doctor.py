"""The doctor: a missing piece is named, and decides the exit code."""

import argparse

import pytest

from pdxfer.cli import doctor
from pdxfer.cli.doctor import Finding


@pytest.fixture
def stub(monkeypatch):
    def use(*findings):
        monkeypatch.setattr(doctor, "CHECKS", tuple(lambda f=f: f for f in findings))
        monkeypatch.setattr(
            doctor, "lane_works", lambda lane, ucx: Finding(lane, True, "", (lane,))
        )

    return use


def ask(*lanes):
    return doctor.run(argparse.Namespace(lane=list(lanes), ucx="auto"))


def test_all_is_well(stub, capsys):
    stub(Finding("uvloop", True, "1.0", ("tcp", "cma")))
    assert ask() == 0
    assert "lanes that can serve here: cma, tcp" in capsys.readouterr().out


def test_a_lane_that_cannot_work_is_named(stub, capsys):
    stub(Finding("process_vm_writev", False, "Operation not permitted", ("cma",)))
    assert ask() == 1
    out = capsys.readouterr().out
    assert "BAD  process_vm_writev" in out
    assert "cannot serve here: cma" in out


def test_a_lane_not_asked_for_does_not_fail(stub, capsys):
    stub(Finding("process_vm_writev", False, "Operation not permitted", ("cma",)))
    assert ask("tcp") == 0
    out = capsys.readouterr().out
    assert "note process_vm_writev" in out
    assert "lanes that cannot serve here: cma\nlanes that can serve here: tcp\n" in out


@pytest.mark.parametrize("asked", ["tcp", "cma"])
def test_every_lane_that_can_serve_is_told_whichever_was_asked_for(stub, capsys, asked):
    stub(Finding("uvloop", True, "1.0", ("tcp", "cma")))
    assert ask(asked) == 0
    out = capsys.readouterr().out
    assert "ok   cma" in out
    assert "lanes that can serve here: cma, tcp" in out


def test_a_note_does_not_fail(stub, capsys):
    stub(Finding("zeromq", False, "without CURVE"))
    assert ask() == 0
    assert "note zeromq" in capsys.readouterr().out


@pytest.mark.parametrize("check", doctor.CHECKS)
def test_each_check_runs_here(check):
    finding = check()
    assert finding.name
    assert finding.text

"""Descriptors: raised at the start, and a word when they become few."""

import asyncio
import logging
import os
import resource

import pytest

from pdxfer import limits
from pdxfer.cli import doctor
from pdxfer.daemon import config, descriptors
from pdxfer.daemon.descriptors import DescriptorWatch, raise_limit, watch_descriptors
from pdxfer.daemon.run import Daemon


@pytest.fixture
def limit(monkeypatch):
    held = {"soft": 1024, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (held["soft"], held["hard"]))
    monkeypatch.setattr(
        resource, "setrlimit", lambda which, pair: held.update(soft=pair[0], hard=pair[1])
    )
    return held


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 1 << 20),
        (1024, 1 << 30, 1 << 20),
        (1 << 22, 1 << 30, 1 << 22),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1 << 20),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one(limit, soft, hard, then):
    limit.update(soft=soft, hard=hard)
    assert raise_limit() == then
    assert limit["hard"] == hard


async def test_a_daemon_raises_it_at_its_start(limit):
    async def serve(config, *, ready, stop):
        assert limit["soft"] == 4096
        return 0

    daemon = Daemon("decode", config.resolve("decode", {}, {}), None, serve)
    daemon._stop.set()
    await daemon._serve()
    assert limit["soft"] == 4096


def test_few_descriptors_are_told_once_and_enough_again_too(caplog):
    watch = DescriptorWatch(100)
    with caplog.at_level(logging.INFO, logger="pdxfer.daemon"):
        for used in (10, 79, 80, 99, 100, 85, 79, 10, 90):
            watch.look(used)
    told = [(r.getMessage(), r.levelno, r.fields["open"]) for r in caplog.records]
    assert told == [
        ("descriptors_few", logging.WARNING, 80),
        ("descriptors_enough", logging.INFO, 79),
        ("descriptors_few", logging.WARNING, 90),
    ]


@pytest.mark.parametrize("none_left", [False, True])
async def test_a_daemon_looks_by_itself_also_when_none_is_left(none_left, monkeypatch, caplog):
    if none_left:

        def refuse(path):
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(descriptors.os, "listdir", refuse)
    monkeypatch.setattr(limits, "DESCRIPTORS_CHECK_S", 0.0)
    few = len(os.listdir("/proc/self/fd")) if not none_left else 10
    with caplog.at_level(logging.WARNING, logger="pdxfer.daemon"):
        watching = asyncio.ensure_future(watch_descriptors(few))
        for _ in range(5):
            await asyncio.sleep(0)
        watching.cancel()
    assert caplog.records[0].getMessage() == "descriptors_few"


@pytest.mark.parametrize(("hard", "good"), [(4096, False), (1 << 16, True)])
def test_doctor_names_both_limits(limit, hard, good):
    limit["hard"] = hard
    finding = doctor._descriptors()
    assert finding.good == good
    assert f"1024, which daemons raise to {hard};" in finding.text
    assert ("LimitNOFILE" in finding.text) == (not good)

"""What a peer tells again costs nothing; what it tells at once is bounded."""

import msgspec
import pytest

from pdxfer import limits
from pdxfer.errors import RemoteProtocolError
from pdxfer.layout import Rank, token_major
from pdxfer.protocol import told
from pdxfer.protocol.told import ToldWorkers, Verdicts
from pdxfer.protocol.workers import Worker
from tests.support.cluster import Cluster


def layout(layers=2, **changes):
    settings = {"kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 16, "dtype": "bfloat16"}
    return token_major(layers=range(layers), **{**settings, **changes})


def worker(number=0, of=None):
    return Worker(number, "", Rank(), of or layout(), "allow", ())


@pytest.fixture
def counted(monkeypatch):
    """How often a layout was checked, and a pair judged."""
    calls = {"from_info": 0, "judge": 0}

    def count(name):
        real = getattr(told, name)

        def call(*args):
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(told, name, call)

    count("from_info")
    count("judge")
    return calls


def test_a_worker_told_again_in_the_same_words_is_not_checked_again(counted):
    known = ToldWorkers()
    infos = [worker(0).info(), worker(1).info()]
    [first] = known.take(infos)
    [again] = known.take([msgspec.structs.replace(info) for info in infos])
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True]
    assert counted["from_info"] == 2
    [changed] = known.take([infos[0], worker(1, layout(pages=32)).info()])
    assert changed[0] is first[0]
    assert changed[1].layout.groups[0].pages == 32
    known.take([infos[0]])
    known.take(infos)  # what was left out meanwhile is forgotten
    assert counted["from_info"] == 4


def test_a_message_with_too_many_planes_is_refused_before_it_is_checked(counted, monkeypatch):
    monkeypatch.setattr(limits, "TOLD_PLANES_MAX", 7)
    known = ToldWorkers()
    infos = [worker(0).info(), worker(1).info()]  # four planes each
    with pytest.raises(RemoteProtocolError, match="8 planes together, at most 7"):
        known.take(infos[:1], infos[1:])
    assert counted["from_info"] == 0
    known.take(infos[:1])


def test_a_verdict_is_kept_while_nobody_of_it_changes(counted, monkeypatch):
    monkeypatch.setattr(limits, "VERDICTS_KEPT_MAX", 2)
    kept, sources, destination = Verdicts(), {"a": worker(0)}, worker(0)
    first = kept.judge("x", sources, destination)
    assert kept.judge("x", dict(sources), destination) is first
    assert counted["judge"] == 1
    kept.judge("x", {"a": worker(0)}, destination)
    kept.judge("x", {"b": sources["a"]}, destination)
    kept.judge("x", sources, worker(0))
    assert counted["judge"] == 4
    for name in ("y", "z"):
        kept.judge(name, sources, destination)
    kept.judge("x", sources, destination)  # the least used gave way
    assert counted["judge"] == 7


def test_a_worker_that_comes_costs_its_own_layout_and_pairs_alone(counted):
    cluster = Cluster(0)
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.attach(0, layout())
    decode.attach(0, layout())
    cluster.join(decode, prefill)
    cluster.run()
    now = cluster.now
    decode.machine.receive(0, 1, 0, ("tcp://prefill:1",), deadline=now + 60, now=now)
    decode.pump()
    cluster.run()
    before = dict(counted)
    decode.attach(1, layout(pages=32))
    cluster.run()
    # prefill checks and judges the one that came; decode is told the old ones again
    assert counted["from_info"] == before["from_info"] + 1
    assert counted["judge"] == before["judge"] + 1

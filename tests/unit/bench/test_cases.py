"""What the bench moves: as many runs as it says, no two touching, gaps known."""

import numpy as np
import pytest

from pdxfer.bench.cases import all_cases, one_page


@pytest.fixture(params=[0, 1, 2])
def case(request):
    return all_cases(quick=True)[request.param]


def test_runs_are_as_many_and_as_long_as_the_name_says(case):
    runs = case.batches.runs
    count = int(case.name.rpartition("x ")[2].replace(",", ""))
    unit = {"2 MiB": 2 << 20, "32 KiB": 32 << 10, "2 KiB": 2 << 10}[case.name.partition(" x")[0]]
    assert len(runs) == count == case.runs_expected
    assert set(runs[:, 4].tolist()) == {unit}
    assert case.length_bytes == count * unit


def test_gaps_and_runs_are_the_whole_pool_once(case):
    covered = np.zeros(case.memory_bytes, np.uint8)
    starts = case.bases(0).astype(np.int64)
    for _, _, region, offset, length in case.batches.runs.tolist():
        covered[starts[region] + offset : starts[region] + offset + length] += 1
    for first, end in case.gaps():
        covered[first:end] += 1
    assert covered.min() == covered.max() == 1


def test_every_process_picks_the_same_pages():
    first, second = all_cases(quick=True)[1], all_cases(quick=True)[1]
    assert np.array_equal(first.batches.runs, second.batches.runs)


def test_the_latency_page_is_32_kib():
    assert one_page().item_lens == (32 << 10,)

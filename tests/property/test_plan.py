"""Drawn pairs of layouts: every plan against the oracle of `tests.support.cell_oracle`.

PDXFER_PROPERTY_EXAMPLES sets how many pairs are drawn.
"""

import os

import numpy as np
from hypothesis import HealthCheck, given, settings

from pdxfer.layout import Pages, plan
from tests.support.cell_oracle import Transfer, check_case, single_cells
from tests.support.layout_cases import cases

EXAMPLES = int(os.environ.get("PDXFER_PROPERTY_EXAMPLES", "250"))
SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
def test_every_plan_moves_each_cell_once_and_touches_nothing_else(case):
    check_case(case)


@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
def test_tokens_without_a_page_are_skipped_and_every_other_cell_moves_once(case):
    check_case(case, skips=True)


@settings(max_examples=max(EXAMPLES // 4, 50), **SETTINGS)
@given(cases())
def test_runs_are_the_longest_that_are_contiguous_on_both_sides(case):
    """Where no two pages are neighbours, runs are as few as merging single cells gives."""
    transfer = Transfer(case)
    layout = transfer.layout
    source_layout, part = next(
        pair for pair in zip(transfer.layouts, transfer.owned, strict=True) if pair[1]
    )
    made = plan(source_layout, layout, owned=part)
    for name in {cell.group for cell in part.cells}:
        specs = [side.group_by_name[name] for side in (source_layout, layout)]
        if any(spec.pages < spec.reserved_pages + 3 for spec in specs):
            continue
        lists = [Pages([spec.reserved_pages, spec.reserved_pages + 2]) for spec in specs]
        tokens = min(2 * spec.page_size for spec in specs)
        runs = made.runs({name: lists[0]}, {name: lists[1]}, {name: (0, tokens)})
        same = specs[0].page_size == specs[1].page_size
        end = -(-tokens // specs[0].page_size) * specs[0].page_size if same else tokens
        atoms = np.concatenate(
            [
                single_cells(source_layout, layout, lists, cell, end)
                for cell in part.cells
                if cell.group == name
            ]
        )
        order = np.lexsort((atoms[:, 1], atoms[:, 0]))
        before, after = atoms[order][:-1], atoms[order][1:]
        touch = (
            (before[:, 0] == after[:, 0])
            & (before[:, 2] == after[:, 2])
            & (before[:, 1] + before[:, 4] == after[:, 1])
            & (before[:, 3] + before[:, 4] == after[:, 3])
        )
        assert len(runs) == len(atoms) - touch.sum()

"""Every pool is written into its identical twin with its own `relayout`, whatever that is."""

import pytest

torch = pytest.importorskip("torch")

from pdxfer.layout import Side, check_pair, plan  # noqa: E402
from pdxfer.layout.builders import table  # noqa: E402
from pdxfer.pool import (  # noqa: E402
    HostPool,
    HybridMambaPool,
    PageMajorPool,
    SWAPool,
    TokenMajorPool,
    UnifiedPool,
)
from tests.support.pools import FAMILIES, KINDS, SHAPE, state_pool  # noqa: E402


def check_twin(layout):
    made = plan(layout, layout, relayout=layout.relayout)
    length = sum(
        plane.cell_bytes * plane.heads * plane.rows
        for plane in layout.planes
        if layout.group_by_name[plane.group].kind == "token"
    )
    assert made.summary().bytes_per_page >= length > 0
    for tp in (1, 2):
        check_pair(Side(layout, tp, layout.relayout), Side(layout, tp, layout.relayout))


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_pools_of_one_group(make, family, kind):
    check_twin(make(FAMILIES[family][kind]).layout)


@pytest.mark.parametrize("kind", [TokenMajorPool, PageMajorPool, UnifiedPool])
def test_pools_with_a_window(make, kind):
    shape = {key: value for key, value in SHAPE.items() if key != "start_layer"}
    pool = make(
        SWAPool.of_sizes,
        **shape,
        size_swa=8,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0, 2],
        pool_class=kind,
    )
    check_twin(pool.layout)


@pytest.mark.parametrize("arrangement", ["token_major", "unified_entries"])
@pytest.mark.parametrize(("family", "kind"), [("kv", "page"), ("kv", "unified"), ("draft", "page")])
def test_pools_with_states(make, family, kind, arrangement):
    full, state = make(FAMILIES[family][kind]), make(state_pool, arrangement=arrangement)
    check_twin(make(HybridMambaPool, full_kv_pool=full, mamba_pool=state).layout)


@pytest.mark.parametrize("arrangement", table.names(table.HOST))
@pytest.mark.parametrize("family", ["kv", "draft", "sparse"])
def test_host_pools(make, family, arrangement):
    device = make(FAMILIES[family]["page"])
    check_twin(make(HostPool, device, pages=3, layout=arrangement).layout)

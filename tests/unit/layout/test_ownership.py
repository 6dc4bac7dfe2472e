import pytest

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import (
    Owned,
    OwnedCells,
    Rank,
    cover,
    mla,
    page_major,
    plan,
    token_major,
)

SHAPE = {"layers": range(2), "head_dim": 8, "page_size": 4, "pages": 9, "dtype": "bfloat16"}


def instance(tp_size, total, stages=((0, 1),), build=token_major):
    """Every (rank, layout) of an instance; heads are replicated where TP exceeds them."""
    workers = []
    for pp, layers in enumerate(stages):
        for tp in range(tp_size):
            layout = build(
                **{**SHAPE, "layers": layers},
                kv_heads=max(1, total // tp_size),
                head_first=tp * total // tp_size,
                total_kv_heads=total,
            )
            workers.append((Rank(tp=tp, tp_size=tp_size, pp=pp, pp_size=len(stages)), layout))
    return workers


def heads(owned):
    """Heads of K of layer 0, by source worker."""
    return [
        [(c.head_first, c.head_end) for c in part.cells if (c.part, c.layer) == ("k", 0)]
        for part in owned
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "receiver", "expected"),
    [
        # gather: four ranks of two heads into ranks of four
        (4, 2, 8, 0, [[(0, 2)], [(2, 4)], [], []]),
        (4, 2, 8, 1, [[], [], [(4, 6)], [(6, 8)]]),
        # scatter: two ranks of four heads into ranks of two
        (2, 4, 8, 0, [[(0, 2)], []]),
        (2, 4, 8, 1, [[(2, 4)], []]),
        (2, 4, 8, 3, [[], [(6, 8)]]),
        # fewer heads than ranks at decode
        (1, 4, 2, 0, [[(0, 1)]]),
        (1, 4, 2, 2, [[(1, 2)]]),
        # fewer heads than ranks at prefill: one of the replicas, by receiver
        (4, 1, 2, 0, [[(0, 1)], [], [(1, 2)], []]),
        (4, 2, 2, 1, [[], [], [], [(1, 2)]]),
        (4, 4, 2, 0, [[(0, 1)], [], [], []]),
        (4, 4, 2, 1, [[], [(0, 1)], [], []]),
    ],
)
def test_heads_by_attention_tp(prefill, decode, total, receiver, expected):
    owned = cover(instance(prefill, total), instance(decode, total)[receiver])
    assert heads(owned) == expected


def test_stages_owe_their_layers():
    owned = cover(instance(1, 2, stages=((0,), (1,))), instance(1, 2)[0])
    assert [sorted({c.layer for c in part.cells}) for part in owned] == [[0], [1]]
    owned = cover(instance(1, 2), instance(1, 2, stages=((0,), (1,)))[1])
    assert {c.layer for c in owned[0].cells} == {1}


def test_replicated_latents_are_spread_over_receivers():
    def layouts(tp_size):
        layout = mla(layers=[0], kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, pages=9,
                     dtype="bfloat16")  # fmt: skip
        return [(Rank(tp=tp, tp_size=tp_size), layout) for tp in range(tp_size)]

    source = layouts(4)
    owners = [
        [bool(part) for part in cover(source, destination)].index(True)
        for destination in layouts(8)
    ]
    assert owners == [0, 1, 2, 3, 0, 1, 2, 3]


def test_order_of_workers_does_not_matter():
    source, destination = instance(4, 8), instance(1, 8)[0]
    turned = cover(source[::-1], destination)
    assert turned[::-1] == cover(source, destination)


def test_what_nobody_holds_is_named():
    source = instance(2, 4)
    source[1] = (source[1][0], source[0][1])
    with pytest.raises(LayoutMismatchError) as raised:
        cover(source, instance(1, 4)[0])
    assert "(group full, part k, layer 0, heads 2-3)" in str(raised.value)
    assert raised.value.fields["missing"].startswith("prefill=none, decode=(group full")


def test_layers_that_only_prefill_has_are_named():
    source = instance(1, 2, stages=((0, 1), (2, 3)))
    with pytest.raises(LayoutMismatchError, match=r"part k, layer 2.*decode lacks"):
        cover(source, instance(1, 2)[0])


def test_ignored_parts_are_not_owed():
    layout = mla(layers=[0, 1], kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, pages=9,
                 dtype="bfloat16")  # fmt: skip
    with pytest.raises(LayoutMismatchError):
        cover(instance(1, 2), (Rank(), layout))
    owned = cover([(Rank(), layout)], (Rank(), layout), ignore_parts=("rope",))
    assert {c.part for c in owned[0].cells} == {"latent"}


def test_the_whole_instance_is_needed():
    source = instance(4, 8)
    with pytest.raises(ConfigError, match="3 of 4"):
        cover(source[:3], instance(1, 8)[0])
    with pytest.raises(ConfigError, match="twice"):
        cover([source[0], source[0], *source[2:]], instance(1, 8)[0])
    with pytest.raises(ConfigError, match="different instances"):
        cover([source[0], *instance(2, 8)], instance(1, 8)[0])
    with pytest.raises(ConfigError, match="none"):
        cover([], instance(1, 8)[0])


def test_plans_of_a_cover_hold_only_what_is_owed():
    source, destination = instance(4, 8, build=page_major), instance(2, 8)[1]
    owned = cover(source, destination)
    plans = [
        plan(layout, destination[1], owned=part)
        for (_, layout), part in zip(source, owned, strict=True)
    ]
    assert [made.empty for made in plans] == [True, True, False, False]
    assert plans[0].length_bytes({"full": (0, 8)}) == 0
    assert len(plans[0].runs([1, 2], [1, 2], (0, 8))) == 0
    assert plans[2].length_bytes({"full": (0, 8)}) == 8 * 2 * 2 * 2 * 16
    assert len({made.digest for made in plans}) == 4


def test_owning_what_the_source_lacks_is_refused():
    source, destination = instance(2, 4)[0][1], instance(1, 4)[0][1]
    with pytest.raises(LayoutMismatchError, match="heads 0-3"):
        plan(source, destination, owned=Owned((OwnedCells("full", "k", 0, 0, 4),)))
    with pytest.raises(LayoutMismatchError, match="layer 9"):
        plan(source, destination, owned=Owned((OwnedCells("full", "k", 9, 0, 1),)))

"""Every layout of the catalog has the numbers that it always had."""

import pytest

from pdxfer.layout.builders.catalog import catalog
from tests.golden.layout_numbers import (
    HEADS,
    HEADS_SHAPE,
    KEYS_SHAPE,
    LATENT,
    LATENT_SHAPE,
    OTHERS,
    STATES,
    STATES_SHAPE,
)

SLOT, HEAD = 3 * 32 + 1, 3


def numbers(layout, *cells):
    places = (layout.locate(*cell) for cell in cells)
    return (len(layout.regions), layout.item_lens[0], *places, layout.fingerprint.hex()[:16])


@pytest.mark.parametrize("name", HEADS)
def test_keys_and_values(name):
    parts = {"mxfp8": ("k", "v_scale"), "k_only": ("index_k",)}.get(name, ("k", "v"))
    shape = KEYS_SHAPE if name == "k_only" else {**HEADS_SHAPE, **OTHERS.get(name, {})}
    layout = catalog()[name].heads(**shape)
    assert numbers(layout, *((part, 5, SLOT, HEAD) for part in parts)) == HEADS[name]


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name):
    layout = catalog()[name].latent(**LATENT_SHAPE)
    assert numbers(layout, ("latent", 5, SLOT), ("rope", 5, SLOT)) == LATENT[name]


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    layout = catalog()[name].states(**STATES_SHAPE)
    assert numbers(layout, ("conv.0", 5, 3, 9), ("temporal", 5, 3, 2)) == STATES[name]

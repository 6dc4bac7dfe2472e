"""The table of orders: what an order means, and that a layout is in every list or is refused."""

import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest

from pdxfer import layout as layouts
from pdxfer.cli.main import main
from pdxfer.cli.plan.keys import layout_names
from pdxfer.errors import ConfigError
from pdxfer.layout import arranged, mla, token_major
from pdxfer.layout.builders import table
from pdxfer.layout.builders.axes import check_order, strided
from pdxfer.layout.builders.catalog import catalog
from pdxfer.layout.builders.shapes import kv_shape
from tests.golden.layout_numbers import HEADS, LATENT, STATES
from tests.support import layout_cases, layout_page
from tests.support.fixed_cases import check, group_of, side_of

PAGE = Path(__file__).resolve().parents[3] / "docs/layouts.md"
SHAPE = {"layers": [3, 9, 4], "kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 5}
SHAPE["dtype"] = "uint8"
MADE_UP = "|HBTLN"


def lacks():
    """By layout: the lists that it should be in and is not."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = {}
    for name, entry in catalog().items():
        pairs = ((entry.heads, HEADS), (entry.latent, LATENT), (entry.states, STATES))
        planned = entry.states is not None or name in layout_names()
        there = {
            "a golden number": all(made is None or name in known for made, known in pairs),
            "docs/layouts.md": layout_page.line(entry) in lines,
            "the cases of the tests": name in layout_cases.built(),
            "pdxfer plan": planned,
        }
        if missing := [where for where, listed in there.items() if not listed]:
            found[name] = missing
    return found


def strangers():
    """Public builders that are in no list: functions that make a layout of layers."""
    found = []
    for name in layouts.__all__:
        made = getattr(layouts, name)
        if inspect.isclass(made) or not callable(made) or name == "arranged":
            continue
        takes = inspect.signature(made).parameters
        if takes.keys() & {"layers", "shape"} and name not in catalog():
            found.append(name)
    return found


@pytest.fixture
def made_up(monkeypatch):
    row = table.Row("made_up", MADE_UP, "", table.DEVICE, "Heads outside of pages.")
    monkeypatch.setitem(table.ROWS, "made_up", row)
    return row


def test_every_layout_is_in_every_list():
    assert lacks() == {}


def test_every_public_builder_is_a_layout():
    assert strangers() == []


def test_a_public_builder_in_no_list_is_refused(monkeypatch):
    def block_major(*, layers):
        return token_major(**{**SHAPE, "layers": layers})

    monkeypatch.setattr(layouts, "block_major", block_major, raising=False)
    monkeypatch.setattr(layouts, "__all__", [*layouts.__all__, "block_major"])
    assert strangers() == ["block_major"]


def test_a_made_up_row_is_made_planned_and_listed(made_up, tmp_path, capsys):
    assert (
        arranged("made_up", **SHAPE).fingerprint == strided(MADE_UP, kv_shape(**SHAPE)).fingerprint
    )
    file = tmp_path / "a.toml"
    file.write_text(
        'layout = "made_up"\nlayers = 2\ntotal_kv_heads = 4\nhead_dim = 8\npage_size = 16\n'
        'dtype = "bfloat16"\n'
    )
    assert main(["plan", "--prefill", str(file), "--decode", str(file)]) == 0
    assert capsys.readouterr().out.startswith("prefill: made_up, page size 16, TP 1")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "made_up" in capsys.readouterr().out
    assert f"| `made_up` | device | `\\{MADE_UP}` |" in layout_page.table()
    assert "made_up" in layout_cases.arrangements()["kv"]
    assert "made_up" in layout_cases.arrangements()["draft"]
    assert "made_up" not in layout_cases.arrangements()["mla"]


@pytest.mark.parametrize("other", ["token_major", "page_unified", "made_up"])
def test_a_made_up_row_moves_every_cell(made_up, other):
    group = group_of("kv")
    check(group, side_of(group, "made_up", 32, tp_size=2), side_of(group, other, 16, tp_size=4), 2)
    check(group, side_of(group, other, 16), side_of(group, "made_up", 8))


def test_a_made_up_row_is_refused_where_its_golden_number_is_missing(made_up, monkeypatch):
    assert lacks() == {"made_up": ["a golden number", "docs/layouts.md"]}
    monkeypatch.setitem(HEADS, "made_up", (1, 0, (0, 0), (0, 0), ""))
    assert lacks() == {"made_up": ["docs/layouts.md"]}


ORDERS = sorted(
    {row.order for row in table.ROWS.values() if not row.grouped and not row.padded}
    | {MADE_UP, "L|BNTH", "LT|HNB", "|NTHLB", "T|LBHN"}
)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_an_array_of_these_axes(order):
    """Cells are where numpy has them in one array of the axes, content innermost."""
    layout = strided(order, kv_shape(**SHAPE))
    outside, inside = order.split("|")
    side_by_side = "T" not in order
    sizes = {"T": 2, "L": 3, "B": 5, "N": 4, "H": 2}
    held = 8 * (2 if side_by_side else 1)
    regions = int(np.prod([sizes[axis] for axis in outside], dtype=int))
    array = np.arange(np.prod([sizes[axis] for axis in inside]) * held)
    array = array.reshape([*(sizes[axis] for axis in inside), held])
    assert len(layout.regions) == regions
    assert {region.length_bytes for region in layout.regions} == {array.size}
    numbers = np.arange(regions).reshape([sizes[axis] for axis in outside])
    for part, layer, slot, head in itertools.product(range(2), range(3), range(20), range(2)):
        at = {"T": part, "L": layer, "B": slot // 4, "N": slot % 4, "H": head}
        region = numbers[tuple(at[axis] for axis in outside)]
        content = array[tuple(at[axis] for axis in inside)]
        offset = content[8 * part if side_by_side else 0]
        assert layout.locate("kv"[part], SHAPE["layers"][layer], slot, head) == (region, offset)


def test_padding_is_of_what_follows():
    shape = {**SHAPE, "kv_heads": 1, "layers": [3], "head_dim": 16, "v_head_dim": 32}
    layout = strided("|B+NLTH", kv_shape(**shape))
    assert layout.item_lens == (192,)  # four rows of 48
    layout = strided("|BN+LTH", kv_shape(**shape))
    assert layout.item_lens == (4 * 64,)


@pytest.mark.parametrize(
    "order",
    [
        "", "BLTNH", "|BLTNHH", "|BTNH", "|LTNH", "|BLTH", "B|LTNH", "H|BLTN", "|BLTNX", "|BGLN",
        "||BLN",
    ],
)  # fmt: skip
def test_what_is_no_order_is_refused(order):
    with pytest.raises(ConfigError, match=r"order is .* as in TL\|BNH"):
        check_order(order)


def test_an_order_without_heads_has_one():
    with pytest.raises(ConfigError, match="part k has 2 heads; an order without H has one"):
        strided("TL|BN", kv_shape(**SHAPE))


def test_tiles_beside_rows_need_an_order_with_rows_inside():
    shape = kv_shape(**SHAPE).tiled(("k",), "some_tile")
    assert strided("|BLTNH", shape).item_lens == (3 * 2 * 2 * 4 * 8,)
    with pytest.raises(ConfigError, match="part k has token rows where others have tiles"):
        strided("|BNLTH", shape, name="entries")


def test_names_that_are_none():
    for name in ("page_last", 5, ["token_major"]):
        with pytest.raises(
            ConfigError, match=r"arrangement is .*; it must be one of token_major, "
        ):
            arranged(name, **SHAPE)
    with pytest.raises(ConfigError, match=r"arranged\(\) needs layers, "):
        arranged("page_head")
    with pytest.raises(ConfigError, match=r"arranged\(\) takes no block_size; did you mean page_s"):
        arranged("page_head", block_size=4)


def test_only_entries_lie_in_a_longer_buffer():
    with pytest.raises(ConfigError, match="length_bytes is 4096 and the arrangement is page_major"):
        arranged("page_major", **SHAPE, length_bytes=4096)
    latent = {"layers": [0], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "page_size": 4, "pages": 2}
    with pytest.raises(
        ConfigError, match="length_bytes is 4096 and the arrangement is token_major"
    ):
        mla(**latent, dtype="bfloat16", length_bytes=4096)
    with pytest.raises(ConfigError, match="head_groups=2: only page_unified groups heads"):
        arranged("page_head", **SHAPE, head_groups=2)


@pytest.mark.parametrize("name", table.ROWS)
def test_host_orders_have_no_sink_page(name):
    shape = {**SHAPE, "head_dim": 16}
    usual = 0 if table.ROWS[name].home == table.HOST else 1
    assert arranged(name, **shape).groups[0].reserved_pages == usual
    assert arranged(name, **shape, reserved_pages=3).groups[0].reserved_pages == 3


def test_the_page_of_layouts_is_what_is_generated():
    assert PAGE.read_text(encoding="utf-8") == layout_page.table(), "run `make generated`"

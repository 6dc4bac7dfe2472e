import dataclasses

import pytest

from pdxfer.errors import ConfigError, RemoteProtocolError
from pdxfer.layout import (
    Group,
    KVLayout,
    Plane,
    RegionSpec,
    combine,
    head_major,
    mla,
    page_major,
    records,
    token_major,
    unified_entries,
)

SHAPE = {
    "layers": range(3),
    "kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "pages": 9,
    "dtype": "bfloat16",
}
MLA = mla(
    layers=[1],
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    page_size=4,
    pages=9,
    dtype="float16",
    group="b",
)
LAYOUTS = [
    *(build(**SHAPE) for build in (token_major, head_major, page_major, unified_entries)),
    combine(token_major(**SHAPE, model="m@1"), MLA),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wire_form_is_inverse(layout):
    again = KVLayout.from_wire(layout.to_wire())
    assert again == layout
    assert again.fingerprint == layout.fingerprint


def test_wire_form_is_plain_values():
    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(plain(item) for item in value)
        return type(value) in (int, str, bool)

    assert plain(LAYOUTS[-1].to_wire())


def test_unknown_fields_of_a_newer_peer_are_skipped():
    wire = {**LAYOUTS[0].to_wire(), "later": 1}
    assert KVLayout.from_wire(wire) == LAYOUTS[0]


@pytest.mark.parametrize("name", ["groups", "planes", "regions", "dtype", "model",
                                  "unified_memory", "relayout"])  # fmt: skip
@pytest.mark.parametrize("value", [None, -1, 1.5, {"a": 1}, b"x", ["x"], [[1]], [[None] * 16]])
def test_every_field_is_typed(name, value):
    wire = LAYOUTS[0].to_wire()
    with pytest.raises(RemoteProtocolError, match=name):
        KVLayout.from_wire({**wire, name: value})
    del wire[name]
    with pytest.raises(RemoteProtocolError, match=f"{name} is missing"):
        KVLayout.from_wire(wire)


@pytest.mark.parametrize("obj", [None, 3, [], "layout", b""])
def test_what_is_no_map_is_refused(obj):
    with pytest.raises(RemoteProtocolError):
        KVLayout.from_wire(obj)


@pytest.mark.parametrize("at", range(16))
@pytest.mark.parametrize("value", [None, -1, 1 << 63, 1.0, True, b"", "", "no such"])
def test_every_value_of_a_plane_is_typed(at, value):
    wire = token_major(**SHAPE).to_wire()
    wire["planes"][0][at] = value
    is_tile_name = at == 15 and value == ""
    if is_tile_name:
        assert KVLayout.from_wire(wire)
        return
    if at == 1 and value == "no such":
        wire["planes"][0][at] = "no such part"
    with pytest.raises(RemoteProtocolError):
        KVLayout.from_wire(wire)


def test_too_many_planes_are_refused_before_they_are_read():
    wire = {**LAYOUTS[0].to_wire(), "planes": [None] * 70_000}
    with pytest.raises(RemoteProtocolError, match="planes has 70000"):
        KVLayout.from_wire(wire)


class TestSoundness:
    def plane(self, **changes):
        return dataclasses.replace(token_major(**SHAPE).planes[0], **changes)

    def layout(self, *planes):
        return dataclasses.replace(token_major(**SHAPE), planes=planes)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"base": 1}, "ends at byte 1153"),
            ({"base": (1 << 63) - 1}, "ends at byte"),
            ({"page_stride": (1 << 63) - 1}, "ends at byte"),
            ({"cell_bytes": 17}, "overlap"),
            ({"row_stride": 16}, "overlap"),
            ({"page_stride": 64}, "overlap"),
            ({"head_stride": 0}, "overlap"),
            ({"region": 6}, "region 6"),
            ({"rows": 3}, "3 rows"),
            ({"row_kind": "whole"}, "row_kind"),
            ({"row_kind": "tile"}, "tile"),
            ({"tile": "x"}, "tile"),
            ({"heads_total": 1}, "total_kv_heads"),
            ({"head_first": 1}, "total_kv_heads"),
            ({"group": "other"}, "no group"),
            ({"dtype": "int3"}, "dtype"),
            ({"base": -1}, "base"),
            ({"heads": 0}, "heads"),
        ],
    )
    def test_a_map_that_is_not_sound_is_refused(self, changes, named):
        with pytest.raises(ConfigError, match=named):
            self.layout(self.plane(**changes))

    def test_two_planes_may_not_hold_the_same_head(self):
        with pytest.raises(ConfigError, match="two planes hold head 0"):
            self.layout(self.plane(), self.plane(region=1))

    def test_planes_of_one_part_and_layer_may_split_its_heads(self):
        first = self.plane(heads=1, row_stride=16, page_stride=64)
        second = dataclasses.replace(first, head_first=1, region=1)
        layout = self.layout(second, first)
        assert layout.locate("k", 0, 5, 1) == (1, 5 * 16)

    def test_state_groups_have_pages_of_one_and_whole_rows(self):
        group = Group("state", 1, 8, 1, kind="state")
        plane = Plane("state", "conv.0", 0, 0, 0, 96, 24, 4, 0, 6, 6, 4, 4, "float32", "whole")
        layout = KVLayout((group,), (plane,), (RegionSpec(8 * 96, 96),), "float32")
        assert layout.locate("conv.0", 0, 3, head=2, row=1) == (0, 3 * 96 + 24 + 8)
        with pytest.raises(ConfigError, match="row 4"):
            layout.locate("conv.0", 0, 3, head=2, row=4)
        with pytest.raises(ConfigError, match="page_size"):
            dataclasses.replace(layout, groups=(dataclasses.replace(group, page_size=2),))

    def test_tiles_are_located_by_page_and_head(self):
        group = Group("full", 4, 3)
        plane = Plane("full", "k", 0, 0, 0, 64, 0, 32, 0, 2, 2, 32, 1, "uint8", "tile", "vnni.4")
        layout = KVLayout((group,), (plane,), (RegionSpec(3 * 64, 64),), "uint8")
        assert layout.locate("k", 0, 6, 1) == layout.locate("k", 0, 4, 1) == (0, 96)


class TestFingerprint:
    def test_page_counts_models_and_reserved_pages_do_not_enter(self):
        one = token_major(**SHAPE)
        other = token_major(**{**SHAPE, "pages": 90}, reserved_pages=3, model="m@2")
        assert one.fingerprint == other.fingerprint
        assert len(one.fingerprint) == 32

    @pytest.mark.parametrize(
        "changes",
        [
            {"page_size": 2},
            {"dtype": "float16"},
            {"head_dim": 16},
            {"v_head_dim": 16},
            {"kv_heads": 4},
            {"layers": range(2)},
            {"layers": range(1, 4)},
            {"total_kv_heads": 4},
            {"total_kv_heads": 4, "head_first": 2},
            {"group": "swa"},
        ],
    )
    def test_what_cells_mean_and_how_they_lie_enters(self, changes):
        assert page_major(**SHAPE).fingerprint != page_major(**{**SHAPE, **changes}).fingerprint

    def test_orders_differ(self):
        assert len({layout.fingerprint for layout in LAYOUTS}) == len(LAYOUTS)

    def test_tensors_that_follow_each_other_in_one_buffer(self):
        """Where V lies behind K in one buffer depends on the page count alone."""

        def buffer(pages):
            layout = token_major(**{**SHAPE, "layers": [0], "pages": pages})
            k, v = layout.planes
            half = layout.regions[0].length_bytes
            return dataclasses.replace(
                layout,
                planes=(k, dataclasses.replace(v, region=0, base=half)),
                regions=(RegionSpec(2 * half, 128),),
            )

        assert buffer(9).fingerprint == buffer(12).fingerprint


class TestRecordsTravelWhole:
    """A field that is added to a record is on the wire, and typed, without another edit."""

    @dataclasses.dataclass(frozen=True)
    class Record:
        name: str
        count: int
        share: float
        flag: bool = False

    def test_there_and_back(self):
        record = self.Record("a", 3, 0.5, flag=True)
        assert records.as_list(record) == ["a", 3, 0.5, True]
        assert records.from_list(self.Record, records.as_list(record), "r") == record
        assert records.from_map(self.Record, {**records.as_map(record), "later": 1}, "r") == record

    @pytest.mark.parametrize(
        ("item", "text"),
        [
            (["a", 3, 0.5], r"r is no list of 4 values \(name, count, share, flag\)"),
            (["a", -1, 0.5, True], r"r\.count is -1; an int of 0 to 2\*\*63-1 is needed"),
            (["a", True, 0.5, True], r"r\.count is True"),
            ([1, 1, 0.5, True], r"r\.name is 1; a string is needed"),
            (["a", 1, float("nan"), True], r"r\.share is nan; a finite number is needed"),
            (["a", 1, 10**400, True], r"r\.share is 1000"),
            (["a", 1, 0.5, 1], r"r\.flag is 1; a boolean is needed"),
        ],
    )
    def test_what_a_peer_may_not_send(self, item, text):
        with pytest.raises(RemoteProtocolError, match=text):
            records.from_list(self.Record, item, "r")

    def test_every_plane_and_group_field_is_sent(self):
        wire = token_major(**SHAPE).to_wire()
        assert len(wire["planes"][0]) == len(dataclasses.fields(Plane))
        assert wire["groups"][0].keys() == {field.name for field in dataclasses.fields(Group)}

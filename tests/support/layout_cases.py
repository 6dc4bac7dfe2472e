"""Drawn models, instances and requests: every layout builder, TP, PP and CP, page sizes, ranges.

A group's meaning is told by a reference layout (one rank, its plainest arrangement): which parts
and layers there are, how many heads, how many bytes a cell has. Both sides then hold it in any
arrangement that the family of the group knows.
"""

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pdxfer import layout as layouts
from pdxfer.layout import KVLayout, Rank, combine, vllm_blocks, vllm_cpu, vllm_mla_blocks
from pdxfer.layout.builders import table
from pdxfer.layout.builders.draft import beside_draft, fuse_draft
from pdxfer.layout.builders.dsa import dsa
from pdxfer.layout.builders.host import host_layout
from pdxfer.layout.builders.index import k_only
from pdxfer.layout.builders.mxfp8 import mxfp8
from pdxfer.layout.builders.state import StateTensor, state, state_entries

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}
PAGE_SIZES = (1, 8, 16, 32, 64, 128)
TP_SIZES = (1, 2, 4, 8, 16)
RANKS_MAX = 16
HOST = table.names(table.HOST)
BLOCKS = table.names(table.BLOCKS)
BUILDERS = {
    "kv": ("arranged", "vllm_blocks"),
    "draft": ("arranged", "vllm_blocks"),
    "mla": ("mla", "vllm_mla_blocks"),
    "k_only": ("k_only",),
    "dsa": ("dsa",),
    "mxfp8": ("mxfp8",),
    "mxfp8_tiles": ("mxfp8",),
    "vllm_cpu": ("vllm_cpu",),
    "vectorized_5d": ("vectorized_5d",),
    "state": ("state", "state_entries"),
}
"""What makes the layouts of each family; `arranged` makes those of every row of the table."""


def arrangements():
    """Of each family, the arrangements that the table has now."""
    device, host, blocks = (
        table.names(*homes)
        for homes in ((table.DEVICE, table.ENVELOPE), (table.HOST,), (table.BLOCKS,))
    )
    hosted = ("device", *host)
    return {
        "kv": (*device, *host, *blocks),
        "draft": (*device, *host),
        "mla": table.names(*table.HOMES, latent=True),
        "k_only": hosted,
        "dsa": hosted,
        "mxfp8": hosted,
        "mxfp8_tiles": hosted,
        "vllm_cpu": tuple(order for order in blocks if order.endswith("NC")),
        "vectorized_5d": hosted,
        "state": BUILDERS["state"],
    }


def built():
    """The names of all layouts that cases are made of."""
    rows = {name for names in arrangements().values() for name in names} & table.ROWS.keys()
    return rows | {name for names in BUILDERS.values() for name in names}


ARRANGEMENTS = arrangements()
TILED = {"mxfp8_tiles": 32, "vllm_cpu": 1, "vectorized_5d": 16}
"""Families with tiles: a page size must be a multiple of this."""
FAMILIES = ("kv", "kv", "kv", "kv", "mla", "mla", "draft", "k_only", "dsa", "mxfp8", *TILED)


@dataclass
class GroupModel:
    """One group of the drawn model, and what of it a request moves."""

    name: str
    family: str
    dtype: str
    layers: tuple[int, ...]
    heads: int
    widths: tuple[int, int]
    """Elements of K and V, or of latent and rope."""
    draft_layers: tuple[int, ...] = ()
    tensors: tuple[StateTensor, ...] = ()
    """Of the whole model."""
    first: int = 0
    end: int = 1

    @property
    def all_layers(self) -> tuple[int, ...]:
        return (*self.layers, *self.draft_layers)

    def held(self, stage):
        """Its layers on a pipeline stage; the draft's go with its last one."""
        own = tuple(layer for layer in self.layers if layer in stage)
        return (*own, *self.draft_layers) if self.layers[-1] in own else own

    def content(self, rng):
        """Bytes by (part, layer): [token | page | id, row, head, byte of a cell]."""
        shape = {"page_size": 32, "pages": 3, "reserved_pages": 1}
        reference = build(self, "reference", (0, 1), self.all_layers, **shape)
        made = {}
        for (_, part, layer), planes in reference.planes_by_key.items():
            plane = planes[0]
            tokens = self.end + 2 * max(PAGE_SIZES)
            rows = plane.rows if plane.row_kind == "whole" else 1
            # a tile of the reference page size; the oracle cuts it to that of the sides
            cell = plane.cell_bytes // 32 if plane.row_kind == "tile" else plane.cell_bytes
            size = (tokens, rows, plane.heads_total, cell)
            made[part, layer] = rng.integers(0, 256, size, dtype=np.uint8)
        return made


@dataclass
class Side:
    """One instance: its sizes, and of each group the arrangement and the pages."""

    tp_size: int
    pp_size: int
    cp_size: int
    arrangements: dict[str, str]
    page_sizes: dict[str, int]
    first_tokens: dict[str, int]
    pages: dict[str, int]
    reserved: int
    stages: list[tuple[int, ...]] = field(default_factory=list)

    def ranks(self):
        sizes = (range(self.pp_size), range(self.cp_size), range(self.tp_size))
        for pp, cp, tp in itertools.product(*sizes):
            yield Rank(
                tp=tp,
                tp_size=self.tp_size,
                pp=pp,
                pp_size=self.pp_size,
                cp=cp,
                cp_size=self.cp_size,
            )

    def layout(self, groups, rank) -> KVLayout:
        stage = set(self.stages[rank.pp])
        parts = [
            build(
                group,
                self.arrangements[name],
                (rank.tp, self.tp_size),
                held,
                page_size=self.page_sizes[name],
                pages=self.pages[name],
                reserved_pages=self.reserved,
            )
            for name, group in groups.items()
            if (held := group.held(stage))
        ]
        return combine(*parts)


@dataclass
class Case:
    groups: dict[str, GroupModel]
    source: Side
    destination: Side
    receiver: int
    layers: list[int] | None
    batch_bytes: int
    own_pages_only: bool
    """Each context parallel rank lists the pages of its share alone."""
    seed: int


def heads_of_rank(total, tp, tp_size):
    """The usual split of KV heads over attention TP, replicated where there are too few."""
    if tp_size <= total:
        return tp * total // tp_size, (tp + 1) * total // tp_size - tp * total // tp_size
    return tp * total // tp_size, 1


def build(group, arrangement, tp, layers, *, page_size, pages, reserved_pages) -> KVLayout:
    """The layout of one rank's part of a group."""
    place = {"page_size": page_size, "pages": pages, "reserved_pages": reserved_pages}
    place["group"] = group.name
    if group.family == "state":
        return _state(group, arrangement, tp, layers, place)
    if group.family == "mla":
        return _mla(group, arrangement, layers, place)
    if group.family == "dsa":
        device = _dsa(group, layers, place)
        return device if arrangement in ("device", "reference") else _host(device, arrangement)
    first, heads = heads_of_rank(group.heads, *tp)
    shape = {
        "kv_heads": heads,
        "head_first": first,
        "total_kv_heads": group.heads,
        "head_dim": group.widths[0],
        "v_head_dim": group.widths[1],
        "dtype": group.dtype,
        **place,
    }
    if group.family == "draft":
        return _with_draft(group, arrangement, layers, shape)
    if group.family == "kv":
        return _kv(arrangement, {**shape, "layers": layers})
    if group.family == "vllm_cpu":
        order = "LBHNC" if arrangement == "reference" else arrangement
        return vllm_cpu(isa="vec16", order=order, layers=layers, **shape)
    device = _device_only(group, layers, shape)
    return device if arrangement in ("device", "reference") else _host(device, arrangement)


def _padded(arrangement):
    return arrangement in table.ROWS and table.ROWS[arrangement].padded


def _kv(arrangement, shape):
    if arrangement in BLOCKS:
        return vllm_blocks(order=arrangement, **shape)
    if arrangement in HOST:
        return _host(layouts.token_major(**shape), arrangement)
    return layouts.arranged("token_major" if arrangement == "reference" else arrangement, **shape)


def _host(like, arrangement):
    groups = 1
    if arrangement == "page_unified" and all(plane.heads % 2 == 0 for plane in like.planes):
        groups = 2
    group = like.groups[0]
    return host_layout(
        like,
        arrangement,
        pages=group.pages,
        head_groups=groups,
        reserved_pages=group.reserved_pages,
    )


def _with_draft(group, arrangement, layers, shape):
    own = tuple(layer for layer in layers if layer in group.layers)
    drafts = tuple(layer for layer in layers if layer in group.draft_layers)
    target = _kv("token_major" if arrangement in HOST else arrangement, {**shape, "layers": own})
    if not drafts:
        return _host(target, arrangement) if arrangement in HOST else target
    if _padded(arrangement):
        return fuse_draft(target, layouts.arranged(arrangement, **{**shape, "layers": drafts}))
    both = beside_draft(target, layouts.token_major(**{**shape, "layers": drafts}))
    return _host(both, arrangement) if arrangement in HOST else both


def _mla(group, arrangement, layers, place):
    latent, rope = group.widths
    shape = {"layers": layers, "kv_lora_rank": latent, "qk_rope_head_dim": rope, **place}
    shape["dtype"] = group.dtype
    if arrangement in BLOCKS:
        return vllm_mla_blocks(order=arrangement, **shape)
    if arrangement in HOST:
        return _host(layouts.mla(**shape), arrangement)
    how = "token_major" if arrangement == "reference" else arrangement
    return layouts.mla(arrangement=how, **shape)


def _dsa(group, layers, place):
    """Every second layer has an index; floats of 8 bits lie packed."""
    return dsa(
        layers=layers,
        kv_lora_rank=group.widths[0],
        qk_rope_head_dim=group.widths[1],
        index_layers=[layer for layer in layers if group.layers.index(layer) % 2 == 0],
        packed=group.dtype == "float8_e4m3fn",
        dtype=group.dtype,
        **place,
    )


def _device_only(group, layers, shape):
    if group.family == "k_only":
        return k_only(
            layers=layers,
            heads=shape["kv_heads"],
            heads_total=group.heads,
            **{
                name: shape[name]
                for name in (
                    "head_first",
                    "head_dim",
                    "dtype",
                    "page_size",
                    "pages",
                    "reserved_pages",
                    "group",
                )
            },
        )
    if group.family == "vectorized_5d":
        return layouts.vectorized_5d(layers=layers, **shape)
    return mxfp8(layers=layers, interleaved=group.family == "mxfp8_tiles", **shape)


def _state(group, arrangement, tp, layers, place):
    rank, tp_size = tp
    tensors = [_of_rank(tensor, rank, tp_size) for tensor in group.tensors]
    made = state_entries if arrangement == "state_entries" else state
    return made(
        layers=layers,
        tensors=tensors,
        slots=place["pages"],
        reserved_slots=place["reserved_pages"],
        group=group.name,
    )


def _of_rank(tensor, tp, tp_size):
    if tensor.axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[tensor.axis] //= tp_size
    packed = tuple(size // tp_size for size in tensor.shard_groups)
    return dataclasses.replace(
        tensor, shape=tuple(shape), shard_groups=packed, tp=tp, tp_size=tp_size
    )


# -- strategies --------------------------------------------------------------------------------


@st.composite
def instance_sizes(draw, *, with_cp):
    """(tp, pp, cp) of few enough ranks."""
    tp = draw(st.sampled_from(TP_SIZES))
    pp = draw(st.sampled_from([n for n in (1, 1, 2, 3) if n * tp <= RANKS_MAX]))
    if not with_cp:
        return tp, pp, 1
    return tp, pp, draw(st.sampled_from([n for n in (1, 1, 1, 2, 3) if n * pp * tp <= RANKS_MAX]))


@st.composite
def token_groups(draw, name, layers, family):
    dtype = draw(st.sampled_from(sorted(ITEM)))
    if family.startswith("mxfp8"):
        dtype = "float8_e4m3fn"
        widths = (32 * draw(st.integers(1, 2)), 32 * draw(st.integers(1, 2)))
    elif family == "vectorized_5d":
        widths = (16, draw(st.sampled_from([8, 16])))
    elif family == "dsa":
        dtype = draw(st.sampled_from(["bfloat16", "float8_e4m3fn"]))
        widths = (128, draw(st.sampled_from([16, 64])))
    elif family == "mla":
        widths = (16 * draw(st.integers(1, 3)), 16 * draw(st.integers(1, 2)))
    else:
        some = st.sampled_from([4, 8, 16] if ITEM[dtype] > 1 else [3, 8, 16])
        width = draw(some)
        widths = (width, draw(st.one_of(st.just(width), some)))
    drafts = ()
    if family == "draft":
        drafts = tuple(range(40, 40 + draw(st.integers(1, 2))))
    first = draw(st.one_of(st.just(0), st.integers(0, 90)))
    return GroupModel(
        name=name,
        family=family,
        dtype=dtype,
        layers=layers,
        heads=1 if family in ("mla", "dsa") else draw(st.sampled_from([1, 2, 4, 8, 3])),
        widths=widths,
        draft_layers=drafts,
        first=first,
        end=first + draw(st.integers(1, 140)),
    )


@st.composite
def state_groups(draw, layers, tp_most):
    """Convolutions packed in shard groups, an outer axis, a temporal state, a replicated tensor."""
    unit = draw(st.sampled_from([1, 2]))
    packed = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    sizes = tuple(tp_most * unit * n for n in packed)
    length = sum(sizes)
    tensors = [
        StateTensor("conv.0", (length, 3), "bfloat16", 0, sizes, unit),
        StateTensor("conv.1", (3, length), "float16", 1, sizes, unit),
        StateTensor("temporal", (tp_most * packed[0], 2, 4), "float32", 0),
        StateTensor("ssm", (5, 2), "float32", None),
    ]
    kept = draw(st.sets(st.integers(0, 3), min_size=1))
    return GroupModel(
        name="state",
        family="state",
        dtype="float32",
        layers=layers,
        heads=1,
        widths=(1, 1),
        tensors=tuple(tensors[at] for at in sorted(kept)),
        first=0,
        end=draw(st.integers(1, 3)),
    )


def _cannot(group, arrangement, tp_size):
    """Arrangements that a pool of these sizes does not have."""
    if group.family == "state":
        return False
    held = {heads_of_rank(group.heads, tp, tp_size)[1] for tp in range(tp_size)}
    if _padded(arrangement) and group.family != "mla":
        rows = [n * width * ITEM[group.dtype] for n in held for width in group.widths]
        return any(row % 16 for row in rows)
    return False


@st.composite
def sides(draw, groups, sizes, page_sizes, *, aligned):
    tp_size, pp_size, cp_size = sizes
    layers = sorted({layer for group in groups.values() for layer in group.layers})
    pp_size = min(pp_size, len(layers))
    cuts = [len(layers) * n // pp_size for n in range(pp_size + 1)]
    stages = [tuple(layers[a:b]) for a, b in itertools.pairwise(cuts)]
    arrangements, firsts, pages = {}, {}, {}
    for name, group in groups.items():
        known = [a for a in ARRANGEMENTS[group.family] if not _cannot(group, a, tp_size)]
        arrangements[name] = draw(st.sampled_from(known))
        size = page_sizes[name]
        firsts[name] = 0
        if group.family != "state":
            start = group.first // size * size
            back = draw(st.integers(0, start // size)) * size
            starts = [st.just(start), st.just(start - back)]
            if name not in aligned:
                starts.append(st.integers(0, group.first))
            firsts[name] = draw(st.one_of(starts))
        pages[name] = -(-(group.end + size - firsts[name]) // size) + draw(st.integers(3, 5))
    return Side(
        tp_size=tp_size,
        pp_size=pp_size,
        cp_size=cp_size,
        arrangements=arrangements,
        page_sizes=page_sizes,
        first_tokens=firsts,
        pages=pages,
        reserved=draw(st.integers(0, 2)),
        stages=stages,
    )


@st.composite
def cases(draw):
    sizes = draw(instance_sizes(with_cp=True)), draw(instance_sizes(with_cp=False))
    layers = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))
    names = draw(st.sampled_from([["full"], ["full"], ["full", "swa"], ["full", "state"]]))
    groups = {}
    for number, name in enumerate(names):
        held = tuple(layers[number :: len(names)])
        if held and name == "state":
            groups[name] = draw(state_groups(held, max(size[0] for size in sizes)))
        elif held:
            groups[name] = draw(token_groups(name, held, draw(st.sampled_from(FAMILIES))))
    page_sizes = [{}, {}]
    for name, group in groups.items():
        if group.family == "state":
            page_sizes[0][name] = page_sizes[1][name] = 1
            continue
        least = TILED.get(group.family, 1)
        known = [size for size in PAGE_SIZES if size % least == 0]
        page_sizes[0][name] = draw(st.sampled_from(known))
        if group.family in TILED:
            page_sizes[1][name] = page_sizes[0][name]
            group.first -= group.first % page_sizes[0][name]
        else:
            some = st.one_of(st.sampled_from(known), st.just(page_sizes[0][name]))
            page_sizes[1][name] = draw(st.one_of(some, st.integers(1, 64)))
    tiled = {name for name, group in groups.items() if group.family in TILED}
    aligned = set(groups) if sizes[0][2] > 1 else tiled
    source = draw(sides(groups, sizes[0], page_sizes[0], aligned=aligned))
    destination = draw(sides(groups, sizes[1], page_sizes[1], aligned=aligned))
    ranks = destination.tp_size * destination.pp_size
    return Case(
        groups=groups,
        source=source,
        destination=destination,
        receiver=draw(st.integers(0, ranks - 1)),
        layers=draw(
            st.one_of(st.none(), st.lists(st.sampled_from(layers), min_size=1, unique=True))
        ),
        batch_bytes=draw(st.sampled_from([1, 100, 4096, 16 << 20])),
        own_pages_only=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )

"""What `pdxfer plan` compares: one side as a whole instance, from the values that describe it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdxfer import limits
from pdxfer.cli.plan.keys import builder_of, check_keys, is_latent, layout_names
from pdxfer.cli.plan.values import check_kinds, choice, layer_list, number, part_names
from pdxfer.errors import ConfigError
from pdxfer.layout import KVLayout, Rank, Side
from pdxfer.layout.validation import RELAYOUT

PAGES: Final = 1024
"""Pages of a described pool, whose number does not change a plan."""
_HELD_LAYERS_MAX: Final = 1 << 18
"""How many layers are looked at, of all TP ranks together: each has planes of its own."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One side of a pair: the layout of each of its ranks, and what it asks of the other side."""

    name: str
    """Its layout and sizes in words, as they are shown."""
    workers: tuple[tuple[Rank, KVLayout], ...]
    relayout: str
    ignore_parts: tuple[str, ...] = ()
    file: str = ""
    """The file that describes it."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """Each of its workers as a side of a comparison."""
        return tuple(
            Side(layout, rank.tp_size, self.relayout, self.ignore_parts, rank.pp_size == 1)
            for rank, layout in self.workers
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """What sizes are called where they come from, so that texts can name them."""

    tp: str = "attention_tp"
    pp: str = "pp_size"
    cp: str = "cp_size"
    heads: str = "total_kv_heads"
    layers: str = "layers"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks an instance has, along each axis.

    Raises:  ConfigError: more ranks than are served.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    terms: Terms = Terms()

    def __post_init__(self) -> None:
        count = self.tp * self.pp * self.cp
        if count > limits.RANKS_PER_INSTANCE_MAX:
            raise ConfigError(
                f"{self.terms.tp} {self.tp}, {self.terms.pp} {self.pp} and {self.terms.cp} "
                f"{self.cp} are {count} ranks; at most {limits.RANKS_PER_INSTANCE_MAX} are served: "
                "take smaller sizes",
                fields={"ranks": str(count)},
            )

    def ranks(self) -> list[Rank]:
        """Every rank of the instance, ordered by index."""
        numbers = itertools.product(range(self.pp), range(self.cp), range(self.tp))
        return [
            Rank(tp=tp, tp_size=self.tp, pp=pp, pp_size=self.pp, cp=cp, cp_size=self.cp)
            for pp, cp, tp in numbers
        ]


def describe(
    values: Mapping[str, object], sizes: Sizes | None = None, every: list[int] | None = None
) -> Instance:
    """The instance that a description with these keys means, with every rank of it.

    Args:    values: the keys of a layout and of the instance. sizes: numbers of ranks, instead of
             those among the keys. every: the layers of all groups, which pipeline stages divide;
             None: those of this group.
    Raises:  ConfigError: a key or a value that cannot be; the text names it and what to give.
    """
    shape = dict(values)
    check_kinds(shape)
    name = choice("layout", shape.pop("layout", None), layout_names())
    check_keys(name, shape)
    tp, pp, cp = (number(key, shape.pop(key, 1)) for key in ("attention_tp", "pp_size", "cp_size"))
    used = Sizes(tp, pp, cp) if sizes is None else sizes
    relayout = shape.pop("relayout", None)
    if relayout is not None:
        choice("relayout", relayout, RELAYOUT)
    ignored = part_names("ignore_parts", shape.pop("ignore_parts", []))
    ids = layer_list("layers", shape.pop("layers", None))
    stages = _stages(ids, ids if every is None else every, used)
    shared, firsts = _split_heads(name, shape, used)
    made: dict[tuple[int, int | None], KVLayout] = {}
    workers = []
    for rank in used.ranks():
        first = firsts[rank.tp]
        if not stages[rank.pp]:
            continue
        if (rank.pp, first) not in made:
            values = shared if first is None else {**shared, "head_first": first}
            made[rank.pp, first] = _build(name, values, stages[rank.pp])
        workers.append((rank, made[rank.pp, first]))
    sized = f"{name}, page size {shape.get('page_size')}, TP {used.tp}"
    sized += "".join(f", {kind} {n}" for kind, n in (("PP", used.pp), ("CP", used.cp)) if n > 1)
    default = workers[0][1].relayout
    return Instance(sized, tuple(workers), default if relayout is None else str(relayout), ignored)


def _stages(ids: list[int], every: list[int], sizes: Sizes) -> list[list[int]]:
    """The layers of a group that each pipeline stage holds, where stages divide `every` layer."""
    _check_layers(sizes, len(every))
    ends = [len(every) * stage // sizes.pp for stage in range(sizes.pp + 1)]
    wholes = [set(every[first:end]) for first, end in itertools.pairwise(ends)]
    return [[layer for layer in ids if layer in whole] for whole in wholes]


def _check_layers(sizes: Sizes, layers: int) -> None:
    """Refuse stages without a layer, and more layers of ranks than are looked at."""
    terms = sizes.terms
    if layers < sizes.pp:
        raise ConfigError(
            f"{terms.pp} is {sizes.pp} and {terms.layers} are {layers}: some stages would have no "
            f"layer. Take {terms.pp} {layers} or less",
            fields={terms.pp: str(sizes.pp), terms.layers: str(layers)},
        )
    held = layers * sizes.tp
    if held > _HELD_LAYERS_MAX:
        raise ConfigError(
            f"{terms.layers} are {layers} and {terms.tp} is {sizes.tp}: {held} layers of ranks, of "
            f"which at most {_HELD_LAYERS_MAX} are looked at. Take fewer of either",
            fields={terms.layers: str(layers), terms.tp: str(sizes.tp)},
        )


def _split_heads(
    name: str, shape: dict[str, object], sizes: Sizes
) -> tuple[dict[str, object], list[int | None]]:
    """The keys that all TP ranks share, and the first head of each; None where there are no heads.

    The model's heads are split, and replicated where there are too few.

    Raises:  ConfigError: two numbers that differ, or heads that ranks cannot share.
    """
    if is_latent(name, shape):
        return shape, [None] * sizes.tp
    heads, totals = "kv_heads", "total_kv_heads"
    if name == "k_only":
        heads, totals = "heads", "heads_total"
    here = shape.get(heads)
    total = _total_heads(heads, here, shape.get("total_kv_heads", shape.get(totals)), sizes.tp)
    _check_split(total, sizes)
    split = max(1, total // sizes.tp)
    if here is not None and here != split:
        raise ConfigError(
            f"{heads} = {here} of one rank; total_kv_heads = {total} over attention_tp = "
            f"{sizes.tp} is {split}: give total_kv_heads alone",
            fields={heads: str(here), "total_kv_heads": str(total)},
        )
    rest = {key: value for key, value in shape.items() if key not in ("total_kv_heads", totals)}
    firsts: list[int | None] = [tp * total // sizes.tp for tp in range(sizes.tp)]
    return {**rest, heads: split, totals: total}, firsts


def _total_heads(heads: str, here: object, total: object, tp: int) -> int:
    if total is not None:
        return number("total_kv_heads", total)
    return number(heads, here) * tp


def _check_split(total: int, sizes: Sizes) -> None:
    """Refuse ranks that cannot share the heads evenly, since the last heads would be on no rank."""
    tp, terms = sizes.tp, sizes.terms
    if total % tp == 0 or tp % total == 0:
        return
    near = tp // total * total or max(size for size in range(1, tp) if total % size == 0)
    raise ConfigError(
        f"{terms.tp} is {tp} and {terms.heads} is {total}: one has to be a multiple of the other, "
        f"or some heads would be on no rank. Take {terms.tp} {near}",
        fields={terms.tp: str(tp), terms.heads: str(total)},
    )


def _build(name: str, shape: dict[str, object], layers: list[int]) -> KVLayout:
    builder = builder_of(name, latent=is_latent(name, shape))
    return _called(builder, {"pages": PAGES, **shape, "layers": layers})


def _called(builder: Callable[..., KVLayout], shape: dict[str, object]) -> KVLayout:
    """The layout that a builder makes of these keys, with errors that name the keys."""
    try:
        return builder(**shape)
    except ConfigError as error:
        text = str(error)
        if not any(key in text for key in shape):
            # Of what several keys come to together: the length of a region, the number of planes.
            text += f"; it follows from {_numbers(shape)}"
        raise ConfigError(text, fields=error.fields) from error


def _numbers(shape: dict[str, object]) -> str:
    """The numbers of a shape in words, for a text."""
    layers = shape["layers"]
    count = len(layers) if isinstance(layers, list) else 1
    others = {key: value for key, value in shape.items() if isinstance(value, int)}
    return ", ".join(f"{key} {value}" for key, value in {"layers": count, **others}.items())

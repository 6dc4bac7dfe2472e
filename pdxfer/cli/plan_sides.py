"""What `pdxfer plan` compares: one side as a whole instance, from TOML or a Hugging Face config."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdxfer import layout as layouts
from pdxfer.errors import ConfigError
from pdxfer.layout import KVLayout, Rank, Side, combine
from pdxfer.layout.builders_host import HOST_ARRANGEMENTS, host_layout
from pdxfer.layout.builders_parts import k_only, mxfp8
from pdxfer.layout.shapes import KVShape
from pdxfer.layout.vllm import BLOCK_ORDERS

if TYPE_CHECKING:
    from pathlib import Path

KV_BUILDERS: Final[dict[str, Callable[..., KVLayout]]] = {
    "token_major": layouts.token_major,
    "head_major": layouts.head_major,
    "page_major": layouts.page_major,
    "unified_entries": layouts.unified_entries,
    "vllm_blocks": layouts.vllm_blocks,
    "vllm_cpu": layouts.vllm_cpu,
    "vectorized_5d": layouts.vectorized_5d,
    "mxfp8": mxfp8,
    "k_only": k_only,
}
LAYOUTS: Final = (*KV_BUILDERS, "mla", *HOST_ARRANGEMENTS, *BLOCK_ORDERS)
"""Names that `layout` may have; block orders are those of vLLM."""
INSTANCE_KEYS: Final = ("attention_tp", "pp_size", "cp_size", "relayout", "ignore_parts")
_MLA_KEYS: Final = ("kv_lora_rank", "qk_rope_head_dim")
_PAGES: Final = 1024
"""Of a described pool; how many there are does not enter a plan."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One side: its layouts by rank, and what it asks of a pair."""

    name: str
    """As it is shown."""
    workers: tuple[tuple[Rank, KVLayout], ...]
    relayout: str
    ignore_parts: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[Side, ...]:
        """Every worker in a comparison."""
        return tuple(
            Side(layout, rank.tp_size, self.relayout, self.ignore_parts, rank.pp_size == 1)
            for rank, layout in self.workers
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks an instance has."""

    tp: int = 1
    pp: int = 1
    cp: int = 1

    def ranks(self) -> list[Rank]:
        """Every rank, by index."""
        numbers = itertools.product(range(self.pp), range(self.cp), range(self.tp))
        return [
            Rank(tp=tp, tp_size=self.tp, pp=pp, pp_size=self.pp, cp=cp, cp_size=self.cp)
            for pp, cp, tp in numbers
        ]


def read_toml(file: Path) -> Instance:
    """One side of a pair from a TOML file.

    Raises:  ConfigError naming the file and the key.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the layout {file}: {error}") from error
    try:
        return _instance(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", fields=error.fields) from error


def read_model_config(
    file: Path,
    *,
    layout: str,
    page_size: int,
    sizes: Sizes,
    dtype: str | None = None,
    relayout: str | None = None,
) -> Instance:
    """One side of a pair from a Hugging Face `config.json`.

    Full and sliding window layers become groups `full` and `swa`; latent attention is recognised by
    `kv_lora_rank`.

    Raises:  ConfigError: no such file, a key that it lacks, layers that are no attention.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no model config: it holds no JSON object")
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    stored = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    values: dict[str, object] = {
        "layout": layout,
        "page_size": page_size,
        "pages": _PAGES,
        "dtype": dtype or stored,
        **_heads(config, file),
    }
    if relayout is not None:
        values["relayout"] = relayout
    groups = _layer_groups(config, file)
    try:
        every = sorted(layer for _, ids in groups for layer in ids)
        parts = [
            _instance({**values, "layers": ids, "group": name}, sizes, every)
            for name, ids in groups
        ]
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", fields=error.fields) from error
    return _together(parts)


def _together(parts: list[Instance]) -> Instance:
    """Instances of one group each as one: ranks keep the groups that they hold."""
    held: dict[Rank, list[KVLayout]] = {}
    for part in parts:
        for rank, layout in part.workers:
            held.setdefault(rank, []).append(layout)
    workers = sorted(held.items(), key=lambda item: item[0].index)
    return replace(parts[0], workers=tuple((rank, combine(*found)) for rank, found in workers))


def _heads(config: dict[str, object], file: Path) -> dict[str, object]:
    if "kv_lora_rank" in config:
        return {key: _number(config, key, file) for key in _MLA_KEYS}
    attention = _number(config, "num_attention_heads", file)
    heads = config.get("num_key_value_heads") or attention
    width = config.get("head_dim") or _number(config, "hidden_size", file) // attention
    return {
        "total_kv_heads": heads,
        "head_dim": width,
        "v_head_dim": config.get("v_head_dim") or width,
    }


def _layer_groups(config: dict[str, object], file: Path) -> list[tuple[str, list[int]]]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return [("full", list(range(_number(config, "num_hidden_layers", file))))]
    names = {"full_attention": "full", "sliding_attention": "swa"}
    unknown = sorted({str(kind) for kind in kinds if kind not in names})
    if unknown:
        raise ConfigError(
            f"{file}: layer_types has {', '.join(unknown)}; only {', '.join(names)} have KV pages. "
            "Describe recurrent state with pdxfer.layout in Python",
            fields={"layer_types": ", ".join(unknown)},
        )
    found: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        found.setdefault(names[kind], []).append(layer)
    return sorted(found.items())


def _number(config: dict[str, object], key: str, file: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{file}: {key} is {value!r}; a model config must give it as 1 or more",
            fields={key: repr(value)},
        )
    return value


def _instance(
    values: dict[str, object], sizes: Sizes | None = None, every: list[int] | None = None
) -> Instance:
    """Every rank of the instance that these keys describe.

    Args:    every: layers of all groups, which stages divide; None: those of this one.
    """
    shape = dict(values)
    name = shape.pop("layout", None)
    if name not in LAYOUTS:
        raise ConfigError(
            f"layout = {name!r}; it has to be one of {', '.join(LAYOUTS)}",
            fields={"layout": repr(name)},
        )
    counts = {key: _count(key, shape.pop(key, 1)) for key in ("attention_tp", "pp_size", "cp_size")}
    used = sizes or Sizes(counts["attention_tp"], counts["pp_size"], counts["cp_size"])
    relayout = shape.pop("relayout", None)
    ignored = shape.pop("ignore_parts", [])
    if not isinstance(ignored, list):
        raise ConfigError(f"ignore_parts = {ignored!r}; a list of parts is needed")
    layers = shape.pop("layers", None)
    ids = list(range(layers)) if isinstance(layers, int) else layers
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"layers = {layers!r}; a count or a list of global ids is needed")
    workers = []
    for rank in used.ranks():
        whole = ids if every is None else every
        stage = whole[len(whole) * rank.pp // used.pp : len(whole) * (rank.pp + 1) // used.pp]
        held = [layer for layer in ids if layer in stage]
        if held:
            workers.append((rank, _build(str(name), _of_rank(shape, rank), held)))
    shown = f"{name}, page size {shape.get('page_size')}, TP {used.tp}"
    shown += "".join(f", {kind} {n}" for kind, n in (("PP", used.pp), ("CP", used.cp)) if n > 1)
    default = workers[0][1].relayout
    return Instance(
        name=shown,
        workers=tuple(workers),
        relayout=default if relayout is None else str(relayout),
        ignore_parts=tuple(str(part) for part in ignored),
    )


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r}; it must be 1 or more", fields={key: repr(value)})
    return value


def _of_rank(shape: dict[str, object], rank: Rank) -> dict[str, object]:
    """The heads of one TP rank: the model's, split; replicated where there are too few."""
    if any(key in shape for key in _MLA_KEYS):
        return shape
    heads = "heads" if "heads" in shape else "kv_heads"
    here, total = shape.get(heads), shape.get("total_kv_heads")
    total = _count(heads, here) * rank.tp_size if total is None else _count("total_kv_heads", total)
    split = max(1, total // rank.tp_size)
    if here is not None and here != split:
        raise ConfigError(
            f"{heads} = {here} of one rank; total_kv_heads = {total} over attention_tp = "
            f"{rank.tp_size} is {split}: give total_kv_heads alone",
            fields={heads: str(here), "total_kv_heads": str(total)},
        )
    whole = {key: value for key, value in shape.items() if key != "total_kv_heads"}
    totals = "heads_total" if heads == "heads" else "total_kv_heads"
    first = rank.tp * total // rank.tp_size
    return {**whole, heads: split, totals: total, "head_first": first}


def _build(name: str, shape: dict[str, object], layers: list[int]) -> KVLayout:
    shape = {"pages": _PAGES, **shape, "layers": layers}
    if name == "mla" or any(key in shape for key in _MLA_KEYS):
        return _build_mla(name, shape)
    if name in HOST_ARRANGEMENTS:
        groups = _count("head_groups", shape.pop("head_groups", 1))
        reserved = shape.setdefault("reserved_pages", 0)
        like = _called(layouts.token_major, shape)
        return _host(like, name, groups, reserved)
    if name in BLOCK_ORDERS:
        return _called(layouts.vllm_blocks, {**shape, "order": name})
    return _called(KV_BUILDERS[name], shape)


def _build_mla(name: str, shape: dict[str, object]) -> KVLayout:
    if name in BLOCK_ORDERS:
        return _called(layouts.vllm_mla_blocks, {**shape, "order": name})
    if name in HOST_ARRANGEMENTS:
        reserved = shape.setdefault("reserved_pages", 0)
        return _host(_called(layouts.mla, shape), name, 1, reserved)
    if name != "mla":
        shape = {**shape, "arrangement": name}
    return _called(layouts.mla, shape)


def _host(like: KVLayout, name: str, head_groups: int, reserved_pages: object) -> KVLayout:
    return host_layout(
        like,
        name,
        pages=like.groups[0].pages,
        head_groups=head_groups,
        reserved_pages=reserved_pages if isinstance(reserved_pages, int) else 0,
    )


def _called(builder: Callable[..., KVLayout], shape: dict[str, object]) -> KVLayout:
    """The layout; a key that the builder does not know is named."""
    takes = inspect.signature(builder).parameters
    known = {*takes} - {"shape"} | (set(KVShape.__annotations__) if "shape" in takes else set())
    for key in shape:
        if key not in known:
            names = sorted({*known, *INSTANCE_KEYS} - {"head_first"})
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(names)}"
            raise ConfigError(f"unknown key {key!r}; {hint}", fields={"key": key})
    try:
        return builder(**shape)
    except TypeError as error:
        raise ConfigError(f"layout {builder.__name__!r}: {error}") from error

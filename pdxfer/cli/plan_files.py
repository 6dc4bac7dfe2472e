"""Files that `pdxfer plan` reads: TOML of its own, and a model's Hugging Face `config.json`."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.cli.plan_keys import MLA_KEYS
from pdxfer.cli.plan_sides import PAGES, Instance, Sizes, describe
from pdxfer.cli.plan_values import NUMBER_MAX, number, shown
from pdxfer.errors import ConfigError
from pdxfer.layout import combine
from pdxfer.layout.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdxfer.layout import KVLayout, Rank

_TOML_BYTES_MAX: Final = 64 << 10
_JSON_BYTES_MAX: Final = 8 << 20
"""A model's config may list the layers that it does not quantise, one by one."""
_DIGITS_MAX: Final = 30
"""Of a number in JSON; a longer one stays text, which the check of its key refuses by name."""
_LONG_NUMBER: Final = re.compile(r"\d[\d_]{4000}")
_GROUPS: Final = {"full_attention": "full", "sliding_attention": "swa"}


def read_toml(file: Path) -> Instance:
    """One side of a pair from a TOML file.

    Raises:  ConfigError naming the file and the key.
    """
    text = _read(file, "layout", _TOML_BYTES_MAX)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the layout {file}: {_why(error, text)}") from error
    with _naming(file):
        return replace(describe(values), file=str(file))


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

    Raises:  ConfigError: no such file, a key that it lacks, a value that no model has, layers that
             are no attention; names file and key.
    """
    config = _model_config(file)
    with _naming(file):
        heads, shape = _heads(config)
        terms = replace(sizes.terms, heads=heads, layers="num_hidden_layers")
        values: dict[str, object] = {
            "layout": layout,
            "page_size": page_size,
            "pages": PAGES,
            "dtype": dtype or _stored_dtype(config),
            **shape,
        }
        if relayout is not None:
            values["relayout"] = relayout
        groups = _layer_groups(config)
        every = sorted(layer for ids in groups.values() for layer in ids)
        parts = [
            describe({**values, "layers": ids, "group": name}, replace(sizes, terms=terms), every)
            for name, ids in sorted(groups.items())
        ]
    return replace(_together(parts), file=str(file))


def _read(file: Path, what: str, most: int) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the {what} {file}: {error}") from error
    if len(content) > most:
        raise ConfigError(
            f"cannot read the {what} {file}: it has over {most} bytes; give a file of a few keys"
        )
    return text


def _why(error: Exception, text: str) -> str:
    """What is wrong with a text that no parser takes."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply; give a file of a few keys"
    long = next((line for line in text.splitlines() if _LONG_NUMBER.search(line)), None)
    if long is not None:
        return f"{shown(long)} has a number of thousands of digits; give one that a cache may have"
    return str(error)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", fields=error.fields) from error


def _model_config(file: Path) -> dict[str, object]:
    text = _read(file, "model config", _JSON_BYTES_MAX)
    try:
        config = json.loads(
            text, parse_int=lambda digits: int(digits) if len(digits) <= _DIGITS_MAX else digits
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the model config {file}: {_why(error, text)}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} is no model config: it holds no JSON object; give a model's config.json"
        )
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    return config


def _together(parts: list[Instance]) -> Instance:
    """Instances of one group each as one: ranks keep the groups that they hold."""
    held: dict[Rank, list[KVLayout]] = {}
    for part in parts:
        for rank, layout in part.workers:
            held.setdefault(rank, []).append(layout)
    workers = sorted(held.items(), key=lambda item: item[0].index)
    return replace(parts[0], workers=tuple((rank, combine(*found)) for rank, found in workers))


def _heads(config: dict[str, object]) -> tuple[str, dict[str, object]]:
    """The key that says how many KV heads there are, and the values of heads."""
    if config.get("kv_lora_rank") is not None:
        return MLA_KEYS[0], {key: _number(config, key) for key in MLA_KEYS}
    attention = _number(config, "num_attention_heads")
    heads = "num_key_value_heads"
    if config.get(heads) is None:
        heads = "num_attention_heads"
    width = _number(config, "head_dim") if config.get("head_dim") is not None else 0
    if not width:
        hidden = _number(config, "hidden_size")
        width = hidden // attention
        if not width:
            raise ConfigError(
                f"hidden_size is {hidden} and num_attention_heads is {attention}: no width is left "
                "for a head. Give head_dim",
                fields={"hidden_size": str(hidden), "num_attention_heads": str(attention)},
            )
    values = _number(config, "v_head_dim") if config.get("v_head_dim") is not None else width
    return heads, {
        "total_kv_heads": _number(config, heads),
        "head_dim": width,
        "v_head_dim": values,
    }


def _stored_dtype(config: dict[str, object]) -> str:
    """The dtype of the model, which is the cache's where no flag says otherwise."""
    for key in ("torch_dtype", "dtype"):
        value = config.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str) or value not in ITEM_BYTES:
            raise ConfigError(
                f"{key} is {shown(value)}; known are {', '.join(ITEM_BYTES)}: give --dtype",
                fields={key: shown(value)},
            )
        return value
    return "bfloat16"


def _layer_groups(config: dict[str, object]) -> dict[str, list[int]]:
    """Global layers by the name of their group."""
    kinds = config.get("layer_types")
    most = limits.PLANES_MAX
    if kinds is None:
        return {"full": list(range(_number(config, "num_hidden_layers", most)))}
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= most:
        raise ConfigError(
            f"layer_types is {shown(kinds)}; a list of 1 to {most} kinds is needed, one a layer",
            fields={"layer_types": shown(kinds)},
        )
    found: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in _GROUPS:
            raise ConfigError(
                f"layer_types has {shown(kind)}; only {', '.join(_GROUPS)} have KV pages. Describe "
                "recurrent state with pdxfer.layout in Python",
                fields={"layer_types": shown(kind)},
            )
        found.setdefault(_GROUPS[kind], []).append(layer)
    if config.get("num_hidden_layers") is not None:
        count = _number(config, "num_hidden_layers", most)
        if count != len(kinds):
            raise ConfigError(
                f"layer_types has {len(kinds)} kinds and num_hidden_layers is {count}; give one "
                "kind a layer",
                fields={"layer_types": str(len(kinds)), "num_hidden_layers": str(count)},
            )
    return found


def _number(config: dict[str, object], key: str, most: int = NUMBER_MAX) -> int:
    return number(key, config.get(key), most=most)

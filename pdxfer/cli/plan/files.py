"""Files that `pdxfer plan` reads: TOML of its own, and a model's Hugging Face `config.json`."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdxfer.cli.plan.models import check_layout, heads, layer_groups, stored_dtype
from pdxfer.cli.plan.sides import PAGES, Instance, Sizes, describe
from pdxfer.cli.plan.values import shown
from pdxfer.daemon import toml_text
from pdxfer.errors import ConfigError
from pdxfer.layout import combine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdxfer.layout import KVLayout, Rank

_TOML_BYTES_MAX: Final = 64 << 10
_JSON_BYTES_MAX: Final = 8 << 20
"""A model's config may list the layers that it does not quantise, one by one."""
_DIGITS_MAX: Final = 30
"""Digits of a number in JSON; a longer one stays text, which the check of its key refuses."""
_LONG_NUMBER: Final = re.compile(r"\d[\d_]{4000}")


def read_toml(file: Path) -> Instance:
    """One side of a pair from a TOML file.

    Raises:  ConfigError: a file that cannot be read, or a key or value that is none; names both.
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

    Args:    layout, page_size, sizes: what the file does not say of an instance. dtype, relayout:
             None: the model's, and the layout's own.
    Raises:  ConfigError: no such file, a key that it lacks, a value that no model has, layers of
             another kind or that the file does not tell apart; names file and key.
    """
    config = _model_config(file)
    with _naming(file):
        check_layout(config, layout)
        heads_key, shape = heads(config)
        terms = replace(sizes.terms, heads=heads_key, layers="num_hidden_layers")
        values: dict[str, object] = {
            "layout": layout,
            "page_size": page_size,
            "pages": PAGES,
            "dtype": dtype or stored_dtype(config),
            **shape,
        }
        if relayout is not None:
            values["relayout"] = relayout
        groups = layer_groups(config)
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
    """Why a parser did not take a text, in words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply; give a file of a few keys"
    long = next((line for line in text.splitlines() if _LONG_NUMBER.search(line)), None)
    if long is not None:
        return f"{shown(long)} has a number of thousands of digits; give one that a cache may have"
    return toml_text.why(error, text)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise the errors inside of this context with the name of the file before their text."""
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
    """One instance of several that have a group each; each rank has the groups that it holds."""
    held: dict[Rank, list[KVLayout]] = {}
    for part in parts:
        for rank, layout in part.workers:
            held.setdefault(rank, []).append(layout)
    workers = sorted(held.items(), key=lambda item: item[0].index)
    return replace(parts[0], workers=tuple((rank, combine(*found)) for rank, found in workers))

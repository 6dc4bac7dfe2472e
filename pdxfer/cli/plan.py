"""`pdxfer plan`: two layouts as TOML, and how one is written into the other.

    layout = "page_major"      # token_major, head_major, page_major, unified_entries, mla
    layers = 32                # a count, or a list of global ids
    kv_heads = 8
    head_dim = 128
    page_size = 16
    pages = 1024
    dtype = "bfloat16"
    attention_tp = 1           # optional; with relayout = "allow" or "never"

Every other key is an argument of the builder of that name in `pdxfer.layout`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdxfer import layout as layouts
from pdxfer.errors import ConfigError
from pdxfer.layout import KVLayout, Side, check_pair

if TYPE_CHECKING:
    import argparse

BUILDERS: Final[dict[str, Callable[..., KVLayout]]] = {
    "token_major": layouts.token_major,
    "head_major": layouts.head_major,
    "page_major": layouts.page_major,
    "unified_entries": layouts.unified_entries,
    "mla": layouts.mla,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("prefill", type=Path, help="TOML file: the layout of the prefill worker")
    parser.add_argument("decode", type=Path, help="TOML file: the layout of the decode worker")


def run(options: argparse.Namespace) -> int:
    """Print the summary; a refusal is raised and told as any error."""
    source, destination = read_side(options.prefill), read_side(options.decode)
    check_pair(source, destination)
    relayout = "never" if "never" in (source.relayout, destination.relayout) else "allow"
    summary = layouts.plan(source.layout, destination.layout, relayout=relayout).summary()
    print(f"{'group':<10}{'runs/page':>10}{'bytes/page':>12}{'longest run':>13}{'shortest':>10}")
    for group in summary.groups:
        print(
            f"{group.group:<10}{group.runs_per_page:>10.4g}{group.bytes_per_page:>12,}"
            f"{group.longest_run_bytes:>13,}{group.shortest_run_bytes:>10,}"
        )
    print(summary.lane_hint)
    return 0


def read_side(file: Path) -> Side:
    """One layout, as a side of a pair.

    Raises:  ConfigError naming the file and the key.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the layout {file}: {error}") from error
    name = values.pop("layout", None)
    if name not in BUILDERS:
        raise ConfigError(f"{file}: layout = {name!r}; it has to be one of {', '.join(BUILDERS)}")
    attention_tp = values.pop("attention_tp", 1)
    relayout = values.pop("relayout", None)
    if isinstance(values.get("layers"), int):
        values["layers"] = range(values["layers"])
    try:
        layout = BUILDERS[name](**values)
    except TypeError as error:
        raise _wrong_key(file, name, values, error) from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", fields=error.fields) from error
    return Side(layout, attention_tp, layout.relayout if relayout is None else relayout)


def _wrong_key(
    file: Path, builder: str, values: dict[str, object], error: TypeError
) -> ConfigError:
    known = [*layouts.builders.KVShape.__annotations__, "kv_lora_rank", "qk_rope_head_dim"]
    known += ["arrangement", "length_bytes"]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            return ConfigError(f"{file}: unknown key {key!r}; {hint}", fields={"key": key})
    return ConfigError(f"{file}: layout {builder!r}: {error}")

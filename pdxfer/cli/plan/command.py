"""`pdxfer plan`: two instances, and how the cache of one is written into the other.

A side is a TOML file (`--prefill`, `--decode`), of the keys that `--help` lists, or a Hugging Face
`config.json` (`--prefill-config`, `--decode-config`) with `--tp`, `--page-size`, `--layout` and
their like.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdxfer import layout as layouts
from pdxfer.cli.plan.files import read_model_config, read_toml
from pdxfer.cli.plan.keys import described, layout_names
from pdxfer.cli.plan.sides import Instance, Sizes, Terms
from pdxfer.cli.plan.values import NUMBER_MAX, choice, shown
from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout import PlanSummary, check_pair, cover
from pdxfer.layout.dtypes import ITEM_BYTES
from pdxfer.layout.validation import RELAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

_TERMS: Final = Terms(tp="--tp", pp="--pp", cp="--cp")
_CONFIG_FLAGS: Final = {
    "layout": ("layout", "token_major"),
    "page_size": ("page_size", "16"),
    "tp": ("attention_tp", "1"),
    "pp": ("pp_size", "1"),
    "cp": ("cp_size", "1"),
    "dtype": ("dtype", ""),
    "relayout": ("relayout", ""),
}
"""Flags of a side that is a model's config: the key that a TOML file has, and the default."""
_EXAMPLE: Final = """\
a side as TOML:
  layout = "page_major"
  layers = 32                # a count, or a list of global ids
  total_kv_heads = 8         # of the model; or kv_heads of one rank
  head_dim = 128
  page_size = 16
  dtype = "bfloat16"

keys of every layout:
  attention_tp, pp_size, cp_size   ranks; 1
  relayout                         "allow" or "never"; the layout's own
  ignore_parts                     parts that need not be on both sides; none

keys by layout (a file describes one group of layers; `group` names it):
"""
_PAIRS_MAX: Final = 1 << 16
"""How many pairs of a prefill and a decode rank are looked at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdxfer plan`."""
    for side in ("prefill", "decode"):
        one = parser.add_mutually_exclusive_group(required=side == "prefill")
        one.add_argument(f"--{side}", type=Path, metavar="TOML", help=f"the {side} instance")
        one.add_argument(
            f"--{side}-config", type=Path, metavar="JSON", help="Hugging Face config.json of it"
        )
    many = parser.add_argument_group(
        "with config.json",
        "A:B is prefill:decode, A is both. A TOML file says these with keys of its own.",
    )
    texts = {
        "layout": ", ".join(layout_names()),
        "page_size": "tokens of a page",
        "tp": "attention TP size",
        "pp": "pipeline stages",
        "cp": "context parallel size",
        "dtype": "of the cache",
        "relayout": "allow or never",
    }
    for name, text in texts.items():
        default = _CONFIG_FLAGS[name][1] or f"the {'model' if name == 'dtype' else 'layout'}'s"
        many.add_argument(
            f"--{name.replace('_', '-')}", metavar="A[:B]", help=f"{text} [default: {default}]"
        )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE + described()


def run(options: argparse.Namespace) -> int:
    """Print how the pair is written, or the fields that differ, both values and the remedy.

    Returns: the exit code: 0 for a pair that works, 1 for one that cannot.
    Raises:  ConfigError: a description that says nothing, or that no cache has.
    """
    source, destination = _sides(options)
    _check_pairs(source, destination)
    _check_something_travels(source, destination)
    print(f"prefill: {source.name}")
    print(f"decode:  {destination.name}")
    try:
        found = summaries(source, destination)
    except LayoutMismatchError as error:
        sys.stderr.write(f"pdxfer plan: this pair cannot work. {error}\n")
        for field, values in error.fields.items():
            sys.stderr.write(f"  {field}: {values}\n")
        if _works_with_relayout(source, destination):
            sys.stderr.write('With relayout = "allow" on both sides this pair works.\n')
        return 1
    _show(found)
    return 0


def _check_pairs(source: Instance, destination: Instance) -> None:
    """Refuse more pairs of ranks than are planned in the time that a person waits."""
    counts = len(source.workers), len(destination.workers)
    if counts[0] * counts[1] > _PAIRS_MAX:
        raise ConfigError(
            f"{source.file} has {counts[0]} ranks and {destination.file} {counts[1]}: more than "
            f"{_PAIRS_MAX} pairs of them. Take sizes in the same ratio that are smaller",
            fields={"ranks": f"prefill={counts[0]}, decode={counts[1]}"},
        )


def _check_something_travels(source: Instance, destination: Instance) -> None:
    """Refuse ignored parts that leave a decode rank nothing: such a plan would say nothing."""
    ignored = {*source.ignore_parts, *destination.ignore_parts}
    for _, layout in destination.workers:
        parts = {plane.part for plane in layout.planes}
        if parts <= ignored:
            given = " and ".join(
                f"{side.file}: ignore_parts is {shown(list(side.ignore_parts))}"
                for side in (source, destination)
                if side.ignore_parts
            )
            raise ConfigError(
                f"{given}; decode has {', '.join(sorted(parts))} and no other part, so nothing "
                "would move. Take out a part that both sides have",
                fields={"ignore_parts": ", ".join(sorted(ignored))},
            )


def _works_with_relayout(source: Instance, destination: Instance) -> bool:
    if "never" not in (source.relayout, destination.relayout):
        return False
    try:
        summaries(replace(source, relayout="allow"), replace(destination, relayout="allow"))
    except LayoutMismatchError:
        return False
    return True


def summaries(source: Instance, destination: Instance) -> dict[int, list[tuple[int, PlanSummary]]]:
    """What each prefill rank owes each decode rank.

    Returns: by decode rank, the prefill ranks that owe it something, and what that costs.

    Raises:  LayoutMismatchError: the pair cannot work.
    """
    ignored = {*source.ignore_parts, *destination.ignore_parts}
    checked: set[tuple[bytes, bytes]] = set()
    for one, other in itertools.product(source.sides, destination.sides):
        # Ranks that hold the same answer the same.
        pair = (one.layout.map_digest, other.layout.map_digest)
        if pair not in checked:
            check_pair(one, other)
            checked.add(pair)
    found: dict[int, list[tuple[int, PlanSummary]]] = {}
    known: dict[bytes, PlanSummary] = {}
    for rank, layout in destination.workers:
        owned = cover(source.workers, (rank, layout), ignore_parts=ignored)
        for (sender, theirs), part in zip(source.workers, owned, strict=True):
            if part.empty:
                continue
            made = layouts.plan(theirs, layout, owned=part, ignore_parts=ignored)
            summary = known.setdefault(made.digest, made.summary())
            found.setdefault(rank.index, []).append((sender.index, summary))
    return found


def _show(found: dict[int, list[tuple[int, PlanSummary]]]) -> None:
    """Print one table for all decode ranks that are written alike."""
    alike: dict[tuple[PlanSummary, ...], list[int]] = {}
    for receiver, senders in found.items():
        alike.setdefault(tuple(summary for _, summary in senders), []).append(receiver)
    for pattern, receivers in alike.items():
        print()
        for receiver in receivers:
            names = ", ".join(str(sender) for sender, _ in found[receiver])
            print(f"decode rank {receiver} from prefill rank {names}")
        _table(pattern)


def _table(pattern: Iterable[PlanSummary]) -> None:
    counts: dict[PlanSummary, int] = {}
    for summary in pattern:
        counts[summary] = counts.get(summary, 0) + 1
    print(
        f"{'group':<10}{'runs/page':>10}{'bytes/page':>12}{'longest run':>13}{'shortest':>10}"
        f"{'ranks':>7}"
    )
    for summary, count in counts.items():
        for group in summary.groups:
            print(
                f"{group.group:<10}{group.runs_per_page:>10.4g}{group.bytes_per_page:>12,}"
                f"{group.longest_run_bytes:>13,}{group.shortest_run_bytes:>10,}{count:>7}"
            )
        print(summary.lane_hint)


def _sides(options: argparse.Namespace) -> tuple[Instance, Instance]:
    _check_flags(options)
    sides = []
    for at, side in enumerate(("prefill", "decode")):
        file = getattr(options, side)
        config = getattr(options, f"{side}_config")
        if file is not None:
            sides.append(read_toml(file))
            continue
        if config is None:
            config = options.prefill_config
        if config is None:
            raise ConfigError(f"give --{side} or --{side}-config")
        sides.append(_of_config(config, options, at))
    return sides[0], sides[1]


def _check_flags(options: argparse.Namespace) -> None:
    """Refuse flags for a side that is a TOML file, which says these things itself."""
    files = [side for side in ("prefill", "decode") if getattr(options, side) is not None]
    for name, (key, _) in _CONFIG_FLAGS.items():
        value = getattr(options, name)
        flag = f"--{name.replace('_', '-')}"
        if value is None or not files:
            continue
        if len(files) == 2 or (files == ["prefill"] and options.decode_config is None):
            raise ConfigError(
                f"{flag} is {shown(value)}, and it is for sides of a config.json; write {key} into "
                f"{' and '.join(str(getattr(options, side)) for side in files)}",
                fields={name: shown(value)},
            )
        if ":" in value:
            raise ConfigError(
                f"{flag} is {shown(value)}, and {files[0]} is the TOML file "
                f"{getattr(options, files[0])}: write its {key} there, and give {flag} one value, "
                "of the other side",
                fields={name: shown(value)},
            )


def _of_config(file: Path, options: argparse.Namespace, at: int) -> Instance:
    values = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, (_, default) in _CONFIG_FLAGS.items()
    }
    numbers = {name: _number(values[name], name, at) for name in ("tp", "pp", "cp", "page_size")}
    return read_model_config(
        file,
        layout=choice("--layout", _half(values["layout"], at), layout_names()),
        page_size=numbers["page_size"],
        sizes=Sizes(numbers["tp"], numbers["pp"], numbers["cp"], _TERMS),
        dtype=_name(values["dtype"], "--dtype", at, ITEM_BYTES),
        relayout=_name(values["relayout"], "--relayout", at, RELAYOUT),
    )


def _half(value: str, at: int) -> str:
    """The half of `A:B` for prefill (0) or decode (1); a value without a colon is for both."""
    prefill, both, decode = value.partition(":")
    return decode if both and at else prefill


def _name(value: str, flag: str, at: int, known: Iterable[str]) -> str | None:
    text = _half(value, at)
    return choice(flag, text, known) if text else None


def _number(value: str, flag: str, at: int) -> int:
    text = _half(value, at)
    # Longer than the largest number, it is not read as one.
    short = text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX))
    if not short or not 1 <= int(text) <= NUMBER_MAX:
        name = flag.replace("_", "-")
        raise ConfigError(
            f"--{name} is {shown(value)}; numbers from 1 to {NUMBER_MAX} are needed, as 4 or 4:2",
            fields={flag: shown(value)},
        )
    return int(text)

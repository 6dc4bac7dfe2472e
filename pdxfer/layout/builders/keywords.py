"""Keywords of the builders: unknown and missing ones are refused under the name that was called."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Final, ParamSpec

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.shapes import kv_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.layout.kv_layout import KVLayout

P = ParamSpec("P")

_ELSEWHERE: Final = {
    "head_num": "kv_heads",
    "layer_num": "layers",
    "layer_ids": "layers",
    "start_layer": "layers",
    "block_size": "page_size",
    "num_blocks": "pages",
    "size": "pages",
    "slots": "pages",
}
"""Our names for what engines call otherwise, where letters alone would lead to another."""


def named(builder: Callable[P, KVLayout]) -> Callable[P, KVLayout]:
    """The builder, with keyword errors of its own.

    It refuses unknown keywords, naming itself and the nearest keyword that it takes, and missing
    ones, all of them at once, with a ConfigError.
    """
    takes: dict[str, inspect.Parameter] = {}
    by_position = 0
    for name, parameter in inspect.signature(builder).parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            by_position += 1
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes |= inspect.signature(kv_shape).parameters
        else:
            takes[name] = parameter
    needs = [name for name, each in takes.items() if each.default is inspect.Parameter.empty]

    @functools.wraps(builder)
    def checked(*args: P.args, **kwargs: P.kwargs) -> KVLayout:
        for name in kwargs:
            if name not in takes:
                raise _unknown(builder.__name__, name, list(takes))
        missing = [name for name in needs if name not in kwargs]
        if missing and len(args) == by_position:
            raise ConfigError(
                f"{builder.__name__}() needs {', '.join(missing)} as well",
                fields=dict.fromkeys(missing, "missing"),
            )
        return builder(*args, **kwargs)

    return checked


def _unknown(function: str, name: str, takes: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, takes, n=1, cutoff=0.5)
    if _ELSEWHERE.get(name) in takes:
        near = [_ELSEWHERE[name]]
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(takes)}"
    return ConfigError(f"{function}() takes no {name}; {hint}", fields={name: "unknown"})

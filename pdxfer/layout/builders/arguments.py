"""Arguments that builders share, checked: layer ids and numbers."""

from __future__ import annotations

import operator
from itertools import islice
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def layer_ids(layers: Iterable[int]) -> tuple[int, ...]:
    """The global ids of the layers of a rank, as plain ints.

    Raises:  ConfigError: a count instead of ids, no id at all, more ids than `limits.PLANES_MAX`,
             an id that is repeated, negative or no int.
    """
    if isinstance(layers, int):
        raise ConfigError(f"layers is {layers}; it must be the global ids, such as range({layers})")
    try:
        given = tuple(islice(layers, limits.PLANES_MAX + 1))
    except TypeError as error:
        raise ConfigError(f"layers is {layers!r}; it must be global ids") from error
    if len(given) > limits.PLANES_MAX:
        raise ConfigError(f"layers are over {limits.PLANES_MAX} ids; no layout has so many planes")
    ids = tuple(map(_layer_id, given))
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise ConfigError(f"layers are {ids[:8]}; distinct ids from 0 are needed")
    return ids


def _layer_id(layer: int) -> int:
    try:
        if not isinstance(layer, bool):
            return operator.index(layer)
    except TypeError:
        pass
    raise ConfigError(
        f"layers have {layer!r}; global ids are ints from 0", fields={"layers": repr(layer)}
    )


def positive(**values: int) -> None:
    """Refuse arguments that are no ints of 1 or more.

    Raises:  ConfigError: naming the first such argument and its value.
    """
    _at_least(1, values)


def natural(**values: int) -> None:
    """Refuse arguments that are no ints of 0 or more.

    Raises:  ConfigError: naming the first such argument and its value.
    """
    _at_least(0, values)


def _at_least(least: int, values: dict[str, int]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{name} is {value!r}; it must be {least} or more", fields={name: str(value)}
            )

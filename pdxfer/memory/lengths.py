"""Numbers of bytes as callers give them."""

from __future__ import annotations

import operator

import numpy as np

from pdxfer.errors import ConfigError


def whole(name: str, value: int) -> int:
    """`value` as a plain int, one of numpy too."""
    if isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={value!r} is no number of bytes")
    try:
        return operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name}={value!r} is no whole number of bytes") from error

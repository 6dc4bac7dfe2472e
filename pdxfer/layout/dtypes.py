"""Element types of a cache, by name, and their bytes. Floats of eight bits are stored as bytes."""

from __future__ import annotations

from typing import Final

from pdxfer.errors import ConfigError

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of one stored element, by the name of its type."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a type.

    Args:    dtype: the name of the type, such as `bfloat16`.
    Raises:  ConfigError: the name is not known; the text lists those that are.
    """
    size = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise ConfigError(
            f"dtype is {dtype!r}; known are {', '.join(ITEM_BYTES)}", fields={"dtype": repr(dtype)}
        )
    return size

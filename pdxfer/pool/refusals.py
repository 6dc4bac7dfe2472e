"""Errors of pools that are also the built-in ones that engines catch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ShapeError(ConfigError, ValueError):
    """An argument has a shape, a type or a value that the method does not take; nothing changed."""


class SlotError(ConfigError, IndexError):
    """A slot or page id is not in the pool; nothing changed."""


class HostMemoryError(ResourceError, ValueError):
    """The host has not the memory that a pool needs; none of it was touched."""


@contextmanager
def value_errors() -> Iterator[None]:
    """What makes a pool: a `ConfigError` of its layout leaves as a `ShapeError`, text and all.

    Engines catch `ValueError` where a pool cannot have the geometry that was asked for.
    """
    try:
        yield
    except ConfigError as error:
        if type(error) is not ConfigError:
            raise
        raise ShapeError(str(error), retryable=error.retryable, fields=error.fields) from error

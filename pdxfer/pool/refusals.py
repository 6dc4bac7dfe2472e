"""Errors of pools that are also the built-in ones that engines catch."""

from __future__ import annotations

from pdxfer.errors import ConfigError


class ShapeError(ConfigError, ValueError):
    """An argument has a shape, a type or a value that the method does not take; nothing changed."""


class SlotError(ConfigError, IndexError):
    """A slot or page id is not in the pool; nothing changed."""

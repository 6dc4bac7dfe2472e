"""What a worker gives with a request: pages that are sent, and places that pages go to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer.layout import Pages


@dataclass(frozen=True, slots=True)
class GivenChunk:
    """Pages that a prefill worker sends with one call."""

    pages: dict[str, Pages]
    """By group; they begin at token 0, or where the previous chunk of these layers ended."""
    tokens: int | None = None
    """Of the whole request; known with the last chunk at the latest."""
    layers: list[int] | None = None
    """Global layers whose bytes these are; None: all."""
    last: bool = True
    """Nothing follows."""
    aux: bytes = b""
    """Handed to the decode worker with the commit."""


@dataclass(frozen=True, slots=True)
class GivenPlaces:
    """Where the pages of a request go at a decode worker."""

    pages: dict[str, Pages]
    """By group; they begin with the page that holds token `prefix_tokens`."""
    tokens: int
    """Of the whole request."""
    prefix_tokens: int = 0
    """Tokens that are in the pool already."""

"""What a worker gives with a request: pages that are sent, and places that pages go to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer.errors import ConfigError
from pdxfer.layout import Group, Pages


@dataclass(frozen=True, slots=True)
class GivenChunk:
    """Pages that a prefill worker sends with one call."""

    pages: dict[str, Pages]
    """The pages of each group. They begin at token 0, or where the previous chunk of these layers
    ended."""
    tokens: int | None = None
    """Tokens of the whole request, known with the last chunk at the latest."""
    layers: list[int] | None = None
    """Global ids of the layers whose bytes these are; None: all layers."""
    last: bool = True
    """Whether this is the last chunk of its send."""
    aux: bytes = b""
    """Bytes for the decode worker, which gets them with the commit."""


@dataclass(frozen=True, slots=True)
class GivenPlaces:
    """Where the pages of a request go at a decode worker."""

    pages: dict[str, Pages]
    """The pages of each group. They begin with the page that holds token `prefix_tokens`."""
    tokens: int
    """Tokens of the whole request."""
    prefix_tokens: int = 0
    """How many first tokens are in the pool already."""


def does_not_fit(room: int, group: Group, listed: Pages, tokens: int, *, trim: bool) -> ConfigError:
    """Why a list of pages does not hold the tokens of its request.

    Args:
        room: that the request is of.
        group: of the list, a token group.
        listed: pages that end before the last token, or with a whole page or more behind it.
        tokens: of the whole request.
        trim: whether one page too many would have been left out.
    """
    size, end = group.page_size, listed.end_token(group.page_size)
    count = (end - listed.first_token) // size
    spare = min((end - tokens) // size, count)
    advice = "give the missing pages, or the right tokens"
    if spare > 0:
        advice = f"leave the last {spare} out, or give the right tokens"
        if trim:
            advice += "; trim=True leaves out one page at most"
    return ConfigError(
        f"room {room}: group {group.name}: {count} pages of {size} tokens from token "
        f"{listed.first_token} on end at token {end}, but the request has tokens={tokens}: "
        f"{advice}",
        fields={"group": group.name, "pages": str(count), "tokens": str(tokens)},
    )

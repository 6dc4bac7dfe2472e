"""What the demo asks its models: seeded token ids, or real text for `smollm2`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS = (40, 300, 1000)
ANSWER_TOKENS = 24
CHUNK_TOKENS = 256
"""Prompts are computed in pieces of this size in every process: the same sums, the same order."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    tokens: tuple[int, ...]
    text: str = ""
    """What a person asked, where there is text."""


def seeded(vocabulary: int, seed: int = 0, counts: Sequence[int] = PROMPT_TOKENS) -> list[Prompt]:
    """Random prompts of as many tokens as `counts` says; the same for the same seed."""
    return [
        Prompt(tuple(np.random.default_rng([seed, count]).integers(0, vocabulary, count).tolist()))
        for count in counts
    ]


def send_ranges(pages: int, chunks: int = 4) -> list[slice]:
    """Cut a page list into about `chunks` sends, none of them empty."""
    size = -(-pages // chunks)
    return [slice(start, min(start + size, pages)) for start in range(0, pages, size)]

"""What a person sees of the demo: a progress bar, a table, the answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.demo.options import Side

_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, measured."""

    prompt_tokens: int
    tokens_equal: bool
    cache_equal: bool
    length_bytes: int
    pages: int
    sends: int
    runs: int
    lane: str
    seconds: float
    """First send to commit."""
    commit_s: float
    """Last send to commit."""
    answer: str = ""

    @property
    def rate(self) -> float:
        """GB/s from the first send to the commit."""
        return self.length_bytes / self.seconds / 1e9


class Progress:
    """A bar on a terminal, one line a step elsewhere."""

    def __init__(self, steps: int, stream: TextIO = sys.stderr) -> None:
        self._steps = steps
        self._done = 0
        self._stream = stream
        self._terminal = stream.isatty()

    def step(self, what: str) -> None:
        """One more step is done; `what` comes next."""
        self._done += 1
        full = min(self._done, self._steps) * _BAR_WIDTH // self._steps
        bar = "#" * full + "." * (_BAR_WIDTH - full)
        head, tail = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        self._stream.write(f"{head}[{bar}] {what}{tail}")
        self._stream.flush()

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _word(equal: bool) -> str:
    return "EQUAL" if equal else "DIFFERENT"


_COLUMNS = (
    "prompt", "tokens", "cache", "bytes", "pages", "sends", "runs", "lane", "GB/s",
    "last send to commit",
)  # fmt: skip


def table(rows: list[Row], sides: Sequence[Side] = ()) -> str:
    """The rows as text, one line each under a head.

    Args:    sides: prefill and decode, in columns of their own; empty: there is nothing to tell.
    """
    ends = [str(side) for side in sides]
    columns = [*_COLUMNS, *(("prefill", "decode") if sides else ())]
    cells = [columns]
    cells += [
        [
            str(row.prompt_tokens),
            _word(row.tokens_equal),
            _word(row.cache_equal),
            f"{row.length_bytes:,}",
            str(row.pages),
            str(row.sends),
            str(row.runs),
            row.lane,
            f"{row.rate:.2f}",
            f"{row.commit_s * 1e3:.2f} ms",
            *ends,
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )

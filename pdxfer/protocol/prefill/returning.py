"""Which source pages of a send are the worker's again before all of it is sent. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.protocol.prefill.live_send import LiveChunk, SendLeg


@dataclass(slots=True)
class Returning:
    """How far a send has given its pages back: chunks that every receiver has, in order.

    A chunk is back when every leg has posted it and nothing of it is in flight; so is one of which
    a leg owes nothing.
    """

    chunks: int = 0
    """All chunks below this number are back."""
    tokens: int = 0
    """Pages of tokens below it are back: they were sent in all layers and groups."""
    _ends: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """(group, layer) to the token behind what is back; layer None: all layers."""

    def advance(
        self, layout: KVLayout, chunks: Sequence[LiveChunk], legs: Sequence[SendLeg]
    ) -> bool:
        """Take in what has ended on the lanes; whether more is back than before.

        Args:
            layout: of the source worker.
            chunks: of the send.
            legs: all of them; every receiver has come.
        """
        back = min((leg.chunks_ended for leg in legs), default=0)
        if back <= self.chunks:
            return False
        for chunk in chunks[self.chunks : back]:
            keys: Sequence[int | None] = (None,) if chunk.layers is None else chunk.layers
            for name, (_, end) in chunk.ranges.items():
                self._ends.update({(name, key): end for key in keys})
        self.chunks = back
        self.tokens = max(self.tokens, self._tokens(layout))
        return True

    def _tokens(self, layout: KVLayout) -> int:
        ends = self._ends
        return min(
            (
                max(ends.get((group.name, None), 0), ends.get((group.name, layer), 0))
                for group in layout.groups
                if group.kind == "token"
                for layer in layout.layers_of(group.name)
            ),
            default=0,
        )

"""What a write may still come over, and what proves that it no longer can. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Side:
    """One receive side of a prefill life.

    It lasts from the `Attach` that first names it until no write can come over it any more. Another
    one is made each time the lane is attached anew.
    """

    peer: bytes
    lane: str = ""
    """Known from the `Accept` on."""


@dataclass(frozen=True, slots=True)
class Proof:
    """That a prefill life can write no more."""

    kind: str
    """`drained`, `revoked` or `dead`."""
    peer: bytes
    side: Side | None = None
    """Over this receive side only; None: over whatever it was told."""
    generation: int = 0
    """Of this generation only; 0: of all."""

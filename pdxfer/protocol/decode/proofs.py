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
    """Name of the lane; known from the `Accept` on."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The proof that a prefill life can write no more."""

    kind: str
    """`drained`, `revoked` or `dead`."""
    peer: bytes
    side: Side | None = None
    """The proof is about writes over this receive side only; None: about all writes of that
    life."""
    generation: int = 0
    """The proof is about this generation only; 0: about every generation."""

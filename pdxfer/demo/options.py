"""What the demo's processes are told, and how a pool is made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker process."""

    model: str
    """`llama` or `smollm2`."""
    folder: str
    """Where `smollm2` was saved; empty for `llama`."""
    seed: int
    dtype: str
    model_name: str
    """Goes into the layout, so that other weights would be refused; empty: not compared."""
    socket_path: str
    """Of the daemon beside the worker; empty: the agent is embedded in the worker."""
    lane: str
    pages: int
    """Of the pool, the reserved one counted."""
    page_size: int = PAGE_SIZE

    def to_event(self) -> dict[str, object]:
        """As a channel carries it."""
        return asdict(self)

    @classmethod
    def from_event(cls, value: object) -> WorkerOptions:
        """The reverse of `to_event`."""
        return msgspec.convert(value, cls)

"""Moves the KV cache of an LLM from prefill to decode, into the pages of the decode worker.

Importing this package loads nothing else; `pdxfer.plan` loads the planner (numpy and `_core`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdxfer.layout.planner import plan

__version__ = "0.1.0"
__all__ = ["__version__", "plan"]


def __getattr__(name: str) -> object:
    """Loads the planner when it is first asked for."""
    if name == "plan":
        from pdxfer.layout.planner import plan as loaded

        return loaded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Groups: the index spaces of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKEN: Final = "token"
STATE: Final = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """One index space of page ids: a token group, or a group of request states."""

    name: str
    page_size: int
    """Tokens of one page; 1 for a state group, whose ids are slots of requests."""
    pages: int
    """Number of pages of the pool, the reserved ones included."""
    reserved_pages: int = 1
    """Page ids below this number never travel; valid ids are `reserved_pages <= id < pages`."""
    kind: str = TOKEN
    """`token` where pages hold tokens; `state` where ids pair by position and move whole."""

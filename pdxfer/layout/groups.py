"""Groups: the index spaces of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKEN: Final = "token"
STATE: Final = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """One index space of page ids."""

    name: str
    page_size: int
    """Tokens of one page; 1 for a state group, whose ids are request slots."""
    pages: int
    """Pages of the pool, the reserved ones included."""
    reserved_pages: int = 1
    """Ids below it never travel; valid are `reserved_pages <= id < pages`."""
    kind: str = TOKEN
    """`token`: pages hold tokens. `state`: ids pair by position and move whole."""

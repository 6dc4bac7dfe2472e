"""What is wrong with a text that is no TOML, with the line that it is about."""

from __future__ import annotations

import re
from typing import Final

_PLACE: Final = re.compile(r"\(at line (\d+), column \d+\)$")
_SHOWN_CHARACTERS: Final = 80
_BARE_WORD: Final = re.compile(r"^\s*[\w.-]+\s*=\s*[A-Za-z/]")


def why(error: Exception, text: str) -> str:
    """The parser's words, the text of its line, and what such a line usually lacks."""
    found = _PLACE.search(str(error))
    lines = text.splitlines()
    if found is None or not 1 <= int(found[1]) <= len(lines):
        return str(error)
    line = lines[int(found[1]) - 1].strip()
    shown = line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."
    remedy = "; text stands in quotes" if _BARE_WORD.match(line) and '"' not in line else ""
    return f"{error}: {shown!r}{remedy}"

"""Files that are made from others: `make generated` writes them, a test holds them equal.

docs/layouts.md             from pdxfer/layout/builders
docs/limits.md              from pdxfer/limits.py
docs/refusals.md            from tests/support/refusals.py
docs/transfers.md           from tests/support/transfer_rows.py
pdxfer/**/_*.pyi            from the native modules
"""

import ast
import importlib
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen
from ruff import find_ruff_bin

from pdxfer import limits
from pdxfer.fabric.ucx_loader import load_ucx
from tests.support import layout_page, refusals, transfer_rows

ROOT = Path(__file__).resolve().parents[2]
STUBS = {
    "pdxfer._core": "pdxfer/_core.pyi",
    "pdxfer._ucx": "pdxfer/_ucx.pyi",
    "pdxfer.bench._pieces": "pdxfer/bench/_pieces.pyi",
}
_UNITS = {"BYTES": "B", "MS": "ms", "US": "us", "S": "s"}


def stub(module: str) -> str:
    """The type stub of a native module: what nanobind writes, in this project's form."""
    native = load_ucx().module if module == "pdxfer._ucx" else importlib.import_module(module)
    generator = StubGen(native)
    generator.put(native)
    text = generator.get()
    for command in (["check", "--fix-only", "-q"], ["format", "-q"]):
        text = subprocess.run(
            [find_ruff_bin(), *command, "--stdin-filename", str(ROOT / STUBS[module]), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return text


def limits_table() -> str:
    """Every limit with its value and meaning, by section of the source."""
    source = (ROOT / "pdxfer/limits.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    parts = [
        "# Limits",
        "",
        "Every bound and default deadline of pdxfer. Made from `pdxfer/limits.py` by "
        "`make generated`; do not edit.",
    ]
    section = ""
    body = ast.parse(source).body
    for constant, text in itertools.pairwise(body):
        if not isinstance(constant, ast.AnnAssign):
            continue
        heading = _section(lines, constant.lineno)
        if heading != section:
            section = heading
            parts += ["", f"## {section.capitalize()}", "", "| name | value | meaning |"]
            parts += ["| --- | ---: | --- |"]
        name = constant.target.id
        meaning = re.sub(r"\s+", " ", text.value.value).strip().replace("|", "\\|")
        parts.append(f"| `{name}` | {_shown(name, getattr(limits, name))} | {meaning} |")
    return "\n".join(parts) + "\n"


def _section(lines, line):
    for text in reversed(lines[:line]):
        found = re.match(r"# -- (.+?) -+$", text)
        if found:
            return found[1]
    raise ValueError(f"limits.py line {line} stands in no section")


def _shown(name, value):
    words = name.split("_")
    unit = next((_UNITS[word] for word in reversed(words) if word in _UNITS), "")
    if unit == "B":
        for power, prefix in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value >= 1 << power and value % (1 << power) == 0:
                return f"{value >> power} {prefix}"
    number = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return f"{number} {unit}".strip() if math.isfinite(value) else "none"


def files():
    """Path to content of every generated file."""
    made = {path: stub(module) for module, path in STUBS.items()}
    pages = {
        "docs/layouts.md": layout_page.table(),
        "docs/limits.md": limits_table(),
        "docs/refusals.md": refusals.table(),
        "docs/transfers.md": transfer_rows.table(),
    }
    return {**made, **pages}


if __name__ == "__main__":
    for path, content in files().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(content, encoding="utf-8")
        sys.stdout.write(f"{path}\n")

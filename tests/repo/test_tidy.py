"""What every file of the project keeps to."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 620
FUNCTION_LINES_MAX = 80
_MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
_PLACES = ("/wo" + "rk/", "/ro" + "ot/", "/tmp/" + "w/", "/home" + "/")
_HOSTS = ("pypi" + ".org", "files.python" + "hosted", "download.py" + "torch.org")
_VAGUE = {"utils", "util", "common", "helpers", "misc"}
_TEXT = {".py", ".pyi", ".cpp", ".cu", ".h", ".txt", ".cmake", ".md", ".toml", ".yaml", ".yml", ""}


def tracked():
    """Files that are, or are about to be, in version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
PROJECT_TEXT = [path for path in FILES if path.suffix in _TEXT and path.name != "LICENSE"]


def shown(path):
    return str(path.relative_to(ROOT))


def found(pattern, paths):
    """`file:line` of every match."""
    hits = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                hits.append(f"{shown(path)}:{number}: {line.strip()}")
    return hits


def test_there_is_something_to_check():
    assert len(PYTHON) > 50


def test_files_stay_short():
    code = [path for path in FILES if path.suffix in {".py", ".cpp", ".cu", ".h"}]
    long = {
        shown(path): lines
        for path in code
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES_MAX
    }
    assert long == {}


def test_functions_stay_short():
    long = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long[f"{shown(path)}:{node.name}"] = lines
    assert long == {}


def test_nothing_is_left_for_later():
    assert found(r"\b(" + "|".join(_MARKS) + r")\b", PROJECT_TEXT) == []


def test_no_machine_paths_and_no_registry_hosts():
    assert found("|".join(re.escape(word) for word in (*_PLACES, *_HOSTS)), PROJECT_TEXT) == []


def test_no_module_is_named_after_nothing():
    assert [shown(path) for path in PYTHON if path.stem in _VAGUE] == []


def test_every_package_of_ours_says_what_it_holds():
    empty = [
        shown(path)
        for path in PYTHON
        if path.is_relative_to(ROOT / "pdxfer")
        and not (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip()
    ]
    assert empty == []


def test_every_test_file_has_a_test():
    tests = [path for path in PYTHON if path.name.startswith("test_")]
    without = [
        shown(path) for path in tests if not re.search(r"def test_|class Test", path.read_text())
    ]
    assert without == []


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".md"], ids=shown)
def test_links_inside_the_project_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    broken = [
        link for link in links if "://" not in link and not (path.parent / link).resolve().exists()
    ]
    assert broken == []


def test_text_is_clean():
    assert found(r"[ \t]+$", [path for path in PROJECT_TEXT if path.suffix != ".md"]) == []
    assert [shown(path) for path in PROJECT_TEXT if b"\r" in path.read_bytes()] == []

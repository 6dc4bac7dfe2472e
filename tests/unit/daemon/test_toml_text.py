"""What a person reads of a text that is no TOML."""

import tomllib

import pytest

from pdxfer.daemon.toml_text import why


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("insecure = true\nbind = tcp", "(at line 2, column 8): 'bind = tcp'; text stands in quo"),
        ("bind = /run/a", ": 'bind = /run/a'; text stands in quotes"),
        ("lanes = [1 2]", ": 'lanes = [1 2]'"),
        ("bind = [", "Invalid value (at end of document)"),
        (f"a = x{'y' * 200}", "yyy...'; text stands in quotes"),
    ],
)
def test_the_line_is_shown(text, told):
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads(text)
    assert told in why(caught.value, text)
    assert len(why(caught.value, text)) < 200


def test_an_error_without_a_place_is_as_it_is():
    assert why(OSError("away"), "") == "away"

"""`pdxfer plan`: a summary, a refusal, a wrong file."""

import pytest

from pdxfer.cli.main import main

BASE = {
    "layout": '"page_major"',
    "layers": "4",
    "kv_heads": "2",
    "head_dim": "64",
    "page_size": "16",
    "pages": "32",
    "dtype": '"bfloat16"',
}


@pytest.fixture
def write(tmp_path):
    def make(name, **changes):
        values = {**BASE, **changes}
        file = tmp_path / name
        file.write_text("\n".join(f"{key} = {value}" for key, value in values.items()))
        return str(file)

    return make


def test_equal_envelopes_are_one_run_a_page(write, capsys):
    assert main(["plan", write("a"), write("b", pages="64")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["full", "1", "32,768", "32,768", "32,768"]


def test_a_relayout_is_two_runs_a_page_and_layer(write, capsys):
    prefill = write("a", relayout='"allow"')
    decode = write("b", layout='"token_major"')
    assert main(["plan", prefill, decode]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "8"


def test_a_refusal_names_both_sides(write, capsys):
    assert main(["plan", write("a"), write("b", layout='"token_major"')]) == 1
    assert "PD KV layout mismatch on the whole-envelope path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"head_dims": "64"}, ["'head_dims'", "'head_dim'"]),
        ({"layout": '"paged"'}, ["'paged'", "token_major"]),
        ({"page_size": "0"}, ["page_size", "0"]),
        ({"dtype": '"float31"'}, ["float31"]),
        ({"relayout": '"maybe"'}, ["maybe", "never"]),
    ],
)
def test_a_wrong_description_is_refused_by_name(write, capsys, changes, needles):
    assert main(["plan", write("a"), write("b", **changes)]) == 2
    err = capsys.readouterr().err
    assert all(needle in err for needle in needles), err


def test_a_missing_file_is_named(write, capsys):
    assert main(["plan", write("a"), "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err

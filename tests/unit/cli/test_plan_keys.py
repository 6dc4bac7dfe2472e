"""Keys of a described layout: what is missing and unknown is told at once, with what is known."""

from pathlib import Path

import pytest

from pdxfer.cli.main import main
from pdxfer.cli.plan.keys import check_keys, is_latent, keys_of, latent_names, layout_names
from pdxfer.cli.plan.sides import describe
from pdxfer.errors import ConfigError

BASE = {"layers": 2, "total_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": "bfloat16"}
LATENT = {
    "layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 16,
    "dtype": "bfloat16",
}
VALUES = {
    "isa": "amx",
    "order": "LBHNC",
    "arrangement": "page_major",
    "part": "index_k",
    "group": "swa",
    "model": "m@1",
    "relayout": "allow",
    "ignore_parts": ["v"],
    "interleaved": False,
    "length_bytes": 1 << 30,
    "pages": 32,
    "v_head_dim": 64,
    "head_groups": 2,
    "index_head_dim": 128,
    "index_layers": [0],
    "packed": False,
}
RUN_BOOK = Path(__file__).parents[3] / "deploy" / "README.md"
PAGE_OF_LAYOUTS = Path(__file__).parents[3] / "docs" / "layouts.md"


def text_of(layout, shape):
    with pytest.raises(ConfigError) as caught:
        check_keys(layout, shape)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "latent"),
    [
        *((layout, False) for layout in layout_names() if not is_latent(layout, {})),
        *((layout, True) for layout in latent_names()),
    ],
)
def test_every_known_key_may_be_given(layout, latent):
    """What the list of a layout promises, its builder takes."""
    keys = keys_of(layout, latent=latent)
    shape = {**(LATENT if latent else {**BASE, "head_dim": 32}), "page_size": 128}
    shape |= {key: VALUES[key] for key in keys.needed if key in VALUES}
    assert set(keys.needed) <= set(shape)
    assert describe({"layout": layout, **shape}).workers
    for key in keys.optional:
        value = VALUES.get(key, 4 if "heads" in key else 1)
        beside = (
            {"arrangement": "unified_entries"} if (layout, key) == ("mla", "length_bytes") else {}
        )
        assert describe({"layout": layout, **shape, **beside, key: value}).workers, key


def test_missing_and_unknown_keys_are_told_together():
    text = text_of("page_major", {"layers": 2, "head_dims": 8, "kv_heads": 4, "bogus": 1})
    assert text.startswith("head_dim, page_size, dtype are missing; ")
    assert "unknown key 'head_dims' (did you mean 'head_dim'?); unknown key 'bogus'. " in text
    assert "Layout 'page_major' needs layers, total_kv_heads (or kv_heads of one rank), " in text
    assert "known are also pages, kv_heads, v_head_dim, " in text


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("tp_size", "attention_tp"),
        ("tp", "attention_tp"),
        ("head_count", "kv_heads"),
        ("num_key_value_heads", "total_kv_heads"),
        ("num_layers", "layers"),
        ("block_size", "page_size"),
        ("page_sise", "page_size"),
        ("kv_head_dim", "head_dim"),
    ],
)
def test_a_near_key_is_the_right_one(key, near):
    assert f"unknown key {key!r} (did you mean {near!r}?)" in text_of(
        "page_major", {**BASE, key: 1}
    )


@pytest.mark.parametrize("key", ["ep_size", "qk_head_dim", "zzzz", "kv_lora"])
def test_a_word_that_is_far_from_all_is_not_guessed(key):
    text = text_of("page_major", {**BASE, key: 1})
    assert f"unknown key {key!r}. " in text
    assert "did you mean" not in text
    assert "attention_tp" in text


@pytest.mark.parametrize("key", ["kv_heads", "total_kv_heads", "head_count"])
def test_latent_rows_have_no_heads(key):
    text = text_of("mla", {"layers": 2, "page_size": 16, "dtype": "bfloat16", key: 4})
    assert text.startswith("kv_lora_rank, qk_rope_head_dim are missing; ")
    assert f"unknown key {key!r} (latent rows are one head, the same on every rank)" in text
    assert "did you mean" not in text


def test_the_layout_of_latent_attention_alone_asks_for_its_keys(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text('layout = "mla"\nlayers = 2\npage_size = 16\ndtype = "bfloat16"\n')
    assert main(["plan", "--prefill", str(file), "--decode", str(file)]) == 2
    err = capsys.readouterr().err
    assert "a.toml: kv_lora_rank, qk_rope_head_dim are missing. Layout 'mla' needs " in err
    assert "kv_heads" not in err


def test_help_lists_every_key_of_every_layout(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for layout in layout_names():
        keys = keys_of(layout, latent=is_latent(layout, {}))
        assert layout in out
        assert all(key in out for key in keys.known), layout


def test_the_run_book_has_every_key():
    text, page = RUN_BOOK.read_text(), PAGE_OF_LAYOUTS.read_text()
    for layout in layout_names():
        assert f"| `{layout}` |" in page, layout
        for key in keys_of(layout, latent=is_latent(layout, {})).known:
            assert f"`{key}`" in text, key


class TestFlagsBesideFiles:
    @pytest.fixture
    def files(self, tmp_path):
        lines = [f"{key} = {value!r}" for key, value in {"layout": "token_major", **BASE}.items()]
        (tmp_path / "a.toml").write_text("\n".join(lines))
        (tmp_path / "config.json").write_text(
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}'
        )
        return str(tmp_path / "a.toml"), str(tmp_path / "config.json")

    @pytest.mark.parametrize(
        ("flag", "value", "key"),
        [
            ("--tp", "2", "attention_tp"),
            ("--tp", "1", "attention_tp"),
            ("--pp", "2:1", "pp_size"),
            ("--cp", "2", "cp_size"),
            ("--page-size", "16", "page_size"),
            ("--layout", "page_major", "layout"),
            ("--dtype", "float16", "dtype"),
            ("--relayout", "allow", "relayout"),
        ],
    )
    def test_two_files_take_none(self, files, capsys, flag, value, key):
        toml, _ = files
        assert main(["plan", "--prefill", toml, "--decode", toml, flag, value]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{flag} is {value!r}, and it is for sides of a config.json" in err
        assert f"write {key} into {toml}" in err

    def test_one_value_is_of_the_other_side(self, files, capsys):
        toml, config = files
        sides = ["plan", "--prefill", toml, "--decode-config", config]
        assert main([*sides, "--tp", "2"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[:2] == [
            "prefill: token_major, page size 16, TP 1",
            "decode:  token_major, page size 16, TP 2",
        ]
        assert main([*sides, "--tp", "2:1"]) == 2
        err = capsys.readouterr().err
        assert f"--tp is '2:1', and prefill is the TOML file {toml}: write its attention_tp" in err

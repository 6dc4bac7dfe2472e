"""`pdxfer plan` with files that no pool has: each is refused by file and key, with a remedy."""

import json

import pytest

from pdxfer.cli.main import main
from pdxfer.cli.plan.values import shown

BASE = """
layout = "token_major"
layers = 2
total_kv_heads = 4
head_dim = 8
page_size = 4
dtype = "bfloat16"
"""
MODEL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
}
HUGE = "9" * 5000
DEEP = 100_000


def without(key):
    return "\n".join(line for line in BASE.splitlines() if not line.startswith(f"{key} ="))


def changed(line):
    """BASE with one key given anew, or a new one."""
    return f"{without(line.split(' =')[0])}\n{line}\n"


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command on texts of two TOML files: (exit code, output, errors)."""

    def run(prefill, decode=BASE):
        for name, text in (("prefill.toml", prefill), ("decode.toml", decode)):
            (tmp_path / name).write_text(text)
        code = main(
            ["plan", "--prefill", str(tmp_path / "prefill.toml"),
             "--decode", str(tmp_path / "decode.toml")]
        )  # fmt: skip
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def model(tmp_path, capsys):
    """Runs the command on a model config: (exit code, output, errors)."""

    def run(config, *flags):
        file = tmp_path / "config.json"
        file.write_text(config if isinstance(config, str) else json.dumps(config))
        code = main(["plan", "--prefill-config", str(file), *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


NUMBERS = (
    "attention_tp", "pp_size", "cp_size", "kv_heads", "total_kv_heads", "head_dim", "v_head_dim",
    "page_size", "pages", "reserved_pages", "kv_lora_rank", "qk_rope_head_dim", "heads",
    "heads_total", "head_groups", "length_bytes",
)  # fmt: skip
NO_NUMBERS = ('"x"', "true", "1.5", "nan", "[4]", "{ a = 1 }", "-1", "1" * 100, "0x" + "f" * 6000)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: value[:12])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers(plan, key, value):
    code, out, err = plan(changed(f"{key} = {value}"))
    assert (code, out) == (2, "")
    assert "prefill.toml: " in err
    assert f"{key} is " in err
    assert " or more, and at most " in err
    assert len(err) < 400


@pytest.mark.parametrize("value", ["5", "true", '["a"]', "{ a = 1 }", "1.5"])
@pytest.mark.parametrize("key", ["layout", "dtype", "group", "model", "order", "isa", "part"])
def test_names(plan, key, value):
    code, _, err = plan(changed(f"{key} = {value}"))
    assert code == 2
    assert f"prefill.toml: {key} is " in err
    assert f'text is needed, as in {key} = "..."' in err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("layers = 1000000000", "layers is 1000000000; a count or a list"),
        ("layers = 0", "layers is 0"),
        ("layers = true", "layers is True"),
        ('layers = ["a"]', "layers[0] is 'a'; it must be 0 or more"),
        ("layers = [0, 1.5]", "layers[1] is 1.5"),
        ("layers = [0, true]", "layers[1] is True"),
        ("layers = [-1]", "layers[0] is -1"),
        ("layers = [3, 3]", "layers is [3, 3]; an id is there twice"),
        ("layers = []", "layers is []"),
        (f"layers = {'[' * 400}{']' * 400}", "layers[0] is "),
        ('ignore_parts = "v"', "ignore_parts is 'v'; a list of parts"),
        ("ignore_parts = [5]", "ignore_parts is [5]"),
        ('relayout = "maybe"', "relayout is 'maybe'; it has to be one of allow, never"),
        ("relayout = 5", "relayout is 5"),
        ("interleaved = 5", "interleaved is 5; true or false"),
        ("head_first = 2", "unknown key 'head_first'"),
        ('group = "a b"', "group name is 'a b'"),
        ('dtype = "float31"', "dtype is 'float31'; known are"),
        ("attention_tp = 999999999", "attention_tp 999999999, pp_size 1 and cp_size 1 are "),
        ("cp_size = 5000", "at most 4096 are served"),
        ("pp_size = 4", "pp_size is 4 and layers are 2: some stages would have no layer. "
         "Take pp_size 2 or less"),
    ],
)  # fmt: skip
def test_other_values(plan, line, named):
    code, out, err = plan(changed(line))
    assert (code, out) == (2, "")
    assert f"prefill.toml: {named}" in err or ("prefill.toml" in err and named in err)
    assert len(err) < 500


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("layers = 9000", "18000 regions; 1 to 16384 are allowed; it follows from layers 9000, "),
        ("pages = 2147483647\nv_head_dim = 2147483647", "must hold; it follows from layers 2, "),
    ],
)
def test_what_several_values_come_to(plan, line, named):
    code, _, err = plan(changed(line) + "reserved_pages = 0\n")
    assert code == 2
    assert "prefill.toml: " in err
    assert named in err
    assert "head_dim 8, page_size 4" in err
    assert len(err) < 500


def test_many_layers_of_many_ranks(plan):
    text = changed("layers = 60000").replace("total_kv_heads = 4", "total_kv_heads = 64")
    code, _, err = plan(text + "attention_tp = 64\n")
    assert code == 2
    assert "layers are 60000 and attention_tp is 64: 3840000 layers of ranks" in err


def test_many_pairs_of_ranks(plan):
    ranks = changed("attention_tp = 4096")
    code, _, err = plan(ranks, ranks)
    assert code == 2
    assert "prefill.toml has 4096 ranks and" in err
    assert "more than 65536 pairs" in err


def test_many_ranks_of_one_instance(plan):
    code, out, _ = plan(changed("attention_tp = 4096"))
    assert code == 0
    assert "decode rank 0 from prefill rank 0, 1024, 2048, 3072" in out


@pytest.mark.parametrize("key", ["layers", "head_dim", "page_size", "dtype", "layout"])
def test_keys_that_are_missing(plan, key):
    code, _, err = plan(without(key))
    assert code == 2
    assert f"prefill.toml: {key} is " in err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"a = {'[' * 60_000}", "nested too deeply"),
        (f"layers = {HUGE}", "'layers = 9999"),
        ("x", "Expected '='"),
        ("\0", "line 1"),
        ("a = 1\n" * 20_000, "it has over 65536 bytes"),
    ],
    ids=["deep", "digits", "no toml", "no text", "long"],
)
def test_texts_that_are_no_description(plan, text, named):
    code, _, err = plan(text)
    assert code == 2
    assert "cannot read the layout" in err
    assert "prefill.toml: " in err
    assert named in err
    assert len(err) < 400


class TestIgnoredParts:
    def test_a_plan_of_nothing_is_refused(self, plan):
        code, out, err = plan(changed('ignore_parts = ["k", "v"]'))
        assert (code, out) == (2, "")
        assert "prefill.toml: ignore_parts is ['k', 'v']; decode has k, v and no other part" in err
        assert "Take out a part that both sides have" in err

    def test_both_files_are_named(self, plan):
        code, _, err = plan(changed('ignore_parts = ["k"]'), changed('ignore_parts = ["v"]'))
        assert code == 2
        assert "prefill.toml: ignore_parts is ['k'] and " in err
        assert "decode.toml: ignore_parts is ['v']; " in err

    def test_one_part_may_be(self, plan):
        code, out, _ = plan(changed('ignore_parts = ["v"]'))
        assert code == 0
        assert out.splitlines()[5].split()[2] == str(2 * 4 * 4 * 8 * 2)


class TestHeads:
    """Every head is on some rank, or the description is refused."""

    @pytest.mark.parametrize(
        ("total", "tp", "near"),
        [(4, 3, 2), (3, 2, 1), (8, 3, 2), (8, 6, 4), (6, 4, 3), (4, 6, 4), (3, 8, 6), (2, 3, 2)],
    )
    def test_a_tp_that_loses_heads_is_refused(self, plan, total, tp, near):
        text = changed(f"total_kv_heads = {total}") + f"attention_tp = {tp}\n"
        for sides in ((text, text), (text, BASE), (BASE, text)):
            code, out, err = plan(*sides)
            assert (code, out) == (2, "")
            assert f".toml: attention_tp is {tp} and total_kv_heads is {total}: one has to" in err
            assert f"Take attention_tp {near}" in err

    @pytest.mark.parametrize(
        ("total", "prefill", "decode"), [(6, 3, 2), (4, 8, 2), (4, 1, 4), (1, 3, 5), (12, 6, 4)]
    )
    def test_others_are_planned_and_every_byte_moves(self, plan, total, prefill, decode):
        sides = [
            changed(f"total_kv_heads = {total}") + f"attention_tp = {tp}\n"
            for tp in (prefill, decode)
        ]
        code, out, err = plan(*sides)
        assert (code, err) == (0, "")
        assert all(f"decode rank {rank} from" in out for rank in range(decode))

    def test_heads_of_an_index(self, plan):
        index = changed('layout = "k_only"')
        code, _, err = plan(f"{index}attention_tp = 3\n", index)
        assert code == 2
        assert "attention_tp is 3 and total_kv_heads is 4" in err
        assert plan(f"{index}attention_tp = 2\n", index)[0] == 0

    def test_a_models_config_names_its_own_key_and_the_flag(self, model):
        code, _, err = model(MODEL, "--tp", "2:3")
        assert code == 2
        assert "config.json: --tp is 3 and num_key_value_heads is 4: one has to be" in err
        assert "Take --tp 2" in err
        config = {**MODEL, "num_key_value_heads": None}
        assert "--tp is 3 and num_attention_heads is 8" in model(config, "--tp", "3")[2]

    def test_latent_rows_are_on_every_rank(self, model):
        config = {**MODEL, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        assert model(config, "--tp", "3:5")[0] == 0


CONFIG_NUMBERS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim",
    "kv_lora_rank", "hidden_size",
)  # fmt: skip


class TestModelConfig:
    @pytest.mark.parametrize(
        "value", [0, -1, True, 1.5, "2", [2], {}, 1 << 31, 10**18, 10**200, float("nan")], ids=repr
    )
    @pytest.mark.parametrize("key", CONFIG_NUMBERS)
    def test_numbers(self, model, key, value):
        config = {**MODEL, "qk_rope_head_dim": 8, key: value}
        if key == "hidden_size":
            config["head_dim"] = None
        code, out, err = model(config)
        assert (code, out) == (2, "")
        assert f"config.json: {key} is " in err
        assert "it must be 1 or more, and at most " in err

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
            ({"layer_types": []}, "layer_types is []; a list of 1 to 65536 kinds"),
            ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
            ({"layer_types": {}}, "layer_types is {}"),
            ({"layer_types": [5, 5]}, "layer_types has 5; only full_attention"),
            ({"layer_types": [["full_attention"]]}, "layer_types has ['full_attention']"),
            (
                {"layer_types": ["full_attention"] * 5},
                "layer_types has 5 kinds and num_hidden_layers is 2",
            ),
            (
                {"layer_types": ["full_attention"] * 2, "num_hidden_layers": "2"},
                "num_hidden_layers is '2'",
            ),
            ({"torch_dtype": ["a"]}, "torch_dtype is ['a']; known are"),
            ({"torch_dtype": None, "dtype": "auto"}, "dtype is 'auto'; known are"),
            ({"head_dim": None, "hidden_size": 4}, "hidden_size is 4 and num_attention_heads is 8"),
        ],
    )
    def test_other_values(self, model, changes, named):
        code, out, err = model({**MODEL, **changes})
        assert (code, out) == (2, "")
        assert f"config.json: {named}" in err

    def test_kinds_of_layers_without_their_number(self, model):
        config = {**MODEL, "num_hidden_layers": None, "layer_types": ["full_attention"] * 3}
        code, out, _ = model(config)
        assert code == 0
        assert out.splitlines()[5].split()[2] == f"{3 * 2 * 16 * 4 * 16:,}"

    def test_stages_without_layers(self, model):
        kinds = ["full_attention", "sliding_attention"]
        for config in (MODEL, {**MODEL, "layer_types": kinds}):
            code, _, err = model(config, "--pp", "4")
            assert code == 2
            assert "--pp is 4 and num_hidden_layers are 2" in err
            assert "Take --pp 2 or less" in err

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("[" * DEEP, "nested too deeply"),
            ('{"a": ' * DEEP, "nested too deeply"),
            ("{", "Expecting property name"),
            ("[]", "holds no JSON object"),
            ('{"a": "' + "x" * (8 << 20) + '"}', "it has over 8388608 bytes"),
        ],
        ids=["lists", "objects", "no json", "no object", "long"],
    )
    def test_texts_that_are_no_config(self, model, text, named):
        code, _, err = model(text)
        assert code == 2
        assert "config.json" in err
        assert len(err) < 500
        assert named in err

    def test_numbers_of_thousands_of_digits(self, model):
        text = json.dumps(MODEL).replace('"num_hidden_layers": 2', f'"num_hidden_layers": {HUGE}')
        code, _, err = model(text)
        assert code == 2
        assert "config.json: num_hidden_layers is '9999" in err
        assert len(err) < 300

    @pytest.mark.parametrize("flag", ["tp", "pp", "cp", "page-size"])
    @pytest.mark.parametrize(
        "value", ["0", "-1", "x", "1.5", "", "1:", ":1", "1:2:1", HUGE, "2147483648", "\u0664"],
        ids=lambda value: value[:12],
    )  # fmt: skip
    def test_flags_that_are_no_numbers(self, model, flag, value):
        code, out, err = model(MODEL, f"--{flag}={value}")
        assert (code, out) == (2, "")
        assert f"--{flag} is " in err
        assert "numbers from 1 to 2147483647 are needed, as 4 or 4:2" in err
        assert len(err) < 300

    @pytest.mark.parametrize("flag", ["tp", "pp", "cp"])
    def test_more_ranks_than_are_served(self, model, flag):
        code, _, err = model(MODEL, f"--{flag}", "999999999")
        assert code == 2
        assert f"--{flag} 999999999" in err
        assert "are 999999999 ranks; at most 4096 are served: take smaller sizes" in err

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--dtype", "float31"], "--dtype is 'float31'; it has to be one of float32"),
            (["--relayout", "allow:maybe"], "--relayout is 'maybe'; it has to be one of allow"),
            (["--layout", "paged"], "--layout is 'paged'; it has to be one of token_major"),
        ],
    )
    def test_flags_of_other_names(self, model, flags, named):
        code, _, err = model(MODEL, *flags)
        assert code == 2
        assert named in err


@pytest.mark.parametrize("name", ["/dev/zero", "/", "/proc/self/mem"])
def test_what_is_no_file_of_text(name, capsys):
    assert main(["plan", "--prefill", name, "--decode", name]) == 2
    assert f"cannot read the layout {name}: " in capsys.readouterr().err


def test_bytes_that_are_no_text(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xff\xfe")
    assert main(["plan", "--prefill", str(file), "--decode", str(file)]) == 2
    assert "a.toml: 'utf-8' codec" in capsys.readouterr().err


def test_every_value_can_be_shown():
    nested = []
    for _ in range(DEEP):
        nested = [nested]
    assert shown(nested) == "a value of type list too long to be shown"
    assert shown(1 << 100_000) == "a value of type int too long to be shown"
    assert shown("x" * 100) == "'" + "x" * 76 + "..."
    assert shown([1, 2]) == "[1, 2]"

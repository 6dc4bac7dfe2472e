"""`pdxfer plan`: a summary, a refusal, a wrong file, a model's config."""

import json

import pytest

from pdxfer.cli.main import main

BASE = {
    "layout": "page_major",
    "layers": 4,
    "total_kv_heads": 8,
    "head_dim": 64,
    "page_size": 16,
    "pages": 32,
    "dtype": "bfloat16",
}
LATENT = {
    "layout": "mla",
    "layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 16,
    "dtype": "bfloat16",
}


def toml(values):
    return "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None
    )


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command on two descriptions: (exit code, lines of output, errors)."""

    def run(prefill, decode, *flags):
        for name, values in (("prefill", prefill), ("decode", decode)):
            (tmp_path / name).write_text(toml(values))
        sides = ["--prefill", str(tmp_path / "prefill"), "--decode", str(tmp_path / "decode")]
        code = main(["plan", *sides, *flags])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


class TestSummary:
    def test_equal_envelopes_are_one_run_a_page(self, plan):
        code, out, _ = plan(BASE, {**BASE, "pages": 64})
        assert code == 0
        assert out[0] == "prefill: page_major, page size 16, TP 1"
        assert out[3] == "decode rank 0 from prefill rank 0"
        assert out[5].split() == ["full", "1", "131,072", "131,072", "131,072", "1"]

    def test_a_relayout_is_two_runs_a_page_and_layer(self, plan):
        code, out, _ = plan({**BASE, "relayout": "allow"}, {**BASE, "layout": "token_major"})
        assert code == 0
        assert out[5].split()[:3] == ["full", "8", "131,072"]

    def test_other_tp_names_who_sends_to_whom(self, plan):
        code, out, _ = plan(
            {**BASE, "layout": "token_major", "attention_tp": 4},
            {**BASE, "layout": "head_major", "attention_tp": 2},
        )
        assert code == 0
        assert "decode rank 0 from prefill rank 0, 1" in out
        assert "decode rank 1 from prefill rank 2, 3" in out
        # both decode ranks and both senders of each are written alike: one table, one row
        assert [line for line in out if line.startswith("full")] == [out[6]]
        assert out[6].split()[-1] == "2"

    def test_stages_and_context_parallel_ranks(self, plan):
        code, out, _ = plan({**LATENT, "pp_size": 2, "cp_size": 2}, LATENT)
        assert code == 0
        assert out[0] == "prefill: mla, page size 16, TP 1, PP 2, CP 2"
        assert "decode rank 0 from prefill rank 0, 1, 2, 3" in out

    @pytest.mark.parametrize("name", ["page_first", "page_unified", "LHBNC", "head_major"])
    def test_every_kind_of_layout_by_name(self, plan, name):
        code, out, _ = plan({**BASE, "layout": name}, {**BASE, "layout": "token_major"})
        assert code == 0
        assert out[0].startswith(f"prefill: {name}, ")

    @pytest.mark.parametrize("name", ["mla", "page_major", "page_first_direct", "BLHNC"])
    def test_latent_attention_in_every_arrangement(self, plan, name):
        code, _, err = plan({**LATENT, "layout": name, "relayout": "allow"}, LATENT)
        assert (code, err) == (0, "")


CANNOT = {
    "page size of whole envelopes": (
        BASE,
        {"page_size": 64},
        ["item_lens=[131072]", "item_len=524288", "same page size"],
        ["page_size: prefill=16, decode=64"],
    ),
    "attention TP of whole envelopes": (
        {**BASE, "attention_tp": 4},
        {"attention_tp": 2},
        ["does not support different", "(prefill=4, decode=2)"],
        ["attention_tp: prefill=4, decode=2"],
    ),
    "only one side unified": (
        BASE,
        {"layout": "token_major", "relayout": "never"},
        ["whole-envelope path", "both sides must enable it"],
        ["unified_memory: prefill=True, decode=False"],
    ),
    "inner order of equal envelopes": (
        BASE,
        {"layout": "unified_entries"},
        ["inner order", 'Set relayout="allow" on both sides'],
        ["row 1024", "row 8192"],
    ),
    "dtype": (
        {**BASE, "layout": "token_major"},
        {"dtype": "float8_e4m3fn"},
        ["kv_cache_dtype=bfloat16", "kv_cache_dtype=float8_e4m3fn", "must use the same"],
        ["dtype: prefill=bfloat16, decode=float8_e4m3fn"],
    ),
    "layers": (
        {**BASE, "layout": "token_major"},
        {"layers": 5},
        ["layers", "0-3 (4 layers)", "0-4 (5 layers)", "must serve the same model"],
        ["layers: prefill=0-3 (4 layers), decode=0-4 (5 layers)"],
    ),
    "heads of the model": (
        {**BASE, "layout": "token_major"},
        {"total_kv_heads": 4},
        ["total_kv_heads of full/k", "prefill has 8, decode has 4", "must serve the same model"],
        ["total_kv_heads of full/k: prefill=8, decode=4"],
    ),
    "width of values": (
        {**BASE, "layout": "token_major"},
        {"v_head_dim": 32},
        ["v_head_dim of full/v", "prefill has 64, decode has 32", "must serve the same model"],
        ["v_head_dim of full/v: prefill=64, decode=32"],
    ),
    "latent against keys and values": (
        {**LATENT},
        {"kv_lora_rank": None, "qk_rope_head_dim": None, "layout": "token_major",
         "total_kv_heads": 8, "head_dim": 64},
        ["parts", "full/latent, full/rope", "full/k, full/v", "ignore_parts"],
        ["parts: prefill=full/latent, full/rope, decode=full/k, full/v"],
    ),
    "model": (
        {**BASE, "model": "m@1", "layout": "token_major"},
        {"model": "m@2"},
        ["model", "m@1", "m@2", "same model and revision"],
        ["model: prefill=m@1, decode=m@2"],
    ),
    "decode context parallel": (
        LATENT,
        {"cp_size": 2},
        ["Decode cp size (2) should be equal to 1", "Start decode with cp_size=1"],
        ["cp_size: prefill=1, decode=2"],
    ),
    "tiles of two instruction sets": (
        {**BASE, "layout": "vllm_cpu", "isa": "vec16"},
        {"isa": "amx"},
        ["tile of full/k", "vllm_cpu_vec16", "vllm_cpu_amx", "both sides must use the same one"],
        ["tile of full/k: prefill=vllm_cpu_vec16, decode=vllm_cpu_amx"],
    ),
    "page size of tiles": (
        {**BASE, "layout": "vectorized_5d"},
        {"page_size": 32},
        ["page_size of full/k", "both sides must use the same page size"],
        ["page_size of full/k: prefill=16, decode=32"],
    ),
    "scales on one side": (
        {**BASE, "layout": "mxfp8", "dtype": "float8_e4m3fn"},
        {"layout": "token_major"},
        ["parts", "full/k_scale", "must be named in ignore_parts"],
        ["parts: prefill=full/k, full/k_scale, full/v, full/v_scale, decode=full/k, full/v"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", CANNOT)
def test_a_pair_that_cannot_work_names_field_both_values_and_remedy(plan, pair):
    prefill, changes, needles, fields = CANNOT[pair]
    code, out, err = plan(prefill, {**prefill, **changes})
    assert code == 1
    assert len(out) == 2
    text, *lines = err.splitlines()
    assert all(needle in text for needle in needles), text
    assert all(any(field in line for line in lines) for field in fields), err


def test_at_least_ten_pairs():
    assert len(CANNOT) >= 10


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({"page_size": 64}, True),
        ({"attention_tp": 2}, True),
        ({"page_size": 64, "layers": 5}, False),
    ],
)
def test_a_strict_pair_tells_whether_relayout_would_do(plan, changes, works):
    code, _, err = plan(BASE, {**BASE, **changes})
    assert code == 1
    assert ('With relayout = "allow" on both sides this pair works.' in err) is works


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"head_dims": 64}, ["'head_dims'", "'head_dim'"]),
        ({"zzzz": 1}, ["'zzzz'", "known are", "attention_tp"]),
        ({"layout": "paged"}, ["'paged'", "token_major", "LBHNC"]),
        ({"page_size": 0}, ["page_size", "0"]),
        ({"dtype": "float31"}, ["float31"]),
        ({"relayout": "maybe"}, ["maybe", "never"]),
        ({"attention_tp": 0}, ["attention_tp", "1 or more"]),
        ({"attention_tp": 4, "kv_heads": 8}, ["kv_heads = 8", "attention_tp = 4 is 2"]),
        ({"ignore_parts": "v"}, ["ignore_parts", "list"]),
        ({"layers": 0}, ["layers", "count or a list"]),
        ({"total_kv_heads": None}, ["total_kv_heads is missing", "or kv_heads of one rank"]),
        ({"page_size": None}, ["page_size"]),
    ],
)
def test_a_wrong_description_is_refused_by_name(plan, changes, needles):
    code, _, err = plan(BASE, {**BASE, **changes})
    assert code == 2
    assert all(needle in err for needle in needles), err


def test_missing_files_are_named(tmp_path, capsys):
    there = tmp_path / "a.toml"
    there.write_text(toml(BASE))
    assert main(["plan", "--prefill", str(there), "--decode", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err
    assert main(["plan", "--prefill-config", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
    assert main(["plan", "--prefill", str(there)]) == 2
    assert "--decode" in capsys.readouterr().err


QWEN = {
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


class TestModelConfig:
    @pytest.fixture
    def run(self, tmp_path, capsys):
        def run(config, *flags):
            file = tmp_path / "config.json"
            file.write_text(json.dumps(config))
            code = main(["plan", "--prefill-config", str(file), *flags])
            out, err = capsys.readouterr()
            return code, out.splitlines(), err

        return run

    def test_tp_and_page_size_of_both_sides(self, run):
        code, out, _ = run(QWEN, "--tp", "4:2", "--page-size", "64:16")
        assert code == 0
        assert out[0] == "prefill: token_major, page size 64, TP 4"
        assert out[1] == "decode:  token_major, page size 16, TP 2"
        row = next(line for line in out if line.startswith("full"))
        # 6 layers, K and V, 16 tokens of 2 of 4 heads of 256 bytes
        assert row.split()[1:] == ["192", "98,304", "512", "512", "2"]

    def test_layouts_of_both_sides(self, run):
        code, out, _ = run(
            QWEN, "--layout", "page_major:token_major", "--relayout", "allow", "--page-size", "32"
        )
        assert code == 0
        assert out[5].split()[1] == "12"

    def test_head_dim_by_default(self, run):
        config = {**QWEN, "hidden_size": 2048}
        del config["head_dim"], config["num_key_value_heads"]
        code, out, _ = run(config)
        assert code == 0
        assert out[5].split()[2] == f"{6 * 2 * 16 * 16 * 256:,}"

    def test_latent_attention(self, run):
        config = {**QWEN, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        code, out, _ = run(config, "--layout", "page_major", "--tp", "8:2", "--relayout", "allow")
        assert code == 0
        assert "decode rank 1 from prefill rank 1" in out

    def test_window_layers_are_a_group_of_their_own(self, run):
        kinds = ["sliding_attention", "full_attention"] * 3
        code, out, _ = run({"text_config": {**QWEN, "layer_types": kinds}}, "--pp", "3:1")
        assert code == 0
        # each stage of two layers holds one of each group
        assert [line.split()[0] for line in out[5:8]] == ["full", "swa", "runs"]
        assert out[5].split()[-1] == "3"

    def test_another_config_at_decode(self, run, tmp_path):
        other = tmp_path / "other.json"
        other.write_text(json.dumps({**QWEN, "num_hidden_layers": 7}))
        code, _, err = run(QWEN, "--decode-config", str(other))
        assert code == 1
        assert "layers: prefill=0-5 (6 layers), decode=0-6 (7 layers)" in err

    def test_dtype_of_the_cache(self, run):
        code, _, err = run(QWEN, "--dtype", "bfloat16:float8_e5m2")
        assert code == 1
        assert "kv_cache_dtype=float8_e5m2" in err

    @pytest.mark.parametrize(
        ("config", "flags", "needles"),
        [
            ([], [], ["no JSON object"]),
            ({**QWEN, "num_hidden_layers": 0}, [], ["num_hidden_layers is 0"]),
            ({"num_hidden_layers": 2}, [], ["num_attention_heads is None"]),
            ({**QWEN, "layer_types": ["linear_attention"]}, [], ["linear_attention", "state"]),
            (QWEN, ["--tp", "x"], ["--tp is 'x'", "4:2"]),
            (QWEN, ["--page-size", "16:0"], ["--page-size is '16:0'"]),
            (QWEN, ["--layout", "paged"], ["'paged'", "token_major"]),
        ],
    )
    def test_what_is_no_model(self, run, config, flags, needles):
        code, _, err = run(config, *flags)
        assert code == 2
        assert all(needle in err for needle in needles), err

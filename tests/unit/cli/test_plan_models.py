"""Models whose layers are not all alike: planned as the file says, or refused by key and value."""

import json

import pytest

from pdxfer.cli.main import main
from pdxfer.cli.plan.models import layer_groups
from pdxfer.errors import ConfigError

MODEL = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
}
EVERY = {"full": list(range(8))}


@pytest.fixture
def model(tmp_path, capsys):
    """Runs the command on a model config: (exit code, output, errors)."""

    def run(config, *flags):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        code = main(["plan", "--prefill-config", str(file), *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"sliding_window": 0},
        {"mamba_d_state": None, "attn_layer_period": 0},
        {"attn_type_list": [1] * 8},
        {"num_kv_shared_layers": 0, "is_encoder_decoder": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 8},
    ],
)
def test_keys_that_say_nothing(changes):
    assert layer_groups({**MODEL, **changes}) == EVERY


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"model_type": "gemma2"}, [1, 3, 5, 7]),
        ({"model_type": "gemma3_text"}, [5]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [2, 5]),
        ({"model_type": "cohere2"}, [3, 7]),
        ({"use_sliding_window": True, "max_window_layers": 3}, [0, 1, 2]),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, [1, 3, 5, 7]),
    ],
)
def test_layers_with_a_window_are_a_group_of_their_own(changes, full):
    found = layer_groups({**MODEL, "sliding_window": 512, **changes})
    assert found == {"full": full, "swa": [layer for layer in range(8) if layer not in full]}


def test_a_window_in_every_layer():
    config = {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}
    assert layer_groups({**MODEL, **config}) == {"swa": list(range(8))}


def test_a_window_is_planned_as_two_groups(model):
    config = {**MODEL, "model_type": "gemma3_text", "sliding_window": 512}
    code, out, err = model(config)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[5:7]] == ["full", "swa"]


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("sliding_window", 4096, "set sliding_window to null"),
        ("attention_chunk_size", 8192, "Add layer_types"),
        ("attn_layer_period", 8, "recurrent state"),
        ("mamba_d_state", 16, "pdxfer.layout in Python"),
        ("layers_block_type", ["mamba", "attention"], "layers = [ids]"),
        ("attn_type_list", [0, 1], "recurrent state"),
        ("hybrid_override_pattern", "M-M*", "recurrent state"),
        ("num_kv_shared_layers", 2, "one for each group"),
        ("index_topk", 2048, "TOML"),
        ("is_encoder_decoder", True, "TOML"),
    ],
)
def test_what_cannot_be_represented_is_refused(model, key, value, remedy):
    code, out, err = model({**MODEL, "model_type": "unheard_of", key: value})
    assert (code, out) == (2, "")
    assert f"config.json: {key} is {value!r}: " in err
    assert remedy in err
    assert "--prefill FILE" in err
    assert len(err) < 600


def test_an_unknown_pattern_of_windows_is_refused():
    config = {**MODEL, "sliding_window": 512, "sliding_window_pattern": "LLLG"}
    with pytest.raises(ConfigError, match="sliding_window is 512: the file does not say which"):
        layer_groups(config)
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LLLG'"):
        layer_groups({**config, "model_type": "cohere2"})


@pytest.mark.parametrize("key", ["multi_query", "num_kv_heads"])
def test_heads_by_another_name_are_not_guessed(model, key):
    code, _, err = model({**MODEL, "num_key_value_heads": None, key: 1})
    assert code == 2
    assert f"config.json: {key} is 1: num_key_value_heads is missing" in err
    assert model({**MODEL, key: 1})[0] == 0


class TestLatent:
    def test_a_model_without_it_is_told_so(self, model):
        code, out, err = model(MODEL, "--layout", "mla")
        assert (code, out) == (2, "")
        assert "config.json: --layout is 'mla', and this model has no latent attention" in err
        assert "kv_lora_rank is missing" in err
        assert "--layout token_major" in err
        assert "unknown key" not in err

    def test_a_layout_that_it_cannot_have(self, model):
        config = {**MODEL, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        code, _, err = model(config, "--layout", "head_major")
        assert code == 2
        assert "layout is 'head_major', and kv_lora_rank says latent attention" in err
        assert "it has to be one of token_major, page_major" in err

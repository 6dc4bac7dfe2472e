"""What a model's Hugging Face `config.json` says of its cache, and what it says that no plan can.

A key that changes which layers have pages, or how many, is followed where the file says it all, and
refused by name otherwise: a plan of another model's cache would look like an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.cli.plan.keys import MLA_KEYS, is_latent
from pdxfer.cli.plan.values import NUMBER_MAX, number, shown
from pdxfer.errors import ConfigError
from pdxfer.layout.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

_GROUPS: Final = {"full_attention": "full", "sliding_attention": "swa"}
_STATE_KEYS: Final = (
    "attn_layer_period", "attn_layer_indices", "hybrid_layer_ids", "layers_block_type",
    "block_types", "hybrid_override_pattern", "hybrid_layer_pattern", "full_attention_interval",
    "full_attn_idxs", "linear_attn_config", "linear_num_key_heads", "attn_type_list",
    "layer_group_size", "conv_L_cache", "lru_width",
)  # fmt: skip
"""Keys of models of which some layers keep recurrent state."""
_STATE_PREFIXES: Final = ("mamba_", "ssm_")
_SHAPE_KEYS: Final = (
    "is_encoder_decoder", "cross_attention_layers", "num_kv_shared_layers", "use_cla",
    "block_configs", "index_topk",
)  # fmt: skip
"""Keys of models with a cache of another encoder, layers that share a cache, layers of several
shapes, or an index beside the cache."""
_HEAD_KEYS: Final = ("multi_query", "num_kv_heads", "n_head_kv", "multi_query_group_num")
"""Keys by which some models say how many KV heads they have, each in a way of its own."""
_WINDOW_KEYS: Final = (
    "attention_chunk_size", "attention_window_size", "interleaved_sliding_window",
    "attention_layers", "attention_types", "local_attention", "sliding_window",
)  # fmt: skip
_PERIODS: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""How many layers, by model type, have one that attends to everything, the last of them; where the
file has `sliding_window_pattern`, that counts."""
_PER_GROUP: Final = (
    "Describe its layers in TOML files instead, one for each group (layers = [ids], group = "
    '"swa"): --prefill FILE, keys in `pdxfer plan --help`'
)


def heads(config: dict[str, object]) -> tuple[str, dict[str, object]]:
    """The key that says how many KV heads there are, and what a description says of heads.

    Raises:  ConfigError: a key that is missing or has no such value; the text names it.
    """
    if config.get("kv_lora_rank") is not None:
        return MLA_KEYS[0], {key: _number(config, key) for key in MLA_KEYS}
    attention = _number(config, "num_attention_heads")
    key = "num_key_value_heads"
    if config.get(key) is None:
        other = next((name for name in _HEAD_KEYS if config.get(name)), None)
        if other is not None:
            raise _refused(
                config,
                other,
                f"num_key_value_heads is missing, and how many KV heads {other} means differs "
                "between models. Add num_key_value_heads to the file",
            )
        key = "num_attention_heads"
    width = _number(config, "head_dim") if config.get("head_dim") is not None else 0
    if not width:
        hidden = _number(config, "hidden_size")
        width = hidden // attention
        if not width:
            raise ConfigError(
                f"hidden_size is {hidden} and num_attention_heads is {attention}: no width is left "
                "for a head. Give head_dim",
                fields={"hidden_size": str(hidden), "num_attention_heads": str(attention)},
            )
    values = _number(config, "v_head_dim") if config.get("v_head_dim") is not None else width
    return key, {"total_kv_heads": _number(config, key), "head_dim": width, "v_head_dim": values}


def check_layout(config: dict[str, object], layout: str) -> None:
    """Refuse a layout of latent attention for a model that has no latent attention.

    Raises:  ConfigError: naming the layout.
    """
    if is_latent(layout, {}) and config.get("kv_lora_rank") is None:
        raise ConfigError(
            f"--layout is {layout!r}, and this model has no latent attention: kv_lora_rank is "
            "missing. Take --layout token_major, or another layout of keys and values",
            fields={"layout": layout, "kv_lora_rank": "none"},
        )


def stored_dtype(config: dict[str, object]) -> str:
    """The element type of the model, which its cache has where no flag says otherwise.

    Raises:  ConfigError: a type that no cache has.
    """
    for key in ("torch_dtype", "dtype"):
        value = config.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str) or value not in ITEM_BYTES:
            raise ConfigError(
                f"{key} is {shown(value)}; known are {', '.join(ITEM_BYTES)}: give --dtype",
                fields={key: shown(value)},
            )
        return value
    return "bfloat16"


def layer_groups(config: dict[str, object]) -> dict[str, list[int]]:
    """The global layers of each group, by the name of the group.

    Raises:  ConfigError: a key that says something else than full or window attention of them; the
             text names it.
    """
    _check_shapes(config)
    kinds = config.get("layer_types")
    if kinds is not None:
        return _by_kind(config, kinds)
    most = limits.PLANES_MAX
    layers = range(_number(config, "num_hidden_layers", most))
    window = next((key for key in _WINDOW_KEYS if _window(config, key)), None)
    if window is None:
        return {"full": list(layers)}
    full = _full_layers(config, window, layers)
    found = {"full": sorted(full), "swa": [layer for layer in layers if layer not in full]}
    return {name: ids for name, ids in found.items() if ids}


def _check_shapes(config: dict[str, object]) -> None:
    """Refuse a model whose layers are unlike, or keep something else than pages."""
    for key, value in config.items():
        if not value:
            continue
        state = key in _STATE_KEYS or key.startswith(_STATE_PREFIXES)
        if key == "attn_type_list" and isinstance(value, list) and all(v == 1 for v in value):
            state = False  # every layer attends
        if state:
            raise _refused(
                config,
                key,
                "some layers of this model keep recurrent state. Describe its attention layers in "
                "a TOML file (layers = [ids]; --prefill FILE, keys in `pdxfer plan --help`), "
                "recurrent state with pdxfer.layout in Python",
            )
        if key in _SHAPE_KEYS:
            raise _refused(
                config,
                key,
                f"its cache is not one of equal layers, each with pages of its own. {_PER_GROUP}",
            )


def _window(config: dict[str, object], key: str) -> bool:
    """Whether the key says that layers attend to a window."""
    if key == "sliding_window" and config.get("use_sliding_window") is False:
        return False
    return bool(config.get(key))


def _full_layers(config: dict[str, object], window: str, layers: Iterable[int]) -> set[int]:
    """The layers that attend to everything, in a model in which the others have a window.

    Raises:  ConfigError: the file does not say which layers these are.
    """
    if window == "sliding_window":
        first = config.get("max_window_layers")
        if config.get("use_sliding_window") is True and first is not None:
            least = number("max_window_layers", first, least=0)
            return {layer for layer in layers if layer < least}
        model = config.get("model_type")
        if isinstance(model, str) and model in _PERIODS:
            given = config.get("sliding_window_pattern")
            period = _PERIODS[model]
            if given is not None:
                period = number("sliding_window_pattern", given)
            return {layer for layer in layers if (layer + 1) % period == 0}
    raise _refused(
        config,
        window,
        "the file does not say which layers attend to a window only (layer_types is missing). Add "
        f"layer_types, or set {window} to null if every layer keeps all tokens. Or: "
        f"{_PER_GROUP[0].lower()}{_PER_GROUP[1:]}",
    )


def _by_kind(config: dict[str, object], kinds: object) -> dict[str, list[int]]:
    most = limits.PLANES_MAX
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= most:
        raise ConfigError(
            f"layer_types is {shown(kinds)}; a list of 1 to {most} kinds is needed, one a layer",
            fields={"layer_types": shown(kinds)},
        )
    found: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in _GROUPS:
            raise ConfigError(
                f"layer_types has {shown(kind)}; only {', '.join(_GROUPS)} are planned from a "
                "model's config. Describe layers with pages in a TOML file (layers = [ids]; "
                "--prefill FILE), recurrent state with pdxfer.layout in Python",
                fields={"layer_types": shown(kind)},
            )
        found.setdefault(_GROUPS[kind], []).append(layer)
    if config.get("num_hidden_layers") is not None:
        count = _number(config, "num_hidden_layers", most)
        if count != len(kinds):
            raise ConfigError(
                f"layer_types has {len(kinds)} kinds and num_hidden_layers is {count}; give one "
                "kind a layer",
                fields={"layer_types": str(len(kinds)), "num_hidden_layers": str(count)},
            )
    return found


def _refused(config: dict[str, object], key: str, why: str) -> ConfigError:
    text = shown(config[key])
    return ConfigError(f"{key} is {text}: {why}", fields={key: text})


def _number(config: dict[str, object], key: str, most: int = NUMBER_MAX) -> int:
    return number(key, config.get(key), most=most)

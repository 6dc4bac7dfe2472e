"""Keys of a description for `pdxfer plan`: which a layout takes, needs and does not know."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdxfer.cli.plan.values import shown
from pdxfer.errors import ConfigError
from pdxfer.layout import KVLayout
from pdxfer.layout.builders.catalog import Entry, catalog
from pdxfer.layout.builders.shapes import kv_shape

MLA_KEYS: Final = ("kv_lora_rank", "qk_rope_head_dim")
_INSTANCE_KEYS: Final = ("attention_tp", "pp_size", "cp_size", "relayout", "ignore_parts")
_HEAD_KEYS: Final = ("kv_heads", "total_kv_heads", "heads", "heads_total")
_BY_INSTANCE: Final = "the heads of a rank follow from attention_tp"
_BY_LATENT: Final = "latent rows are one head, the same on every rank"
_ALIASES: Final = {
    "tp": "attention_tp",
    "tp_size": "attention_tp",
    "tensor_parallel_size": "attention_tp",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "cp": "cp_size",
    "head_count": "kv_heads",
    "head_num": "kv_heads",
    "heads": "kv_heads",
    "num_heads": "kv_heads",
    "num_kv_heads": "total_kv_heads",
    "num_key_value_heads": "total_kv_heads",
    "head_size": "head_dim",
    "k_head_dim": "head_dim",
    "kv_head_dim": "head_dim",
    "layer_num": "layers",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "block_size": "page_size",
    "num_pages": "pages",
    "num_blocks": "pages",
    "torch_dtype": "dtype",
    "cache_dtype": "dtype",
    "kv_cache_dtype": "dtype",
}
"""Our names of keys, by what they are called elsewhere."""
_NEAR: Final = 0.87
"""Likeness of two names below which one is no misspelling of the other."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a description of one layout may have besides `layout`."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    """Keys that may be left out, those of the instance included."""

    @property
    def known(self) -> tuple[str, ...]:
        """Every key that the description may have."""
        return (*self.needed, *self.optional)


def layout_names() -> tuple[str, ...]:
    """The names that the key `layout` may have: every layout that holds pages of tokens."""
    return tuple(entry.name for entry in catalog().values() if entry.heads or entry.latent)


def latent_names() -> tuple[str, ...]:
    """The names of the layouts that latent attention may have."""
    return tuple(entry.name for entry in catalog().values() if entry.latent)


def is_latent(layout: str, shape: Mapping[str, object]) -> bool:
    """Whether a description with these keys is of latent attention."""
    return catalog()[layout].heads is None or any(key in shape for key in MLA_KEYS)


def builder_of(layout: str, *, latent: bool) -> Callable[..., KVLayout]:
    """The builder that makes a layout of this name.

    Raises:  ConfigError: latent attention has no such layout, or only latent attention has it.
    """
    entry = catalog()[layout]
    if latent and entry.latent is None:
        raise ConfigError(
            f"layout is {layout!r}, and {MLA_KEYS[0]} says latent attention, which has none such; "
            f"it has to be one of {', '.join(latent_names())}",
            fields={"layout": layout},
        )
    builder = entry.latent if latent else entry.heads
    if builder is None:
        raise ConfigError(f"layout is {layout!r}, which only latent attention has")
    return builder


def keys_of(layout: str, *, latent: bool) -> Keys:
    """The keys of a layout, read from the signature of its builder.

    Raises:  ConfigError: latent attention has no such layout.
    """
    takes = dict(inspect.signature(builder_of(layout, latent=latent)).parameters)
    if takes.pop("shape", None) is not None:
        takes = {**inspect.signature(kv_shape).parameters, **takes}
    implied = _implied(catalog()[layout], latent=latent)
    needed = [
        key
        for key, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and key not in implied
    ]
    optional = [key for key in takes if key not in needed and key not in implied]
    if not latent:
        # Heads of the model or of one rank: either will do.
        needed = ["total_kv_heads" if key in _HEAD_KEYS else key for key in needed]
        optional = [key for key in optional if key != "total_kv_heads"]
        optional.insert(0, _own_heads(layout))
    return Keys(tuple(needed), ("pages", *optional, *_INSTANCE_KEYS))


def _implied(entry: Entry, *, latent: bool) -> set[str]:
    """Arguments of the builder that no description gives, since they follow from the rest."""
    implied = {"pages", "head_first"}
    if entry.row is None:
        return implied
    implied.add("arrangement")
    if latent or not entry.row.grouped:
        implied.add("head_groups")
    if not entry.row.padded:
        implied.add("length_bytes")
    return implied


def check_keys(layout: str, shape: Mapping[str, object]) -> None:
    """Refuse unknown keys and missing ones, all of them at once.

    Raises:  ConfigError: naming them and the keys that the layout has.
    """
    latent = is_latent(layout, shape)
    keys = keys_of(layout, latent=latent)
    unknown = [key for key in shape if key not in keys.known]
    missing = [key for key in keys.needed if key not in shape]
    if not latent and any(key in shape for key in _HEAD_KEYS if key in keys.known):
        missing = [key for key in missing if key != "total_kv_heads"]
    if not unknown and not missing:
        return
    found = []
    if missing:
        found.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    found += [f"unknown key {shown(key)}{_hint(key, keys, latent=latent)}" for key in unknown]
    raise ConfigError(
        f"{'; '.join(found)}. Layout {layout!r} needs {_needed(layout, keys, latent=latent)}; "
        f"known are also {', '.join(keys.optional)}",
        fields={**dict.fromkeys(missing, "none"), **{shown(key): "unknown" for key in unknown}},
    )


def described() -> str:
    """The keys of every layout as text, for a person who writes a description."""
    alike: dict[tuple[bool, Keys], list[str]] = {}
    for latent, names in ((False, layout_names()), (True, latent_names())):
        for name in names:
            if latent or catalog()[name].heads:
                alike.setdefault((latent, keys_of(name, latent=latent)), []).append(name)
    lines = []
    for (latent, keys), of in alike.items():
        both = any(catalog()[name].heads for name in of)
        what = ", latent attention" if latent and both else ""
        own = [key for key in keys.optional if key not in _INSTANCE_KEYS]
        lines += [
            f"  {', '.join(of)}{what}",
            f"    needs {_needed(of[0], keys, latent=latent)}",
            f"    may have {', '.join(own)}",
        ]
    return "\n".join(lines)


def _own_heads(layout: str) -> str:
    return "heads" if layout == "k_only" else "kv_heads"


def _needed(layout: str, keys: Keys, *, latent: bool) -> str:
    text = ", ".join(keys.needed)
    if latent:
        return text
    return text.replace("total_kv_heads", f"total_kv_heads (or {_own_heads(layout)} of one rank)")


def _hint(key: str, keys: Keys, *, latent: bool) -> str:
    if key == "head_first":
        return f" ({_BY_INSTANCE})"
    if latent and _ALIASES.get(key, key) in _HEAD_KEYS:
        return f" ({_BY_LATENT})"
    near = [_ALIASES[key]] if key in _ALIASES else []
    near += difflib.get_close_matches(key, keys.known, n=1, cutoff=_NEAR)
    best = next((name for name in near if name in keys.known), None)
    return f" (did you mean {best!r}?)" if best else ""

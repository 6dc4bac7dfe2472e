"""Values of a description, one by one: which ones may be, and how one that may not is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.errors import ConfigError, repr_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NUMBER_MAX: Final = (1 << 31) - 1
"""The largest number that a key takes which no limit bounds: one of these beside ordinary numbers
comes to no byte count of over 63 bits."""
_LENGTH_MAX: Final = 1 << 48
_NUMBERS: Final = frozenset(
    {
        "attention_tp", "pp_size", "cp_size", "kv_heads", "heads", "total_kv_heads", "heads_total",
        "head_groups", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "page_size",
        "pages", "reserved_pages",
    }
)  # fmt: skip
_TEXTS: Final = frozenset(
    {"layout", "dtype", "group", "model", "order", "isa", "arrangement", "part", "relayout"}
)
_FLAGS: Final = frozenset({"interleaved"})
_SHOWN_CHARACTERS: Final = 80


def check_kinds(values: Mapping[str, object]) -> None:
    """Refuse a value of another type than its key takes; unknown keys are left alone.

    Raises:  ConfigError: naming the key, the value and what it takes.
    """
    for key, value in values.items():
        if key in _NUMBERS:
            number(key, value, least=int(key != "reserved_pages"))
        elif key == "length_bytes":
            number(key, value, most=_LENGTH_MAX)
        elif key in _TEXTS and not isinstance(value, str):
            raise _wrong(key, value, f'text is needed, as in {key} = "..."')
        elif key in _FLAGS and not isinstance(value, bool):
            raise _wrong(key, value, "true or false is needed")


def number(key: str, value: object, *, least: int = 1, most: int = NUMBER_MAX) -> int:
    """The value of a key that is a whole number of `least` to `most`.

    Raises:  ConfigError: another number, or none; the text names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(key, value, f"it must be {least} or more, and at most {most}")
    return value


def layer_list(key: str, value: object) -> list[int]:
    """The global layer ids that a count or a list of ids means.

    The number of them is checked before any is made.

    Raises:  ConfigError: neither a count nor a list, no layer, too many layers, an id that is no
             number or is there twice.
    """
    most = limits.PLANES_MAX
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return list(range(value))
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise _wrong(
            key, value, f"a count or a list of global ids is needed, of 1 to {most} layers"
        )
    ids = [number(f"{key}[{at}]", layer, least=0) for at, layer in enumerate(value)]
    if len(set(ids)) < len(ids):
        raise _wrong(key, value, "an id is there twice; each layer is named once")
    return ids


def part_names(key: str, value: object) -> tuple[str, ...]:
    """The names of parts that a key lists.

    Raises:  ConfigError: no list, or a list of anything else than names.
    """
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise _wrong(key, value, 'a list of parts is needed, as in ["k_scale", "v_scale"]')
    return tuple(value)


def choice(key: str, value: object, known: Iterable[str]) -> str:
    """The value of a key that is one of the known ones.

    Raises:  ConfigError: another value; the text lists those that are known.
    """
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        raise _wrong(key, value, f"it has to be one of {', '.join(names)}")
    return value


def shown(value: object) -> str:
    """Any value as text of at most a line, also a value whose `repr` fails."""
    text = repr_of(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _wrong(key: str, value: object, wanted: str) -> ConfigError:
    text = shown(value)
    return ConfigError(f"{key} is {text}; {wanted}", fields={key: text})

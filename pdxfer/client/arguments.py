"""Arguments of the clients, checked before anything is done with them."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from pdxfer import limits
from pdxfer.errors import ConfigError, repr_of
from pdxfer.layout import KVLayout, Rank
from pdxfer.memory import MemoryRange

if TYPE_CHECKING:
    from pdxfer.client.cache import Cache, EmbeddedAgent

RELAYOUT: Final = ("allow", "never")
_SECONDS_END: Final = 1e9
_ROOM_MAX: Final = (1 << 64) - 1
_COUNT_END: Final = 1 << 62
_SHOWN_CHARACTERS: Final = 80


def shown(value: object) -> str:
    """A value as a text shows it: short, on one line."""
    if isinstance(value, (str, bytes, bytearray)) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]!r}... ({type(value).__name__} of {len(value)})"
    text = " ".join(repr_of(value).split())
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({type(value).__name__})"
    return text


def socket_path_of(agent: str | os.PathLike[str] | EmbeddedAgent) -> str:
    """Where the agent listens.

    Raises: ConfigError unless it is a path or an embedded agent.
    """
    given: object = agent
    if isinstance(given, (str, os.PathLike)):
        path: object = os.fspath(given)
    else:
        path = getattr(given, "socket_path", None)
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"agent={shown(given)}: must be the socket path of a running pdxfer-prefill or "
            "pdxfer-decode, or an agent of pdxfer.embedded"
        )
    return path


def check_cache(cache: Cache) -> None:
    """Raises: ConfigError unless it has a layout and memory, in their types."""
    given: object = cache
    layout = getattr(given, "layout", None)
    if not isinstance(layout, KVLayout):
        raise ConfigError(
            f"cache={shown(given)}: must be a pool of pdxfer.pool, or anything whose .layout is a "
            "KVLayout of pdxfer.layout and whose .memory has one MemoryRange a region"
        )
    memory = getattr(given, "memory", None)
    if isinstance(memory, Sequence) and all(isinstance(part, MemoryRange) for part in memory):
        return
    raise ConfigError(
        f"cache.memory={shown(memory)}: must be a list of {len(layout.regions)} MemoryRange, one "
        "for each region of cache.layout: parts of pdxfer.memory.allocate(...), as its .range() "
        "gives them"
    )


def check_worker(
    rank: Rank, instance: str, relayout: str | None, ignore_parts: Sequence[str]
) -> None:
    """Raises: ConfigError naming what of a worker is wrong."""
    given: object = rank
    if not isinstance(given, Rank):
        raise ConfigError(f"rank={shown(given)}: must be a Rank, such as Rank(tp=3, tp_size=4)")
    given = instance
    if not _is_text(given):
        raise ConfigError(
            f"instance={shown(given)}: must be the name that all ranks of the model instance share"
        )
    given = relayout
    if given is not None and (not isinstance(given, str) or given not in RELAYOUT):
        raise ConfigError(f"relayout={shown(given)}: must be 'allow', 'never' or None")
    given = ignore_parts
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if not all(map(_is_text, names)):
        raise ConfigError(
            f"ignore_parts={shown(given)}: must be a list of names of parts, such as ['draft.k']"
        )


def check_room(room: int) -> int:
    """The room. Raises: ConfigError unless it is a positive 64-bit integer."""
    number = _integer(room)
    if number is None or not 1 <= number <= _ROOM_MAX:
        raise ConfigError(f"room={shown(room)}: a room is an integer from 1 to 2**64 - 1")
    return number


def check_count(name: str, value: int, least: int) -> int:
    """The value. Raises: ConfigError unless it is an integer of at least `least`."""
    number = _integer(value)
    if number is None or not least <= number < _COUNT_END:
        raise ConfigError(
            f"{name}={shown(value)}: must be an integer of at least {least}, below 2**62"
        )
    return number


def check_id(name: str, value: int) -> int:
    """The value. Raises: ConfigError unless it is an integer that a page id can be compared to."""
    number = _integer(value)
    if number is None or not -_COUNT_END < number < _COUNT_END:
        raise ConfigError(f"{name}={shown(value)}: must be an integer, or None")
    return number


def check_flag(name: str, value: bool) -> bool:
    """The value. Raises: ConfigError unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: must be True or False")
    return value


def check_seconds(name: str, value: float) -> float:
    """The value as a float. Raises: ConfigError unless it is a positive number of seconds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < _SECONDS_END
    ):
        raise ConfigError(f"{name}={shown(value)}: must be a positive number of seconds")
    return float(value)


def check_patience(timeout_s: float, name: str = "timeout_s") -> None:
    """Raises: ConfigError unless it is a number of seconds; 0 and less do not wait at all."""
    given: object = timeout_s
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or math.isnan(timeout_s) or timeout_s >= _SECONDS_END:
        raise ConfigError(
            f"{name}={shown(given)}: must be a number of seconds, less than {_SECONDS_END:g}"
        )


def check_aux(aux: bytes, *, last: bool) -> bytes:
    """The bytes. Raises: ConfigError unless they are bytes that can travel with this chunk."""
    given: object = aux
    if not isinstance(given, (bytes, bytearray, memoryview)):
        hint = ", such as aux=text.encode()" if isinstance(given, str) else ""
        raise ConfigError(f"aux={shown(given)}: must be bytes{hint}")
    data = bytes(given)
    if len(data) > limits.AUX_BYTES_MAX:
        raise ConfigError(f"aux has {len(data)} bytes, at most {limits.AUX_BYTES_MAX} can travel")
    if data and not last:
        raise ConfigError("aux travels with the last chunk: give it there (last=True)")
    return data


def check_addresses(prefill: str | Sequence[str]) -> list[str]:
    """The addresses as a list. Raises: ConfigError unless it is an address or a list of them."""
    given: object = prefill
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    addresses = [str(item) for item in items if item and _is_text(item)]
    if not addresses or len(addresses) != len(items):
        raise ConfigError(
            f"prefill={shown(given)}: must be an address of a prefill agent, or a list of them: "
            "the `addresses` of the PrefillClient there"
        )
    return addresses


def check_reason(reason: str) -> None:
    """Raises: ConfigError unless the reason of an abort is a text."""
    given: object = reason
    if not _is_text(given):
        raise ConfigError(f"reason={shown(given)}: must be a text")


def check_event(after: object, method: str) -> None:
    """Raises: ConfigError unless what a chunk waits for has the method that is called."""
    if after is not None and not callable(getattr(after, method, None)):
        raise ConfigError(
            f"after={shown(after)}: must have a method {method}(), as torch.cuda.Event has"
        )


def _integer(value: object) -> int | None:
    """The value as a plain int, one of numpy too; None when it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_text(value: object) -> bool:
    """Whether it is a string that can travel; half of a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)

"""Layers of a pool by their global ids, as callers name them, and who waits for their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdxfer.pool.refusals import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layer(Protocol):
    """An attention layer, as engines hand it to their pool."""

    @property
    def layer_id(self) -> int:
        """Global."""
        ...


class LayerCounter(Protocol):
    """Counts the layers whose bytes have come in; SGLang's `LayerDoneCounter` is one."""

    def wait_until(self, threshold: int) -> object:
        """Return when the bytes of layer number `threshold` of the pool, from 0 on, are there."""
        ...


def layer_id_of(layer: int | Layer | None, override: int | None) -> int:
    """The global layer id that a caller means.

    Raises:  ShapeError: neither says which.
    """
    if override is not None:
        return override
    if isinstance(layer, int):
        return layer
    found = getattr(layer, "layer_id", None)
    if not isinstance(found, int):
        raise ShapeError(
            f"layer is {layer!r}; a global layer id, or what has a layer_id, is needed"
        )
    return found


def shown_layers(layers: Sequence[int]) -> str:
    """Global layer ids, for a text."""
    if list(layers) == list(range(layers[0], layers[0] + len(layers))):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def end_layer_of(given: int | None, ids: Sequence[int]) -> int:
    """The `end_layer` of a pool: the given one, else the last of its layers.

    Engines mean by it the last layer or the one behind it; both are taken.

    Raises:  ShapeError: it is neither.
    """
    last = max(ids)
    if given is None:
        return last
    if isinstance(given, bool) or given not in (last, last + 1):
        raise ShapeError(
            f"end_layer={given!r}, but the layers of the pool are {shown_layers(sorted(ids))}: "
            f"give {last}, or {last + 1} where the end is exclusive, or leave it out"
        )
    return given


def check_memory_saver(enable_memory_saver: bool) -> None:
    """Refuses a pool whose memory is to be taken away and given back behind its tensors.

    Raises:  ShapeError.
    """
    if enable_memory_saver:
        raise ShapeError(
            "enable_memory_saver=True: a pool that an agent reads and writes has to keep its "
            "memory; pass False, and close the pool to give its memory back"
        )

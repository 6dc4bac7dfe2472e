"""Where a step of an engine writes its tokens: a tensor of slots, or what bundles several.

SGLang's `KVWriteLoc` is such an object: `loc`, and where the engine has translated it already
`swa_loc` and `full_loc`, the same tokens in the window pool and in the full-attention pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pdxfer.pool.refusals import ShapeError

if TYPE_CHECKING:
    from typing import TypeAlias


class WriteLoc(Protocol):
    """What bundles the slots of one write; `swa_loc`, `full_loc` and `physical` may be absent."""

    @property
    def loc(self) -> torch.Tensor:
        """Slots `[n]` of the pool that is written to."""
        ...


WriteSlots: TypeAlias = torch.Tensor | WriteLoc


def is_write_loc(given: object) -> bool:
    """Whether this bundles slots, and is not the slots themselves."""
    return not isinstance(given, torch.Tensor) and hasattr(given, "loc")


def slots_to_write(given: object, *preferred: str) -> object:
    """The slots that are meant, not looked at.

    Args:    preferred: the attributes of a bundle that are asked before `loc`; one that is absent
             or None is passed over.
    Raises:  ShapeError: a bundle without slots.
    """
    if not is_write_loc(given):
        return given
    found = (getattr(given, name, None) for name in (*preferred, "loc"))
    slots = next((slots for slots in found if slots is not None), None)
    if slots is None:
        raise ShapeError("loc of the write loc is None; a tensor of slots is needed")
    return slots


def check_physical(given: object, where: str) -> None:
    """Refuses a bundle that says of itself that its ids are virtual.

    A pool in unified memory is addressed by physical slots alone; a bare tensor has to hold them.

    Raises:  ShapeError.
    """
    if is_write_loc(given) and not getattr(given, "physical", True):
        raise ShapeError(
            f"{where}: write loc is not marked physical. A pool in unified memory takes physical "
            "slots; translate the ids, and give them with physical=True or as a bare tensor."
        )

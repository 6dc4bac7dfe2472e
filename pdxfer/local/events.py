"""GPU events on their way from a worker to the agent in its own process: nothing else can see them.

An event is put down under a number, which a message carries, and is taken once.
"""

from __future__ import annotations

import itertools
from typing import Protocol

from pdxfer.errors import ConfigError


class Queried(Protocol):
    """A GPU event, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work recorded before it is done; does not block."""
        ...


_numbers = itertools.count(1)
_waiting: dict[int, Queried] = {}


def put(event: Queried) -> int:
    """The number under which the agent takes the event. Any thread may call it."""
    number = next(_numbers)
    _waiting[number] = event
    return number


def drop(number: int) -> None:
    """Forget an event that no agent will take; nothing happens where there is none."""
    _waiting.pop(number, None)


def take(number: int) -> Queried:
    """The event of a number, once.

    Raises:
        ConfigError: this process has put none down under it.
    """
    event = _waiting.pop(number, None)
    if event is None:
        raise ConfigError(
            f"event={number}: no GPU event of this process; only an agent in the worker's own "
            "process (pdxfer.embedded) can wait for one"
        )
    return event

"""What sync and async clients wait with: each operation is one coroutine, and has two faces.

A coroutine of this package waits only in its channel. That of a sync client blocks there, so its
coroutines never suspend, and `blocking` makes plain methods of them; that of an async client awaits
its event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Bell:
    """Where coroutines wait for something to become true; whoever may have made it true rings."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        """What each waits for, and what wakes it."""

    def ring(self, *, everybody: bool = False) -> None:
        """Wake those who have what they wait for."""
        for done, wake in self.waiting:
            if everybody or done():
                wake()


def run(work: Coroutine[object, None, R]) -> R:
    """The result of a coroutine of a sync client, which blocks instead of suspending."""
    try:
        work.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    work.close()
    raise AssertionError("a coroutine of a sync client has suspended")


def blocking(work: Callable[P, Coroutine[object, None, R]]) -> Callable[P, R]:
    """A coroutine method as a method of a sync client, which blocks."""

    @functools.wraps(work)
    def method(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(work(*args, **kwargs))

    method.__name__ = work.__name__.lstrip("_")
    return method


def awaited(
    work: Callable[P, Coroutine[object, None, R]],
) -> Callable[P, Coroutine[object, None, R]]:
    """A coroutine method as a method of an async client, under its public name."""

    @functools.wraps(work)
    async def method(*args: P.args, **kwargs: P.kwargs) -> R:
        return await work(*args, **kwargs)

    method.__name__ = work.__name__.lstrip("_")
    return method

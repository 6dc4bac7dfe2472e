"""The async face of what both clients do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from pdxfer import limits
from pdxfer.client.async_channel import AsyncChannel
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.book import Book
from pdxfer.client.waiting import awaited
from pdxfer.errors import LocalProtocolError
from pdxfer.layout import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.client.cache import Cache, EmbeddedAgent

T = TypeVar("T", bound=AsyncTransfer)


class AsyncClient(Book[T], Generic[T]):
    """A worker's connection to its agent, for tasks of one event loop (asyncio or uvloop).

    It has the names, arguments, states and errors of `Client`; what waits there is a coroutine
    here.
    `await create(...)` attaches, and so does `async with` with a client just made.

    Threads: the loop's only; it starts none. No call blocks the loop. Use on another loop raises
        `LocalProtocolError`.
    Ownership: as `Client`. Close it: the loop keeps it alive until then.
    """

    _entered = _attached = False

    def _make_channel(self, socket_path: str) -> AsyncChannel:
        return AsyncChannel(socket_path)

    @classmethod
    async def create(
        cls,
        agent: str | os.PathLike[str] | EmbeddedAgent,
        cache: Cache,
        *,
        rank: Rank = Rank(),  # noqa: B008 frozen
        instance: str = "",
        relayout: str | None = None,
        ignore_parts: Sequence[str] = (),
        timeout_s: float = limits.LOCAL_REQUEST_TIMEOUT_S,
    ) -> Self:
        """Connect to the agent and attach the cache, on the running loop.

        Args and Raises: those of `Client`. Nothing stays attached after a raise or a cancellation.
        """
        client = cls(
            agent,
            cache,
            rank=rank,
            instance=instance,
            relayout=relayout,
            ignore_parts=ignore_parts,
            timeout_s=timeout_s,
        )
        return await client.__aenter__()

    async def __aenter__(self) -> Self:
        """Attach, unless `create` has done so; raises what that raises."""
        if self._attached:
            self.channel.check()
            return self
        if self._entered or self._closed:
            raise LocalProtocolError("this client has been entered before: make a new one")
        self._entered = True
        await self._attach_to_agent()
        self._attached = True
        return self

    drain = awaited(Book._drain)
    resume = awaited(Book._resume)

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

"""What both async clients do: attach a cache without blocking the loop, follow transfers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from pdxfer import limits
from pdxfer.client.async_channel import AsyncChannel
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.book import Book, unexpected
from pdxfer.client.requests import hello_message
from pdxfer.errors import LocalProtocolError
from pdxfer.layout import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.client.cache import Cache, EmbeddedAgent
    from pdxfer.client.record import TransferRecord
    from pdxfer.local.messages import FromAgent, LocalMessage, OpenReceive, OpenSend

T = TypeVar("T", bound=AsyncTransfer)


class AsyncClient(Book[AsyncTransfer, AsyncChannel]):
    """A worker's connection to its agent, for tasks of one event loop (asyncio or uvloop).

    Same names, arguments, states and errors as `Client`; what waits there is a coroutine here.
    `await create(...)` attaches, and so does `async with` with a client just made.

    Threads: the loop's only; it starts none. No call blocks the loop.
    Ownership: as `Client`. Close it: the loop keeps it alive until then.
    """

    _kind = AsyncTransfer

    def __init__(
        self,
        agent: str | os.PathLike[str] | EmbeddedAgent,
        cache: Cache,
        *,
        rank: Rank = Rank(),  # noqa: B008 frozen
        instance: str = "",
        relayout: str | None = None,
        ignore_parts: Sequence[str] = (),
        timeout_s: float = limits.LOCAL_REQUEST_TIMEOUT_S,
    ) -> None:
        """Check the arguments, those of `Client`; nothing is attached yet.

        Raises: ConfigError: a wrong argument, or memory that this agent cannot map.
        """
        super().__init__(
            agent,
            cache,
            rank=rank,
            instance=instance,
            relayout=relayout,
            ignore_parts=ignore_parts,
            timeout_s=timeout_s,
        )
        self.channel = AsyncChannel(self._socket_path)
        self.channel.on_message = self._on_message
        self.channel.on_board = self._settle_changed
        self.channel.on_failure = self._wake_all
        self._attaching = self._attached = False

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
        if self._attaching or self._closed:
            raise LocalProtocolError("this client has been entered before: make a new one")
        self._attaching = True
        try:
            await self._attach_to_agent()
        except BaseException:
            self.close()
            raise
        self._attached = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    # -- what transfers call -------------------------------------------------------------------
    def settle(self, transfer: TransferRecord) -> None:
        """Note what has become of the transfer, and wake the tasks that wait for that."""
        super().settle(transfer)
        if isinstance(transfer, AsyncTransfer):
            transfer.ring()

    # -- for the two roles ---------------------------------------------------------------------
    async def _request(
        self, message: LocalMessage, fds: Sequence[int] = (), extra_s: float = 0.0
    ) -> tuple[FromAgent, list[int]]:
        return await self.channel.request(message, fds, timeout_s=self.timeout_s + extra_s)

    async def _open_transfer(self, message: OpenSend | OpenReceive, kind: type[T]) -> T:
        """Ask for a transfer, and wait for its slot.

        When cancelled, or too late, the transfer is aborted as soon as the agent answers, and its
        slot given back when it has ended.
        """
        with self._opens(message, kind) as opening:
            answer, _ = await self._request(message)
        if not isinstance(opening.transfer, kind):
            raise unexpected(message, answer)
        return opening.transfer

    # -- inside --------------------------------------------------------------------------------
    async def _attach_to_agent(self) -> None:
        channel = self.channel
        await channel.connect(self.timeout_s)
        self._greeted(*await self._request(hello_message(channel.new_request(), self.role)))
        self._hold_cache()
        attach = msgspec.structs.replace(self._attach, request=channel.new_request())
        await self._request(attach, self._fds)

    def _watch_board(self, eventfd: int) -> None:
        self.channel.watch(eventfd)

    def _wake_all(self) -> None:
        """The connection is unusable: nothing more will come for anybody."""
        for transfer in list(self._live.values()):
            transfer.ring(everybody=True)

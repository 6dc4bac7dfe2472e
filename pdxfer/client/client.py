"""What both clients do: attach a cache to the agent beside this worker, follow transfers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from pdxfer import limits
from pdxfer.client.book import Book, unexpected
from pdxfer.client.channel import Channel
from pdxfer.client.requests import hello_message
from pdxfer.client.transfer import Transfer
from pdxfer.layout import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.client.cache import Cache, EmbeddedAgent
    from pdxfer.local.messages import OpenReceive, OpenSend

T = TypeVar("T", bound=Transfer)


class Client(Book[Transfer, Channel]):
    """A worker's connection to its agent. Any thread may use it; it starts none.

    Ownership: the agent writes the cache's memory only inside transfers. Keep the cache until the
    client is closed and every transfer has given its pages back.
    """

    _kind = Transfer

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
        """Connect to the agent and attach the cache.

        Args:
            agent: path of the daemon's socket, or an agent of `pdxfer.embedded`.
            cache: anything with `layout` and `memory`, a pool for example.
            rank: which rank of its instance this worker is.
            instance: name of the model instance its ranks share.
            relayout: `allow` or `never`; None: the layout's own default.
            ignore_parts: parts that may be missing on the other side.
            timeout_s: how long the agent may take to answer.

        Raises:
            ConfigError: a wrong argument, or memory that this agent cannot map.
            DaemonUnavailableError: no agent there, or it does not answer.
            ResourceError: the agent has too many workers.
            Nothing stays attached after a raise.
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
        self.channel = channel = Channel(self._socket_path, self.timeout_s)
        try:
            self._greeted(*channel.request(hello_message(channel.new_request(), self.role)))
            channel.on_message = self._on_message
            self._hold_cache()
            attach = msgspec.structs.replace(self._attach, request=channel.new_request())
            channel.request(attach, self._fds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- for the two roles ---------------------------------------------------------------------
    def _open_transfer(self, message: OpenSend | OpenReceive, kind: type[T]) -> T:
        """Ask for a transfer, and wait for its slot."""
        with self._opens(message, kind) as opening:
            answer, _ = self.channel.request(message)
        if not isinstance(opening.transfer, kind):
            raise unexpected(message, answer)
        return opening.transfer

    def _watch_board(self, eventfd: int) -> None:
        self.channel.watch(eventfd)

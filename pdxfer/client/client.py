"""The sync face of what both clients do: attach a cache to an agent, follow transfers."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from pdxfer.client.book import Book
from pdxfer.client.channel import Channel
from pdxfer.client.transfer import Transfer
from pdxfer.client.waiting import blocking, run

T = TypeVar("T", bound=Transfer)


class Client(Book[T], Generic[T]):
    """A worker's connection to its agent. Any thread may use it; it starts none.

    Ownership: the agent writes the cache's memory only inside transfers. Keep the cache until the
    client is closed and every transfer has given its pages back.
    """

    def _make_channel(self, socket_path: str) -> Channel:
        return Channel(socket_path)

    def _begin(self) -> None:
        run(self._attach_to_agent())

    def close(self, drain_s: float | None = None) -> None:
        """Detach. Live transfers are aborted by the agent; their last states stay readable.

        Args:
            drain_s: how long to wait first until every transfer is final; None: not at all, this
                never blocks then.

        Idempotent. Whoever waits gets a `DaemonUnavailableError`. In a fork of the process that
        made the client, nothing of the parent's is touched.

        An embedded agent keeps the memory of a cache, whose client was closed while a transfer had
        pages of it, until the agent closes: give `drain_s`, or wait for every transfer first.

        Raises: ConfigError: a `drain_s` that is no number of seconds; the client is still open.
        """
        if drain_s is not None and self.channel.failure is None:
            run(self._drain(drain_s))
        super().close()

    resume = blocking(Book._resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

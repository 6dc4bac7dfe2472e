"""The prefill worker's client on an event loop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Protocol

from pdxfer import limits
from pdxfer.client.arguments import check_event
from pdxfer.client.async_client import AsyncClient
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.record import SendingRecord
from pdxfer.client.requests import chunk_message, open_message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.local.messages import SendChunk

_EVENT_POLL_S: Final = 0.0005
"""A GPU event has nothing that a loop could wait for, so it is asked; a kernel takes about this."""


class AsyncEvent(Protocol):
    """A GPU event: `torch.cuda.Event` for example."""

    def query(self) -> bool:
        """Whether the work recorded before it is done; does not block."""
        ...


class AsyncSending(SendingRecord, AsyncTransfer):
    """A room's cache on its way out of this worker; its source pages are the worker's from SENT on.

    One task at a time may call `send`.
    """

    async def send(
        self,
        pages: object,
        *,
        tokens: int | None = None,
        layers: Iterable[int] | None = None,
        last: bool = True,
        aux: bytes = b"",
        after: AsyncEvent | None = None,
    ) -> None:
        """Send a chunk; as `Sending.send`, with the same arguments and errors.

        Two differences: `after` is asked by `query()`, at most for the client's `timeout_s`. And
        cancelling: while `after` is waited for, nothing has been sent and the transfer goes on;
        from then on, while the socket takes the chunk, the transfer is aborted.

        Raises:
            TimeoutError: `after` is not done; nothing was sent, the transfer goes on.
            And what `Sending.send` raises.
        """
        check_event(after, "query")
        await self._check_open()
        chunk = chunk_message(
            self._client.layout,
            pages,
            tokens=tokens,
            layers=layers,
            last=last,
            aux=aux,
            transfer=self.slot,
            request=self.request,
        )
        if after is not None:
            await self._wait_for(after)
            await self._check_open()
        self._channel.post(chunk)
        self.note_chunk(chunk)
        await self._taken(chunk)

    # -- inside --------------------------------------------------------------------------------
    async def _check_open(self) -> None:
        self._check_last_not_sent()
        await self._raise_failure()
        self._check_goes_on()

    async def _wait_for(self, after: AsyncEvent) -> None:
        timeout_s = self._client.timeout_s
        deadline = time.monotonic() + timeout_s
        while not after.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"room {self.room}: the work of `after` is not done after "
                    f"timeout_s={timeout_s:g}; nothing was sent"
                )
            await asyncio.sleep(_EVENT_POLL_S)


class AsyncPrefillClient(AsyncClient):
    """A prefill worker's connection to its agent, on an event loop."""

    role = "prefill"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where decode agents reach this worker's instance: what decode passes as `prefill=`."""
        return self._instance_addresses()

    async def open(
        self, room: int, *, deadline_s: float | None = None, lease_s: float = limits.LEASE_S
    ) -> AsyncSending:
        """Hold a room; as `PrefillClient.open`.

        Cancelling while the agent's answer is awaited gives the room up: it is aborted once the
        answer comes, and `finished` does not list it.
        """
        return await self._open(room, deadline_s, lease_s, None)

    async def send(  # noqa: PLR0913 the surface of DESIGN 9
        self,
        room: int,
        pages: object,
        *,
        tokens: int | None = None,
        layers: Iterable[int] | None = None,
        last: bool = True,
        aux: bytes = b"",
        deadline_s: float | None = None,
        lease_s: float = limits.LEASE_S,
    ) -> AsyncSending:
        """`open` and the first `AsyncSending.send` in one message; as `PrefillClient.send`.

        Cancelling gives the room up, as in `open`. Its pages are the agent's for as long as
        `given_up` names the room.
        """
        chunk = chunk_message(self.layout, pages, tokens=tokens, layers=layers, last=last, aux=aux)
        return await self._open(room, deadline_s, lease_s, chunk)

    async def _open(
        self, room: int, deadline_s: float | None, lease_s: float, chunk: SendChunk | None
    ) -> AsyncSending:
        message = open_message(self.channel.new_request(), room, deadline_s, lease_s, chunk)
        sending = await self._open_transfer(message, AsyncSending)
        sending.note_chunk(chunk)
        return sending

"""The decode worker's client on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client.async_client import AsyncClient
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.record import ReceivingRecord
from pdxfer.client.requests import (
    connect_message,
    connected_summary,
    place_message,
    receive_message,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import PlanSummary


class AsyncReceiving(ReceivingRecord, AsyncTransfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One task at a time may call `place`.
    """

    async def place(
        self, pages: object, *, tokens: int | None = None, prefix_tokens: int = 0
    ) -> None:
        """Say where the cache goes; as `Receiving.place`, with the same arguments and errors.

        Cancelling while the socket takes the pages aborts the transfer; they are the agent's until
        `pages_returned`.
        """
        self._check_not_placed()
        message = place_message(
            self._client.layout,
            pages,
            tokens,
            prefix_tokens,
            transfer=self.slot,
            request=self.request,
        )
        await self._raise_failure()
        self._check_not_placed()
        self._channel.post(message)
        self.placed = True
        await self._taken(message)


class AsyncDecodeClient(AsyncClient):
    """A decode worker's connection to its agent, on an event loop."""

    role = "decode"

    async def connect(
        self, prefill: str | Sequence[str], timeout_s: float = limits.CONNECT_TIMEOUT_S
    ) -> PlanSummary:
        """Join the agents and compare layouts before any request; as `DecodeClient.connect`.

        Cancelling changes nothing: the agent goes on joining, and a later call finds it done.
        """
        message = connect_message(self.channel.new_request(), prefill, timeout_s)
        # The agent keeps timeout_s itself, and says at its end what is missing.
        answer, _ = await self._request(message, extra_s=message.timeout_s)
        return connected_summary(answer)

    async def receive(
        self,
        room: int,
        prefill: str | Sequence[str],
        pages: object = None,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncReceiving:
        """Bind a room to this worker; as `DecodeClient.receive`, same arguments and errors.

        Cancelling while the agent's answer is awaited gives the room up: it is aborted once the
        answer comes, and `finished` does not list it. Pages given here are the agent's for as long
        as `given_up` names the room.
        """
        message = receive_message(
            self.channel.new_request(),
            self.layout,
            room,
            prefill,
            pages,
            tokens=tokens,
            prefix_tokens=prefix_tokens,
            deadline_s=deadline_s,
        )
        receiving = await self._open_transfer(message, AsyncReceiving)
        receiving.placed = message.place is not None
        return receiving

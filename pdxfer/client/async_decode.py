"""The decode worker's client on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from pdxfer import limits
from pdxfer.client.async_client import AsyncClient
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.connecting import ConnectingRecord
from pdxfer.client.receiving import DecodeBook, ReceivingRecord
from pdxfer.client.waiting import awaited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import PlanSummary


class AsyncReceiving(ReceivingRecord, AsyncTransfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One task at a time may call `place`.
    """

    place = awaited(ReceivingRecord._place)


class AsyncConnecting(ConnectingRecord):
    """A comparison of layouts under way, from `connect(wait=False)`; its `timeout_s` ends it."""

    wait = awaited(ConnectingRecord._wait)


class AsyncDecodeClient(DecodeBook[AsyncReceiving], AsyncClient[AsyncReceiving]):
    """A decode worker's connection to its agent, on an event loop."""

    _kind = AsyncReceiving

    @overload
    async def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        wait: Literal[True] = True,
    ) -> PlanSummary: ...

    @overload
    async def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        *,
        wait: Literal[False],
    ) -> AsyncConnecting: ...

    async def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        wait: bool = True,
    ) -> PlanSummary | AsyncConnecting:
        """Join the agents and compare layouts before any request; optional.

        Args:
            prefill: address of the prefill agent, or of each one that has ranks of the instance.
            timeout_s: how long it may take until all ranks of the prefill instance are there.
            wait: False: return at once. The verdict is asked of what is returned.

        Returns: how requests will move; with `wait=False` the `AsyncConnecting` that will tell it.

        Raises:
            LayoutMismatchError: the caches cannot be joined; names each field and both values.
            PeerError: no such agent, or not all its ranks, within `timeout_s`.
            DaemonUnavailableError: the own agent is gone or does not answer.
        Cancelling changes nothing: the agents go on joining.
        """
        connecting = self._connecting(prefill, timeout_s, AsyncConnecting, wait=wait)
        return await self._joined(connecting) if wait else connecting

    receive = awaited(DecodeBook[AsyncReceiving]._receive)

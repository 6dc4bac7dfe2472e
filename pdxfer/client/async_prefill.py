"""The prefill worker's client on an event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from pdxfer.client.async_client import AsyncClient
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.sending import PrefillBook, SendingRecord
from pdxfer.client.waiting import awaited

_EVENT_POLL_S: Final = 0.0005
"""How often an async client asks a GPU event whether it is done, since an event loop cannot wait
for one. A kernel takes about this long."""


class AsyncEvent(Protocol):
    """A GPU event: `torch.cuda.Event` for example."""

    def query(self) -> bool:
        """Whether the work recorded before it is done; does not block."""
        ...


class AsyncSending(SendingRecord, AsyncTransfer):
    """A room's cache on its way out of this worker; its source pages are the worker's from SENT on.

    One task at a time may call `send`.
    """

    _event_method = "query"

    send = awaited(SendingRecord._send)
    begin = awaited(SendingRecord._begin)
    wait_returned = awaited(SendingRecord._wait_returned)

    async def _wait_for(self, after: AsyncEvent) -> None:  # type: ignore[override]
        timeout_s = self._client.timeout_s
        deadline = time.monotonic() + timeout_s
        while not after.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"room {self.room}: the work of `after` is not done after "
                    f"timeout_s={timeout_s:g}; nothing was sent"
                )
            await asyncio.sleep(_EVENT_POLL_S)


class AsyncPrefillClient(PrefillBook[AsyncSending], AsyncClient[AsyncSending]):
    """A prefill worker's connection to its agent, on an event loop."""

    _kind = AsyncSending

    open = awaited(PrefillBook[AsyncSending]._open)
    send = awaited(PrefillBook[AsyncSending]._send)

"""The prefill worker's client: it opens rooms and sends the pages it has filled."""

from __future__ import annotations

from typing import Protocol

from pdxfer.client.client import Client
from pdxfer.client.sending import PrefillBook, SendingRecord
from pdxfer.client.transfer import Transfer
from pdxfer.client.waiting import blocking


class Event(Protocol):
    """A GPU event: `torch.cuda.Event` for example."""

    def synchronize(self) -> object:
        """Block until the work recorded before it is done."""
        ...


class Sending(SendingRecord, Transfer):
    """A room's cache on its way out of this worker; its source pages are the worker's from SENT on.

    One thread at a time may call `send`.
    """

    _event_method = "synchronize"

    send = blocking(SendingRecord._send)
    begin = blocking(SendingRecord._begin)
    wait_returned = blocking(SendingRecord._wait_returned)

    async def _wait_for(self, after: Event) -> None:  # type: ignore[override]
        after.synchronize()


class PrefillClient(PrefillBook[Sending], Client[Sending]):
    """A prefill worker's connection to its agent."""

    _kind = Sending

    open = blocking(PrefillBook[Sending]._open)
    send = blocking(PrefillBook[Sending]._send)

"""The decode worker's client on an event loop."""

from __future__ import annotations

from pdxfer.client.async_client import AsyncClient
from pdxfer.client.async_transfer import AsyncTransfer
from pdxfer.client.receiving import DecodeBook, ReceivingRecord
from pdxfer.client.waiting import awaited


class AsyncReceiving(ReceivingRecord, AsyncTransfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One task at a time may call `place`.
    """

    place = awaited(ReceivingRecord._place)


class AsyncDecodeClient(DecodeBook[AsyncReceiving], AsyncClient[AsyncReceiving]):
    """A decode worker's connection to its agent, on an event loop."""

    _kind = AsyncReceiving

    connect = awaited(DecodeBook[AsyncReceiving]._connect)
    receive = awaited(DecodeBook[AsyncReceiving]._receive)

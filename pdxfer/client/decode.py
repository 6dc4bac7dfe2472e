"""The decode worker's client: it receives rooms into its own pages."""

from __future__ import annotations

from pdxfer.client.client import Client
from pdxfer.client.receiving import DecodeBook, ReceivingRecord
from pdxfer.client.transfer import Transfer
from pdxfer.client.waiting import blocking


class Receiving(ReceivingRecord, Transfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One thread at a time may call `place`.
    """

    place = blocking(ReceivingRecord._place)


class DecodeClient(DecodeBook[Receiving], Client[Receiving]):
    """A decode worker's connection to its agent."""

    _kind = Receiving

    connect = blocking(DecodeBook[Receiving]._connect)
    receive = blocking(DecodeBook[Receiving]._receive)

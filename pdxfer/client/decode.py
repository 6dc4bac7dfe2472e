"""The decode worker's client: it receives rooms into its own pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from pdxfer import limits
from pdxfer.client.client import Client
from pdxfer.client.connecting import ConnectingRecord
from pdxfer.client.receiving import DecodeBook, ReceivingRecord
from pdxfer.client.transfer import Transfer
from pdxfer.client.waiting import blocking, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import PlanSummary


class Receiving(ReceivingRecord, Transfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One thread at a time may call `place`.
    """

    place = blocking(ReceivingRecord._place)


class Connecting(ConnectingRecord):
    """A comparison of layouts under way, from `connect(wait=False)`; its `timeout_s` ends it."""

    wait = blocking(ConnectingRecord._wait)


class DecodeClient(DecodeBook[Receiving], Client[Receiving]):
    """A decode worker's connection to its agent."""

    _kind = Receiving

    @overload
    def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        wait: Literal[True] = True,
    ) -> PlanSummary: ...

    @overload
    def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        *,
        wait: Literal[False],
    ) -> Connecting: ...

    def connect(
        self,
        prefill: str | Sequence[str],
        timeout_s: float = limits.CONNECT_TIMEOUT_S,
        wait: bool = True,
    ) -> PlanSummary | Connecting:
        """Join the agents and compare layouts before any request; optional.

        Args:
            prefill: address of the prefill agent, or of each one that has ranks of the instance.
            timeout_s: how long it may take until all ranks of the prefill instance are there.
            wait: False: return at once. The verdict is asked of what is returned.

        Returns: how requests will move; with `wait=False` the `Connecting` that will tell it.

        Raises:
            LayoutMismatchError: the caches cannot be joined; names each field and both values.
            PeerError: no such agent, or not all its ranks, within `timeout_s`.
            DaemonUnavailableError: the own agent is gone or does not answer.
        """
        connecting = self._connecting(prefill, timeout_s, Connecting, wait=wait)
        return run(self._joined(connecting)) if wait else connecting

    receive = blocking(DecodeBook[Receiving]._receive)

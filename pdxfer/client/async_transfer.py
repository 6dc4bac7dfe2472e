"""A transfer as the tasks of an event loop see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.client.record import TransferRecord
from pdxfer.client.waiting import awaited

if TYPE_CHECKING:
    from pdxfer.errors import PdxferError


class AsyncTransfer(TransferRecord):
    """One request's cache on its way. Made by a client; for tasks of the client's event loop."""

    wait = awaited(TransferRecord._wait)

    @property
    def error(self) -> PdxferError | None:
        """Why it failed or is about to; None while nothing is wrong.

        Looks for the agent's words about a state it has just written, without waiting: should they
        still be on their way, the error says only which state it is.
        """
        return self._error_now()

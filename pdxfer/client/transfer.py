"""A transfer as a worker's threads see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.client.record import TransferRecord
from pdxfer.client.waiting import blocking, run

if TYPE_CHECKING:
    from pdxfer.errors import PdxferError


class Transfer(TransferRecord):
    """One request's cache on its way. Made by a client; any thread may use it."""

    wait = blocking(TransferRecord._wait)

    @property
    def error(self) -> PdxferError | None:
        """Why it failed or is about to; None while nothing is wrong.

        Waits for the agent's words about a state it has just written, at most the client's
        `timeout_s`; they are on their way already.
        """
        return run(self._error_told())

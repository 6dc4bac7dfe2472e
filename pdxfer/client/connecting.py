"""A comparison of layouts that an agent was asked for; written once, for sync and async clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.client.arguments import check_patience
from pdxfer.client.line import from_wire_refused
from pdxfer.errors import PdxferError, RemoteProtocolError
from pdxfer.layout import PlanSummary, Rank
from pdxfer.local.messages import Connected, Refused
from pdxfer.protocol.workers import rank_of

if TYPE_CHECKING:
    from pdxfer.client.line import Line
    from pdxfer.local.messages import ConnectPeer, Verdict


class ConnectingRecord:
    """A comparison of layouts under way, from `connect(wait=False)`; its `timeout_s` ends it."""

    def __init__(self, channel: Line, message: ConnectPeer, rank: Rank) -> None:
        self._channel = channel
        self._message = message
        self._rank = rank
        self._answer = channel.ask(message)
        self._verdicts: dict[tuple[Rank, Rank], PlanSummary | PdxferError] = {}

    def poll(self) -> bool:
        """Whether the verdict is known. Reads what has come, without waiting; never raises."""
        if self._answer.message is None and self._channel.failure is None:
            self._channel.collect()
        return self._answer.message is not None or self._channel.failure is not None

    @property
    def summary(self) -> PlanSummary | None:
        """How requests will be moved; None while that is not known, and where it was refused."""
        answer = self._answer.message if self.poll() else None
        if isinstance(answer, Connected) and answer.summary is not None:
            return PlanSummary.from_wire(answer.summary)
        return None

    @property
    def error(self) -> PdxferError | None:
        """Why the two sides cannot be joined; None while that is not known, and where they can.

        A `LayoutMismatchError` names each field and both values; a `PeerError` says who did not
        come in time; a `DaemonUnavailableError`, that the own agent is gone.
        """
        if not self.poll():
            return None
        answer = self._answer.message
        if answer is None:
            return self._channel.failure
        if isinstance(answer, Refused):
            return from_wire_refused(answer)
        if not isinstance(answer, Connected):
            return RemoteProtocolError(
                f"the agent answered ConnectPeer with {type(answer).__name__}"
            )
        return None if answer.error is None else from_wire_refused(answer.error)

    @property
    def verdicts(self) -> dict[tuple[Rank, Rank], PlanSummary | PdxferError]:
        """For each (source rank, this worker's rank): their plan, or why there is none.

        Empty while nothing is known, and where the ranks of the other side did not become known.
        """
        answer = self._answer.message if self.poll() else None
        if isinstance(answer, Connected) and not self._verdicts:
            self._verdicts = {
                (rank_of(each.rank), self._rank): _verdict(each) for each in answer.verdicts
            }
        return self._verdicts

    async def _wait(self, timeout_s: float) -> PlanSummary:
        """Wait for the verdict.

        Raises: the error of the connection; TimeoutError: it is not known yet, and is awaited on.
        """
        check_patience(timeout_s)
        if not self.poll() and not await self._answered(timeout_s):
            raise TimeoutError(
                f"no verdict on prefill={self._message.prefill} after timeout_s={timeout_s:g}; it "
                "is awaited on"
            )
        return self._result()

    async def outcome(self, patience_s: float) -> PlanSummary:
        """Wait for the verdict, which the agent gives at the end of its time at the latest.

        Raises: the error of the connection; DaemonUnavailableError: the agent is silent.
        """
        timeout_s = self._message.timeout_s + patience_s
        try:
            if not await self._answered(timeout_s):
                raise self._channel.unanswered(self._message, timeout_s)
        finally:
            self._channel.forget(self._message)
        return self._result()

    async def _answered(self, timeout_s: float) -> bool:
        return await self._channel.until(
            lambda: self._answer.message is not None, timeout_s, self._answer.bell
        )

    def _result(self) -> PlanSummary:
        error, summary = self.error, self.summary
        if error is not None:
            raise error
        assert summary is not None
        return summary


def _verdict(verdict: Verdict) -> PlanSummary | PdxferError:
    if verdict.error is not None:
        return from_wire_refused(verdict.error)
    return PlanSummary.from_wire(verdict.summary or {})

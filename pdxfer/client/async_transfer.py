"""A transfer as the tasks of an event loop see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pdxfer.client.arguments import check_patience
from pdxfer.client.async_channel import Bell
from pdxfer.client.record import BAD, Commit, Owner, TransferRecord, check_until
from pdxfer.errors import PdxferError
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from pdxfer.client.async_channel import AsyncChannel
    from pdxfer.local.messages import Outcome, PlacePages, SendChunk


class AsyncOwner(Owner, Protocol):
    """A client on an event loop."""

    @property
    def channel(self) -> AsyncChannel:
        """To the agent."""
        ...


class AsyncTransfer(TransferRecord):
    """One request's cache on its way. Made by a client; for tasks of the client's event loop."""

    def __init__(
        self, client: AsyncOwner, room: int, slot: int, sequence: int, request: int
    ) -> None:
        super().__init__(client, room, slot, sequence, request)
        self._channel = client.channel
        self._bell = Bell()

    @property
    def error(self) -> PdxferError | None:
        """Why it failed or is about to; None while nothing is wrong.

        Looks for the agent's words about a state it has just written, without waiting: should they
        still be on their way, the error says only which state it is.
        """
        state = self.poll()
        if state not in BAD and self.refusal is None:
            return None if state in FINAL else self._channel.failure
        if self.refusal is None and not self.explained(state):
            self._channel.collect()
            if not self.explained(state) and self._channel.failure is not None:
                return self._channel.failure
        return self._told(state)

    async def wait(self, timeout_s: float, until: State = State.COMMITTED) -> Commit:
        """Wait until the transfer is at `until`, or further; as `Transfer.wait`.

        Cancelling leaves the transfer running, and its pages the agent's.

        Args:
            timeout_s: how long.
            until: WAITING, READY, MOVING, SENT or COMMITTED: a later good state satisfies it too.
                FAILED: wait for the end, whichever it is, through QUARANTINED too.

        Returns: what is known then; bytes and aux are complete from SENT and COMMITTED on.

        Raises:
            TransferError, LayoutMismatchError, PeerError and others: the transfer's error, at
                FAILED or QUARANTINED (its `fence` says which); the pages are the worker's only if
                `pages_returned`.
            DaemonUnavailableError: the agent is gone; the pages are not the worker's.
            TimeoutError: the transfer goes on.
        """
        check_until(until)
        check_patience(timeout_s)
        channel = self._channel
        if not self._ended(until):
            channel.collect()
        if not await self._bell.until(lambda: self._ended(until), timeout_s, channel.check):
            raise self._late(timeout_s)
        state = self.poll()
        error = await self._failure(state) if state in BAD else None
        self._client.settle(self)
        if error is not None:
            raise error
        if state is State.SENT:
            channel.collect()
        return self._commit()

    # -- what the client calls -----------------------------------------------------------------
    def hear(self, outcome: Outcome) -> None:
        """Note what the agent says of a state, and wake those it concerns."""
        super().hear(outcome)
        self._client.settle(self)

    def ring(self, *, everybody: bool = False) -> None:
        """Its state may have changed: wake the tasks that wait for that."""
        self._bell.ring(everybody=everybody)

    # -- inside --------------------------------------------------------------------------------
    async def _raise_failure(self) -> None:
        """Raise the transfer's error if it has one."""
        state = self.poll()
        if state in BAD or self.refusal is not None:
            raise await self._failure(state)
        if state not in FINAL:
            self._channel.check()

    async def _taken(self, message: SendChunk | PlacePages) -> None:
        """Wait until the kernel has the whole `message`, which has been posted."""
        timeout_s = self._client.timeout_s
        try:
            in_time = await self._channel.sent(timeout_s)
        except asyncio.CancelledError:
            self.abort(f"cancelled while the agent took its {type(message).__name__}")
            raise
        if not in_time:
            raise self._not_taken(timeout_s)

    async def _failure(self, state: State) -> PdxferError:
        """The agent's error for a bad `state`, waited for if it has not been read yet."""
        if self.refusal is None:
            try:
                await self._bell.until(
                    lambda: self.explained(self.poll()),
                    self._client.timeout_s,
                    self._channel.check,
                )
            except PdxferError as gone:
                return gone
        return self._told(state)

"""A transfer as a worker's threads see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from pdxfer.client.arguments import check_patience
from pdxfer.client.record import BAD, Commit, Owner, TransferRecord, check_until
from pdxfer.errors import PdxferError
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from pdxfer.client.channel import Channel
    from pdxfer.local.messages import PlacePages, SendChunk


class ThreadedOwner(Owner, Protocol):
    """A client whose callers may block."""

    @property
    def channel(self) -> Channel:
        """To the agent."""
        ...


class Transfer(TransferRecord):
    """One request's cache on its way. Made by a client; any thread may use it."""

    def __init__(
        self, client: ThreadedOwner, room: int, slot: int, sequence: int, request: int
    ) -> None:
        super().__init__(client, room, slot, sequence, request)
        self._channel = client.channel

    @property
    def error(self) -> PdxferError | None:
        """Why it failed or is about to; None while nothing is wrong.

        Waits for the agent's words about a state it has just written, at most the client's
        `timeout_s`; they are on their way already.
        """
        state = self.poll()
        if state in BAD or self.refusal is not None:
            return self._failure(state)
        return None if state in FINAL else self._channel.failure

    def wait(self, timeout_s: float, until: State = State.COMMITTED) -> Commit:
        """Block until the transfer is at `until`, or further.

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
        if not self._channel.wait_until(lambda: self._ended(until), time.monotonic() + timeout_s):
            raise self._late(timeout_s)
        state = self.poll()
        error = self._failure(state) if state in BAD else None
        self._client.settle(self)
        if error is not None:
            raise error
        if state is State.SENT:
            self._channel.collect()
        return self._commit()

    # -- inside --------------------------------------------------------------------------------
    def _hand_over(self, message: SendChunk | PlacePages) -> None:
        """Give the agent pages; returns once the kernel has the whole message."""
        channel = self._channel
        channel.post(message)
        timeout_s = self._client.timeout_s
        if channel.drained() or channel.wait_until(channel.drained, time.monotonic() + timeout_s):
            return
        raise self._not_taken(timeout_s)

    def _failure(self, state: State) -> PdxferError:
        """The agent's error for a bad `state`, waited for if it has not been read yet."""
        if self.refusal is None:
            try:
                self._channel.wait_until(
                    lambda: self.explained(self.poll()), time.monotonic() + self._client.timeout_s
                )
            except PdxferError as gone:
                return gone
        return self._told(state)

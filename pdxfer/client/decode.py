"""The decode worker's client: it receives rooms into its own pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client.client import Client
from pdxfer.client.record import ReceivingRecord
from pdxfer.client.requests import (
    connect_message,
    connected_summary,
    place_message,
    receive_message,
)
from pdxfer.client.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import PlanSummary


class Receiving(ReceivingRecord, Transfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One thread at a time may call `place`.
    """

    def place(self, pages: object, *, tokens: int | None = None, prefix_tokens: int = 0) -> None:
        """Say where the cache goes; once. The pages are the agent's until `pages_returned`.

        Args:
            pages: ids of the only group, or `{group: ids}`. They begin with the page that holds
                token `prefix_tokens`; `Pages` in place of ids says itself.
            tokens: of the whole request; None: to the end of the last page.
            prefix_tokens: tokens that are in the pool already, and are not sent.

        Raises:
            ConfigError: a page id out of range, a list too short; nothing was placed.
            LocalProtocolError: pages were placed before.
            DaemonUnavailableError: the agent is gone, or did not take the pages within the client's
                `timeout_s` (the transfer is aborted then).
            The transfer's own error: it has failed already.
        """
        self._check_not_placed()
        message = place_message(
            self._client.layout,
            pages,
            tokens,
            prefix_tokens,
            transfer=self.slot,
            request=self.request,
        )
        error = self.error
        if error is not None:
            raise error
        self._hand_over(message)
        self.placed = True


class DecodeClient(Client):
    """A decode worker's connection to its agent."""

    role = "decode"

    def connect(
        self, prefill: str | Sequence[str], timeout_s: float = limits.CONNECT_TIMEOUT_S
    ) -> PlanSummary:
        """Join the agents and compare layouts before any request; optional.

        Args:
            prefill: address of the prefill agent, or of each one that has ranks of the instance.
            timeout_s: how long the prefill side may take to be there whole.

        Returns: how requests will be moved.

        Raises:
            LayoutMismatchError: the caches cannot be joined; names each field and both values.
            PeerError: no such agent, or not all its ranks, within `timeout_s`.
            DaemonUnavailableError: the own agent is gone or does not answer.
        """
        message = connect_message(self.channel.new_request(), prefill, timeout_s)
        # The agent keeps timeout_s itself, and says at its end what is missing.
        answer, _ = self.channel.request(message, timeout_s=message.timeout_s + self.timeout_s)
        return connected_summary(answer)

    def receive(
        self,
        room: int,
        prefill: str | Sequence[str],
        pages: object = None,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Receiving:
        """Bind a room to this worker, before or after prefill sends.

        Args:
            room: from 1, 64 bits; the same at prefill.
            prefill: address of the prefill agent, or of each one that has ranks of the instance.
            pages: where the cache goes, as in `Receiving.place`; None: `place` follows.
            tokens: of the whole request; None: to the end of the last page.
            prefix_tokens: tokens that are in the pool already.
            deadline_s: how long the other side may stay away; None: `limits.UNMATCHED_DEADLINE_S`.

        Raises:
            LayoutMismatchError: the pair has been refused.
            ConfigError: a wrong argument; nothing was bound.
            LocalProtocolError: the room is bound already (`duplicate room`).
            ResourceError: too many live transfers, or too many pages in quarantine.
            DaemonUnavailableError: the agent is gone or does not answer.
        """
        message = receive_message(
            self.channel.new_request(),
            self.layout,
            room,
            prefill,
            pages,
            tokens=tokens,
            prefix_tokens=prefix_tokens,
            deadline_s=deadline_s,
        )
        receiving = self._open_transfer(message, Receiving)
        receiving.placed = message.place is not None
        return receiving

"""A transfer into this worker; written once, for sync and async clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from pdxfer.client.arguments import check_flag
from pdxfer.client.book import Book
from pdxfer.client.connecting import ConnectingRecord
from pdxfer.client.record import Owner, TransferRecord
from pdxfer.client.requests import (
    connect_message,
    places_of,
    receive_message,
)
from pdxfer.errors import LocalProtocolError
from pdxfer.local.messages import PlacePages
from pdxfer.protocol.state import RETURNED_AT_DECODE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.layout import PlanSummary
    from pdxfer.local.messages import OpenReceive

C = TypeVar("C", bound=ConnectingRecord)
R = TypeVar("R", bound="ReceivingRecord")


class ReceivingRecord(TransferRecord):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One thread, or task, at a time may call `place`.
    """

    returned = RETURNED_AT_DECODE

    def __init__(self, client: Owner, opening: OpenReceive, tag: object = None) -> None:
        super().__init__(client, opening, tag)
        self.holds_pages = self._placed = opening.place is not None
        self.prefill = opening.prefill
        self.placed_groups = {} if opening.place is None else opening.place.groups

    async def _place(
        self,
        pages: object,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        trim: bool = False,
        null_page: int | None = None,
    ) -> None:
        """Say where the cache goes; once. The pages are the agent's until `pages_returned`.

        Args:
            pages: ids of the only group, or `{group: ids}`. They begin with the page that holds
                token `prefix_tokens`; `Pages` in place of ids says itself.
            tokens: of the whole request; None: to the end of the last page. 0, with empty lists,
                moves nothing and commits.
            prefix_tokens: tokens that are in the pool already, and are not sent.
            trim: leave out the last page of a token group whose list has one page more than
                `tokens` needs; a list that is longer still is refused.
            null_page: an id that stands for no page in the lists of token groups: its tokens are
                counted, and skipped. It must be none that a page can have. Decode may skip what
                prefill has; a page that decode names and prefill skips fails the transfer.

        Raises:
            ConfigError: a page id out of range, a list too short or too long; nothing was placed.
            LocalProtocolError: pages were placed before.
            DaemonUnavailableError: the agent is gone, or did not take the pages within the client's
                `timeout_s` (the transfer is aborted then).
            The transfer's own error: it has failed already.
        Cancelling the task of an async client while the socket takes the pages aborts the transfer;
            they are the agent's until `pages_returned`.
        """
        self._check_not_placed()
        layout = self._client.layout
        places = places_of(
            layout, self.room, pages, tokens, prefix_tokens, trim=trim, null_page=null_page
        )
        await self._raise_failure()
        self._check_not_placed()
        message = PlacePages(
            request=self.request, transfer=self.slot, sequence=self.sequence, place=places
        )
        self._channel.post(message)
        self.holds_pages = self._placed = True
        self.placed_groups = places.groups
        await self._taken(message)

    def _check_not_placed(self) -> None:
        if self._placed:
            raise LocalProtocolError(f"room {self.room}: its pages have been placed")


class DecodeBook(Book[R], Generic[R]):
    """What both decode clients do."""

    role = "decode"

    def _connecting(
        self, prefill: str | Sequence[str], timeout_s: float, kind: Callable[..., C], *, wait: bool
    ) -> C:
        """Ask for a comparison of layouts."""
        if check_flag("wait", wait):
            self.channel.check_not_gathering()
        message = connect_message(self.channel.new_request(), prefill, timeout_s)
        return kind(self.channel, message, self.rank)

    async def _joined(self, connecting: ConnectingRecord) -> PlanSummary:
        """Wait for its verdict, for as long as the agent may take to know it."""
        return await connecting.outcome(self.timeout_s)

    async def _receive(  # noqa: PLR0913 the surface
        self,
        room: int,
        prefill: str | Sequence[str],
        pages: object = None,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        deadline_s: float | None = None,
        unreachable_s: float | None = None,
        must_exist: bool = False,
        wait: bool = True,
        tag: object = None,
        trim: bool = False,
        null_page: int | None = None,
    ) -> R:
        """Bind a room to this worker, before or after prefill sends.

        Args:
            room: from 1, 64 bits; the same at prefill.
            prefill: address of the prefill agent, or of each one that has ranks of the instance.
            pages: where the cache goes, as in `Receiving.place`; None: `place` follows.
            tokens: of the whole request; None: to the end of the last page.
            prefix_tokens: tokens that are in the pool already.
            deadline_s: how long the other side may stay away; None: `limits.UNMATCHED_DEADLINE_S`.
            unreachable_s: how long a prefill address may go without an answer. Then the receive
                fails, retryable. None: it waits until its deadline.
            must_exist: fail, retryable, where a prefill agent that answers has no live send of the
                room.
            wait: False: return at once. Nothing waits for the agent then; a refusal is the error of
                the transfer that is returned, which is FAILED.
            tag: kept at the transfer's `tag`, for the caller alone.
            trim: leave out one page too many of a group; see `Receiving.place`.
            null_page: an id that stands for no page; see `Receiving.place`.

        Raises:
            LayoutMismatchError: the pair has been refused.
            ConfigError: a wrong argument; nothing was bound.
            LocalProtocolError: the room is bound already (`duplicate room`).
            ResourceError: too many live transfers, or too many pages in quarantine.
            DaemonUnavailableError: the agent is gone or does not answer.
        Cancelling the task of an async client gives the room up, as a raise does: it is aborted,
            and `finished` does not list it. Pages given here are the agent's for as long as
            `given_up` names the room.
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
            unreachable_s=unreachable_s,
            must_exist=must_exist,
            trim=trim,
            null_page=null_page,
        )
        return await self._open_transfer(message, tag, wait=wait)

"""The decode worker's client: it receives rooms into its own pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.client.client import Client
from pdxfer.client.pages import (
    check_count,
    check_covers,
    check_room,
    check_seconds,
    end_token,
    normalise,
    pack,
    token_groups,
)
from pdxfer.client.transfer import Transfer
from pdxfer.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from pdxfer.layout import PlanSummary
from pdxfer.local.messages import Connected, ConnectPeer, OpenReceive, PlacePages
from pdxfer.protocol.state import RETURNED_AT_DECODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout


class Receiving(Transfer):
    """A room's cache on its way into this worker; readable at COMMITTED.

    One thread at a time may call `place`.
    """

    returned = RETURNED_AT_DECODE
    placed = False

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
        if self.placed:
            raise LocalProtocolError(f"room {self.room}: its pages have been placed")
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
        timeout_s = check_seconds("timeout_s", timeout_s)
        message = ConnectPeer(
            request=self.channel.new_request(), prefill=_addresses(prefill), timeout_s=timeout_s
        )
        # The agent keeps timeout_s itself, and says at its end what is missing.
        answer, _ = self.channel.request(message, timeout_s=timeout_s + self.timeout_s)
        if not isinstance(answer, Connected):
            raise RemoteProtocolError(
                f"the agent answered ConnectPeer with {type(answer).__name__}"
            )
        return PlanSummary.from_wire(answer.summary)

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
        check_room(room)
        deadline_s = limits.UNMATCHED_DEADLINE_S if deadline_s is None else deadline_s
        place = None
        if pages is not None:
            place = place_message(self.layout, pages, tokens, prefix_tokens)
        elif tokens is not None or prefix_tokens:
            raise ConfigError("tokens and prefix_tokens go with the pages: give them to place()")
        message = OpenReceive(
            request=self.channel.new_request(),
            room=room,
            prefill=_addresses(prefill),
            deadline_s=check_seconds("deadline_s", deadline_s),
            place=place,
        )
        receiving = self.open_transfer(message, Receiving)
        receiving.placed = place is not None
        return receiving


def place_message(
    layout: KVLayout,
    pages: object,
    tokens: int | None,
    prefix_tokens: int,
    *,
    transfer: int = -1,
    request: int = 0,
) -> PlacePages:
    """Check and pack where a request goes.

    Raises: ConfigError naming the argument, its value and what it may be.
    """
    check_count("tokens", tokens, 1)
    check_count("prefix_tokens", prefix_tokens, 0)
    starts = {
        group.name: prefix_tokens // group.page_size * group.page_size
        for group in token_groups(layout)
    }
    groups = normalise(layout, pages, starts, unique=True)
    tokens = end_token(layout, groups) if tokens is None else tokens
    if not tokens:
        raise ConfigError(f"tokens={tokens}: the pages hold no tokens to count; give the number")
    if prefix_tokens > tokens:
        raise ConfigError(f"prefix_tokens={prefix_tokens} is more than tokens={tokens}")
    check_covers(layout, groups, tokens)
    return PlacePages(
        request=request,
        transfer=transfer,
        tokens=tokens,
        prefix_tokens=prefix_tokens,
        groups=pack(groups),
    )


def _addresses(prefill: str | Sequence[str]) -> list[str]:
    addresses = [prefill] if isinstance(prefill, str) else list(prefill)
    if not addresses or not all(isinstance(item, str) and item for item in addresses):
        raise ConfigError(
            f"prefill={prefill!r}: must be an address of a prefill agent, or a list of them"
        )
    return addresses

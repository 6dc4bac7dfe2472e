"""The prefill worker's client: it opens rooms and sends the pages it has filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdxfer import limits
from pdxfer.client.arguments import check_event
from pdxfer.client.client import Client
from pdxfer.client.record import SendingRecord
from pdxfer.client.requests import chunk_message, open_message
from pdxfer.client.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.local.messages import SendChunk


class Event(Protocol):
    """A GPU event: `torch.cuda.Event` for example."""

    def synchronize(self) -> object:
        """Block until the work recorded before it is done."""
        ...


class Sending(SendingRecord, Transfer):
    """A room's cache on its way out of this worker; its source pages are the worker's from SENT on.

    One thread at a time may call `send`.
    """

    def send(
        self,
        pages: object,
        *,
        tokens: int | None = None,
        layers: Iterable[int] | None = None,
        last: bool = True,
        aux: bytes = b"",
        after: Event | None = None,
    ) -> None:
        """Send a chunk; returns once the agent has it. The pages are the agent's until SENT.

        Args:
            pages: ids of the only group, or `{group: ids}`. They begin at token 0, or where the
                previous chunk of these layers ended; `Pages` in place of ids says itself.
            tokens: of the whole request; with the last chunk at the latest. None then: to the end
                of the last page.
            layers: global layers whose bytes these are; None: all.
            last: nothing follows.
            aux: handed to the decode worker with the commit, at most `limits.AUX_BYTES_MAX`.
            after: waited for first, on this thread: the work that fills the pages.

        What only the agent can tell (a list too short for its tokens, chunks that overlap) fails
        the transfer: its error says so.

        Raises:
            ConfigError: a wrong argument, for example a page id out of range; nothing was sent.
            LocalProtocolError: the last chunk has been sent.
            DaemonUnavailableError: the agent is gone, or did not take the chunk within the client's
                `timeout_s` (the transfer is aborted then).
            The transfer's own error: it has failed already.
        """
        check_event(after, "synchronize")
        self._check_open()
        chunk = chunk_message(
            self._client.layout,
            pages,
            tokens=tokens,
            layers=layers,
            last=last,
            aux=aux,
            transfer=self.slot,
            request=self.request,
        )
        if after is not None:
            after.synchronize()
        self._hand_over(chunk)
        self.note_chunk(chunk)

    # -- inside --------------------------------------------------------------------------------
    def _check_open(self) -> None:
        self._check_last_not_sent()
        error = self.error
        if error is not None:
            raise error
        self._check_goes_on()


class PrefillClient(Client):
    """A prefill worker's connection to its agent."""

    role = "prefill"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where decode agents reach this worker's instance: what decode passes as `prefill=`."""
        return self._instance_addresses()

    def open(
        self, room: int, *, deadline_s: float | None = None, lease_s: float = limits.LEASE_S
    ) -> Sending:
        """Hold a room, so that decode can be matched before the first page is filled.

        Args:
            room: from 1, 64 bits; the same at decode.
            deadline_s: how long it may stay unmatched; None: `limits.UNMATCHED_DEADLINE_S`.
            lease_s: once matched, how long it goes on without a sign of decode.

        Raises:
            LayoutMismatchError: decode is waiting in this room, and its layout cannot be joined.
            LocalProtocolError: the room is open already.
            ResourceError: too many live transfers.
            DaemonUnavailableError: the agent is gone or does not answer.
        """
        return self._open(room, deadline_s, lease_s, None)

    def _open(
        self, room: int, deadline_s: float | None, lease_s: float, chunk: SendChunk | None
    ) -> Sending:
        message = open_message(self.channel.new_request(), room, deadline_s, lease_s, chunk)
        sending = self._open_transfer(message, Sending)
        sending.note_chunk(chunk)
        return sending

    def send(  # noqa: PLR0913 the surface of DESIGN 9
        self,
        room: int,
        pages: object,
        *,
        tokens: int | None = None,
        layers: Iterable[int] | None = None,
        last: bool = True,
        aux: bytes = b"",
        deadline_s: float | None = None,
        lease_s: float = limits.LEASE_S,
    ) -> Sending:
        """`open` and the first `Sending.send` in one message; raises what they raise.

        A chunk refused here opens no room.
        """
        chunk = chunk_message(self.layout, pages, tokens=tokens, layers=layers, last=last, aux=aux)
        return self._open(room, deadline_s, lease_s, chunk)

"""A transfer out of this worker; written once, for sync and async clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from pdxfer import limits
from pdxfer.client.arguments import check_event, check_patience, check_room, shown
from pdxfer.client.book import Book
from pdxfer.client.record import BAD, Owner, TransferRecord
from pdxfer.client.requests import chunk_of, open_message
from pdxfer.errors import ConfigError, LocalProtocolError
from pdxfer.local import events
from pdxfer.local.messages import BeginChunk, LayerDone, SendChunk
from pdxfer.protocol.prefill.extent import Extent
from pdxfer.protocol.state import RETURNED_AT_PREFILL, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.local.events import Queried
    from pdxfer.local.messages import OpenSend

S = TypeVar("S", bound="SendingRecord")
_NOTHING_FOLLOWS: Final = BAD | {State.SENT, State.COMMITTED}


class SendingRecord(TransferRecord):
    """A room's cache on its way out of this worker; its source pages are the worker's from SENT on.

    One thread, or task, at a time may call `send`.
    """

    returned = RETURNED_AT_PREFILL
    _event_method: ClassVar[str]
    """What is asked of `after`."""

    def __init__(self, client: Owner, opening: OpenSend, tag: object = None) -> None:
        super().__init__(client, opening, tag)
        self._chunks_sent = 0
        self._layers_left: set[int] = set()
        """Of the chunk that was begun: layers that are not done."""
        self._returned_last = (0, 0)
        self.extent = Extent(opening.room, client.layout, shares_pages=client.rank.cp_size > 1)
        """What its chunks have covered so far."""
        if opening.chunk is not None:
            self._note_chunk()

    @property
    def prefix_tokens(self) -> int | None:
        """Tokens that decode has already and that are not sent; known from READY on, else None."""
        if self._prefix_tokens is None and self.poll() is not State.WAITING:
            self._channel.collect()
        return self._prefix_tokens

    @property
    def returned_tokens(self) -> int:
        """Source pages of tokens below this are the worker's again: a memory read.

        Counted are tokens whose pages were sent in all layers and groups and have arrived at every
        receiver; 0 until all receivers have come. State pages come back with SENT. Where the
        transfer fails, the rest comes back at FAILED.
        """
        return self._returned()[0]

    async def _wait_returned(self, timeout_s: float) -> None:
        """Wait until all pages sent so far are the worker's again.

        Raises:
            The transfer's error, at FAILED or QUARANTINED; the pages are the worker's only if
                `pages_returned`.
            DaemonUnavailableError: the agent is gone.
            TimeoutError: some are not; the transfer goes on.
        """
        check_patience(timeout_s)
        channel = self._channel
        if not await channel.until(self._all_returned, timeout_s, channel.board_bell):
            raise self._late(timeout_s)
        state = self.poll()
        if state in BAD:
            raise await self._failure(state)

    def _all_returned(self) -> bool:
        state = self.poll()
        if state in BAD:
            return state is not State.FENCING and self.explained(state)
        if state in self.returned:
            return True
        return not self._layers_left and self._returned()[1] >= self._chunks_sent

    def _returned(self) -> tuple[int, int]:
        """(tokens, chunks) below which pages are back, from the board while the slot is ours."""
        if self.final is None:
            now = self._client.board.returned(self.slot, self.sequence)
            # The slot may have gone to another transfer between those two: numbers only grow.
            self._returned_last = max(self._returned_last, now or (0, 0))
        return self._returned_last

    def note_final(self, state: State) -> None:
        """Note that it is final: its slot is another transfer's from here on."""
        self._returned()
        super().note_final(state)

    def _note_chunk(self) -> None:
        """A chunk has been given to the agent."""
        self.holds_pages = True
        self._chunks_sent += 1

    async def _send(  # noqa: PLR0913 the surface
        self,
        pages: object,
        *,
        tokens: int | None = None,
        layers: Iterable[int] | None = None,
        last: bool = True,
        aux: bytes = b"",
        after: object = None,
        trim: bool = False,
        null_page: int | None = None,
    ) -> None:
        """Send a chunk; returns once the agent has it. The pages are the agent's until SENT.

        Args:
            pages: ids of the only group, or `{group: ids}`. They begin at token 0, or where the
                previous chunk of these layers ended; `Pages` in place of ids says itself.
            tokens: of the whole request; with the last chunk at the latest. None then: to the end
                of the last page. 0, with empty lists, moves nothing and commits.
            layers: global layers whose bytes these are; None: all.
            last: nothing follows.
            aux: handed to the decode worker with the commit, at most `limits.AUX_BYTES_MAX`.
            trim: leave out the last page of a token group whose list has one page more than
                `tokens` needs; a list that is longer still is refused.
            null_page: an id that stands for no page in the lists of token groups: its tokens are
                counted, and skipped. It must be none that a page can have. Decode may skip what
                prefill has; a page that decode names and prefill skips fails the transfer.
            after: a GPU event, waited for first: the work that fills the pages. A sync client calls
                its `synchronize()` on this thread; an async one asks its `query()`, at most for
                the client's `timeout_s`.

        What only the agent can tell (decode states other tokens, layers are missing at the end)
        fails the transfer: its error says so.

        Raises:
            ConfigError: a wrong argument, for example a page id out of range, a list too short or
                too long for its tokens, chunks that overlap; nothing was sent.
            LocalProtocolError: the last chunk has been sent.
            TimeoutError: an async client's `after` is not done; nothing was sent, the transfer goes
                on.
            DaemonUnavailableError: the agent is gone, or did not take the chunk within the client's
                `timeout_s` (the transfer is aborted then).
            The transfer's own error: it has failed already.
        Cancelling the task of an async client: while `after` is waited for, nothing has been sent
            and the transfer goes on; while the socket takes the chunk, the transfer is aborted.
        """
        check_event(after, self._event_method)
        await self._check_open()
        chunk, covered = chunk_of(
            self._client.layout,
            self.extent,
            pages,
            tokens=tokens,
            layers=layers,
            last=last,
            aux=aux,
            trim=trim,
            null_page=null_page,
        )
        if after is not None:
            await self._wait_for(after)
            await self._check_open()
        message = SendChunk(
            request=self.request, transfer=self.slot, sequence=self.sequence, chunk=chunk
        )
        self._channel.post(message)
        self.extent.take(covered)
        self._note_chunk()
        await self._taken(message)

    async def _begin(
        self,
        pages: object,
        *,
        tokens: int | None = None,
        last: bool = True,
        aux: bytes = b"",
        trim: bool = False,
        null_page: int | None = None,
    ) -> None:
        """Begin a chunk of all layers, each of which goes at its `layer_done`.

        The arguments are those of `send`. Nothing of the pages is read before their layer is done;
        they are the agent's from here on. Another chunk may follow when all layers are done. A
        layer that is never done ends the transfer by `limits.NO_PROGRESS_DEADLINE_S`.

        Raises: as `send`; LocalProtocolError also where layers of the chunk before are not done.
        """
        await self._check_open()
        chunk, covered = chunk_of(
            self._client.layout,
            self.extent,
            pages,
            tokens=tokens,
            layers=None,
            last=last,
            aux=aux,
            trim=trim,
            null_page=null_page,
        )
        message = BeginChunk(
            request=self.request, transfer=self.slot, sequence=self.sequence, chunk=chunk
        )
        self._channel.post(message)
        self.extent.take(covered)
        self._layers_left = set(self._client.layout.layers)
        self.holds_pages = True
        await self._taken(message)

    def layer_done(self, layer: int, event: Queried | None = None) -> None:
        """Let the bytes of one layer go; never waits, of a sync client and of an async one alike.

        Args:
            layer: global id of a layer of the cache; each once, in any order.
            event: a GPU event, of the work that fills the layer. The agent asks its `query()` on a
                thread of its own and reads nothing of the layer before it is done.

        Raises:
            ConfigError: an event, where the agent is a daemon and cannot see it; nothing was told.
            LocalProtocolError: the layer is done already, or no chunk was begun that has it.
            DaemonUnavailableError: the agent is gone.
        What has failed already is left as it is: `poll` and `error` say so.
        """
        if layer not in self._layers_left:
            raise LocalProtocolError(
                f"room {self.room}: layer {shown(layer)} is done already, or nothing was begun "
                "that has it: each layer of the cache once after begin()"
            )
        number = 0
        if event is not None:
            check_event(event, "query")
            if not self._client.agent_is_embedded:
                raise ConfigError(
                    f"event={shown(event)}: a daemon cannot see a GPU event of this process; wait "
                    "for it before layer_done, or run the agent in this process (pdxfer.embedded)"
                )
            number = events.put(event)
        self._layers_left.discard(layer)
        self._chunks_sent += 1
        message = LayerDone(
            request=self.request,
            transfer=self.slot,
            sequence=self.sequence,
            layer=layer,
            event=number,
        )
        try:
            self._channel.post(message)
        except BaseException:  # the agent never hears of the event
            events.drop(number)
            raise

    # -- inside --------------------------------------------------------------------------------
    async def _wait_for(self, after: object) -> None:
        """Wait until the work of a GPU event is done."""
        raise NotImplementedError

    async def _check_open(self) -> None:
        if self._layers_left:
            raise LocalProtocolError(
                f"room {self.room}: layers {sorted(self._layers_left)} of the chunk that was begun "
                "are not done; tell each by layer_done before the next chunk"
            )
        if self.extent.complete:
            raise LocalProtocolError(f"room {self.room}: its last chunk has been sent")
        await self._raise_failure()
        state = self.poll()
        if state in _NOTHING_FOLLOWS:
            raise LocalProtocolError(f"room {self.room} is {state.name}: nothing can follow")


class PrefillBook(Book[S], Generic[S]):
    """What both prefill clients do."""

    role = "prefill"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where decode agents reach this worker's instance: what decode passes as `prefill=`."""
        return self._instance_addresses()

    async def _open(
        self,
        room: int,
        *,
        deadline_s: float | None = None,
        lease_s: float = limits.LEASE_S,
        wait: bool = True,
        tag: object = None,
    ) -> S:
        """Hold a room, so that decode can be matched before the first page is filled.

        Args:
            room: from 1, 64 bits; the same at decode.
            deadline_s: how long a receiver of the room may stay away; None:
                `limits.UNMATCHED_DEADLINE_S`. Once all have come, only the lease counts.
            lease_s: once matched, how long it goes on without a sign of decode.
            wait: False: return at once. Nothing waits for the agent then; a refusal is the error of
                the transfer that is returned, which is FAILED.
            tag: kept at the transfer's `tag`, for the caller alone.

        Raises:
            LayoutMismatchError: decode is waiting in this room, and its layout cannot be joined.
            LocalProtocolError: the room is open already.
            ResourceError: too many live transfers.
            DaemonUnavailableError: the agent is gone or does not answer.
        Cancelling the task of an async client gives the room up, as a raise does: it is aborted,
            and `finished` does not list it.
        """
        message = open_message(self.channel.new_request(), room, deadline_s, lease_s, None)
        return await self._open_transfer(message, tag, wait=wait)

    async def _send(  # noqa: PLR0913 the surface
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
        wait: bool = True,
        tag: object = None,
        trim: bool = False,
        null_page: int | None = None,
    ) -> S:
        """`open` and the first `send` of what it returns, in one message; raises what they raise.

        A chunk refused here opens no room. Pages of a call that was cancelled, or that raised
        `DaemonUnavailableError`, are the agent's for as long as `given_up` names the room.
        """
        extent = Extent(check_room(room), self.layout, shares_pages=self.rank.cp_size > 1)
        chunk, covered = chunk_of(
            self.layout,
            extent,
            pages,
            tokens=tokens,
            layers=layers,
            last=last,
            aux=aux,
            trim=trim,
            null_page=null_page,
        )
        message = open_message(self.channel.new_request(), room, deadline_s, lease_s, chunk)
        sending = await self._open_transfer(message, tag, wait=wait)
        sending.extent.take(covered)
        return sending

"""A client goes on with the agent that came back: what the old life left ends by its proofs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdxfer.errors import DaemonUnavailableError, LocalProtocolError
from pdxfer.local.messages import HeldTransfer, WritersEnded
from pdxfer.protocol.state import State

if TYPE_CHECKING:
    from pdxfer.client.book import Book
    from pdxfer.client.proofs import Proofs
    from pdxfer.client.record import TransferRecord
    from pdxfer.local.board import BoardReader


@dataclass(frozen=True, slots=True)
class Inherited:
    """A transfer that a new life of the agent holds, and where the old life had it."""

    transfer: TransferRecord
    proofs: Proofs
    board: BoardReader
    slot: int
    sequence: int

    @property
    def writers_ended(self) -> bool:
        """Whether this worker has seen the end of every process that may write its pages."""
        return self.proofs.are_complete(self.board, self.slot, self.sequence)

    def ended_message(self) -> WritersEnded:
        """What the new life is told then."""
        return WritersEnded(transfer=self.transfer.slot, sequence=self.transfer.sequence)


class Life:
    """What a client has of one life of its agent; taken over from, and given back to, a client."""

    _PARTS = ("channel", "board", "word", "_slots", "_proofs", "_hello", "_live", "_by_request")

    def __init__(self, book: Book[Any]) -> None:
        self._book = book
        self._parts = {name: getattr(book, name) for name in self._PARTS}
        self._left: list[TransferRecord] = [
            transfer
            for transfer in book._live.values()
            if transfer.poll() is State.QUARANTINED and transfer.placed_groups
        ]
        self._moved: list[tuple[TransferRecord, tuple[object, ...]]] = []

    def restore(self) -> None:
        """The client has this life again, and its transfers their places in it."""
        for transfer, place in self._moved:
            transfer.go_back(place)
        for name, part in self._parts.items():
            setattr(self._book, name, part)

    def bequeath(self) -> list[HeldTransfer]:
        """Move the transfers that have no proof yet to slots of the client's new board.

        Returns: what the new life is told of them.
        """
        book, proofs, board = self._book, self._parts["_proofs"], self._parts["board"]
        told = []
        for transfer in self._left:
            old = transfer.slot, transfer.sequence
            writers = proofs.named(board, *old)
            slot, sequence = book._slots.take()
            self._moved.append((transfer, transfer.go_on(slot, sequence)))
            book._live[slot] = book._by_request[transfer.request] = transfer
            book._inherited.append(Inherited(transfer, proofs, board, *old))
            told.append(
                HeldTransfer(
                    transfer=slot,
                    sequence=sequence,
                    life=board.incarnation,
                    room=transfer.room,
                    groups=transfer.placed_groups,
                    prefill=transfer.prefill,
                    writers=writers,
                )
            )
        return told

    def end(self) -> None:
        """The client goes on in another life."""
        for transfer in self._parts["_live"].values():
            if transfer.final is None and transfer not in self._book._live.values():
                transfer.note_final(transfer.poll())  # at prefill SENT: nobody will say more
        self._parts["channel"].close()


async def resume(book: Book[Any]) -> None:
    """Attach the client anew; see `Book.resume`."""
    _check_over(book)
    book._settle_changed()
    old = Life(book)
    inherited = list(book._inherited)
    channel = book._make_channel(book._socket_path)
    channel.number_on(old._parts["channel"])
    book._begin_life(channel)
    try:
        await book._connect_and_attach(old.bequeath)
    except BaseException:
        channel.close()
        book._inherited = inherited
        old.restore()
        raise
    old.end()


def _check_over(book: Book[Any]) -> None:
    """Raise unless a life of the agent is over, and its process with it."""
    channel = book.channel
    channel.check_home()
    if book._closed:
        raise LocalProtocolError("this client is closed: make another one")
    channel.collect()
    if channel.failure is None and not book.board.ended:
        raise LocalProtocolError(
            f"the agent at {channel.socket_path} lives: resume() is for one that has ended"
        )
    if channel.failure is None or not book._proofs.agent_ended:
        raise DaemonUnavailableError(
            f"the process of the agent that was at {channel.socket_path} has not ended, and may "
            "still touch pages of this worker: end it, or wait for its end, and resume then",
            retryable=True,
        )

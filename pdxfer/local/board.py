"""The status board: how each transfer of one worker stands, in memory that worker and agent share.

The agent writes, the worker only reads: the memfd is sealed FUTURE_WRITE after the agent has mapped
it, so the worker cannot map it writable. A transfer has a slot, and each use of a slot a sequence
number, one more than the last; the worker chooses both. The word of a slot is
`sequence << 8 | state`. Once the agent's thread has ended, for whatever reason, words are read with
`ORPHANED` set: the kernel marks the board when that thread dies.

Invariant: what the word cannot hold (an error, a commit) is queued on the local socket before the
word shows its state.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import Final

from pdxfer import _core
from pdxfer.errors import LocalProtocolError
from pdxfer.protocol.state import State

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; the fcntl module has no name for it
_FREE: Final = 0
_STATES: Final = (None, *State)
_NO_INCARNATION: Final = bytes(16)
ORPHANED: Final = 0x80
"""Set in a word once the agent has ended: it is the last one."""
STATE_BITS: Final = 0x7F
_CHUNK_BITS: Final = 18
"""Bits of a word that count chunks; `limits.CHUNKS_PER_TRANSFER_MAX` fits into them."""
_TOKENS_MAX: Final = (1 << 64 - _CHUNK_BITS) - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """What the board says about one transfer beside its state."""

    room: int
    generation: int
    lane_code: int
    """The agent's code of the lane, of its table of lanes; 0: not chosen yet."""
    peer_incarnation: bytes
    """16 bytes, of one agent on the other side; zeros: none yet."""
    peer_count: int
    """At prefill: agents on the other side. At decode: processes that may write into the pages by
    themselves; 0: what lands, this agent places, or nobody has been told a page."""
    bytes_done: int


class BoardWriter:
    """The agent's side, made and used on the agent's thread: its end is the end of the agent."""

    def __init__(self, slots: int, incarnation: bytes = _NO_INCARNATION) -> None:
        """Make the board's memory.

        Args:
            slots: how many transfers it holds.
            incarnation: of the agent, 16 bytes.
        """
        self.slots = slots
        self.fd = os.memfd_create("pdxfer-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Descriptor of the board's memory, to be passed to the worker, which can map it only for
        reading."""
        try:
            os.ftruncate(self.fd, _core.board_bytes(slots))
            self._board = _core.BoardWriter(self.fd, slots, incarnation)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
            self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            """Readable after each `publish`, until the worker reads it."""
        except BaseException:
            os.close(self.fd)
            raise
        self._live: dict[int, tuple[int, Entry]] = {}
        self._last: dict[int, int] = {}
        """The sequence number of the last use of each slot."""

    def take(self, slot: int, sequence: int, room: int) -> None:
        """Take the slot that the worker has chosen for a transfer; nothing is shown yet.

        Raises: LocalProtocolError when it is no free slot, or not the use after its last one;
            nothing has changed.
        """
        if not 0 <= slot < self.slots:
            raise LocalProtocolError(
                f"transfer={slot}: this board has the slots 0 to {self.slots - 1}"
            )
        if slot in self._live:
            raise LocalProtocolError(
                f"transfer={slot}: this slot has the live transfer {self._live[slot][0]}; it is "
                "free after its release"
            )
        expected = self._last.get(slot, 0) + 1
        if sequence != expected:
            raise LocalProtocolError(
                f"transfer={slot} sequence={sequence}: the next use of this slot is {expected}"
            )
        self._last[slot] = sequence
        entry = Entry(room, 0, 0, _NO_INCARNATION, 0, 0)
        self._live[slot] = (sequence, entry)
        self._store(slot, entry)
        self._board.set_returned(slot, 0)

    def set_returned(self, slot: int, tokens: int, chunks: int, *, wake: bool = True) -> None:
        """Show which source pages are back, and with `wake` wake whoever waits for them.

        Raises: LocalProtocolError when the slot is free.
        """
        self._entry(slot)
        packed = min(tokens, _TOKENS_MAX) << _CHUNK_BITS | chunks
        self._board.set_returned(slot, packed)
        if wake:
            self._signal()

    def in_use(self, slot: int, sequence: int) -> bool:
        """Whether the slot is taken, in this use."""
        return self._live.get(slot, (0,))[0] == sequence

    def publish(self, slot: int, state: State) -> None:
        """Show `state` in the slot and wake whoever waits for it.

        Raises: LocalProtocolError when the slot is free.
        """
        sequence, _ = self._entry(slot)
        self._board.publish(slot, sequence, state)
        self._signal()

    def set_details(
        self,
        slot: int,
        *,
        generation: int | None = None,
        lane_code: int | None = None,
        peer_incarnation: bytes | None = None,
        peer_count: int | None = None,
        bytes_done: int | None = None,
    ) -> None:
        """Change what is given; shown at once, without a wake-up."""
        sequence, old = self._entry(slot)
        entry = Entry(
            room=old.room,
            generation=old.generation if generation is None else generation,
            lane_code=old.lane_code if lane_code is None else lane_code,
            peer_incarnation=old.peer_incarnation if peer_incarnation is None else peer_incarnation,
            peer_count=old.peer_count if peer_count is None else peer_count,
            bytes_done=old.bytes_done if bytes_done is None else bytes_done,
        )
        self._live[slot] = (sequence, entry)
        self._store(slot, entry)

    def release(self, slot: int, sequence: int) -> None:
        """Give the slot back: the worker has seen its final state.

        Raises: LocalProtocolError when that use of the slot is not alive.
        """
        if not self.in_use(slot, sequence):
            raise LocalProtocolError(f"board slot {slot} has no live transfer {sequence}")
        del self._live[slot]
        self._board.publish(slot, sequence, _FREE)

    @property
    def live(self) -> int:
        """How many slots are taken."""
        return len(self._live)

    def close(self) -> None:
        """Close both descriptors; the worker's mapping keeps the last words. Idempotent.

        The worker sees that nobody writes here any more.
        """
        if self.fd >= 0:
            self._board.end()
            os.close(self.fd)
            os.close(self.eventfd)
            self.fd = self.eventfd = -1

    def _entry(self, slot: int) -> tuple[int, Entry]:
        try:
            return self._live[slot]
        except KeyError:
            raise LocalProtocolError(f"board slot {slot} has no live transfer") from None

    def _store(self, slot: int, entry: Entry) -> None:
        self._board.set_details(
            slot,
            entry.room,
            entry.generation,
            entry.peer_incarnation,
            entry.peer_count,
            entry.lane_code,
        )
        self._board.set_bytes_done(slot, entry.bytes_done)

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full counter is readable already
            os.eventfd_write(self.eventfd, 1)


class BoardReader:
    """The worker's side of the board, which only reads.

    Any thread may use it. The mapping lives as long as this object.
    """

    def __init__(self, fd: int, slots: int) -> None:
        """Map the board read-only; `fd` stays the caller's.

        Raises: OSError when it is no board of this version with that many slots.
        """
        self._board = _core.BoardReader(fd, slots)
        self.slots = slots
        self.incarnation = self._board.incarnation
        """Incarnation of the agent that writes the board."""
        self.word = self._board.word
        """`word(slot)` is `sequence << 8 | state`, with `ORPHANED` once the agent has ended: two
        memory reads, no other cost."""

    def state(self, slot: int, sequence: int) -> State | None:
        """The state of that use of the slot; None when the slot is not in that use."""
        word = self.word(slot)
        return _STATES[word & STATE_BITS] if word >> 8 == sequence else None

    @property
    def ended(self) -> bool:
        """Whether the agent writes no more: it has closed this board, or its thread has ended."""
        return self._board.ended

    def wait(self, slot: int, sequence: int, until_not: State, timeout_s: float) -> State | None:
        """Block until the state is not `until_not`, or `timeout_s` is over; the state it then has.

        The GIL is free meanwhile. It does not see the agent's death: keep `timeout_s` short, or
        wait for the eventfd and the socket.
        """
        word = self._board.wait(slot, sequence << 8 | until_not, timeout_s)
        return _STATES[word & STATE_BITS] if word >> 8 == sequence else None

    def returned(self, slot: int, sequence: int) -> tuple[int, int] | None:
        """(tokens, chunks) below which source pages are back: two memory reads.

        None when the slot is not in that use.
        """
        packed = self._board.returned(slot)
        if self.word(slot) >> 8 != sequence:
            return None
        return packed >> _CHUNK_BITS, packed & (1 << _CHUNK_BITS) - 1

    def entry(self, slot: int, sequence: int) -> Entry | None:
        """What the board says beside the state; None when the slot is not in that use."""
        for _ in range(8):
            before = self.word(slot)
            room, generation, peer, peer_count, lane_code = self._board.details(slot)
            bytes_done = self._board.bytes_done(slot)
            if before >> 8 != sequence or not before & STATE_BITS:
                return None
            after = self.word(slot)
            if after >> 8 == sequence and after & STATE_BITS:
                return Entry(room, generation, lane_code, peer, peer_count, bytes_done)
        return None

"""The workers beside an agent: one `WorkerPort` a connection, holding its memory and its board."""

from __future__ import annotations

import os
import time

from pdxfer import limits
from pdxfer.errors import ConfigError, LocalProtocolError
from pdxfer.fabric.lanes import board_code
from pdxfer.layout import KVLayout
from pdxfer.local.board import BoardWriter
from pdxfer.local.messages import (
    AttachWorker,
    OpenReceive,
    OpenSend,
    Outcome,
    Refused,
    TransferMessage,
    WorkerStatus,
)
from pdxfer.local.server import Connection
from pdxfer.memory import MemoryRange, SharedMemory, map_sealed
from pdxfer.protocol.effects import Show, ShowReturned
from pdxfer.protocol.state import FINAL, State
from pdxfer.protocol.workers import Worker, rank_of
from pdxfer.wire.messages import RegionInfo

_TOLD = FINAL | {State.READY, State.SENT}
"""States that come with an `Outcome` also where nothing failed."""
_MATCHED = frozenset({State.READY, State.MOVING, State.SENT, State.COMMITTED})
_BOARD_DETAILS = frozenset({State.READY, State.FENCING, State.QUARANTINED})
"""States at which the board says who may write: what a worker needs when its daemon has died."""


class WorkerPort:
    """One worker: its connection, its board, and after `attach` its memory.

    Memory outlives the connection: the agent calls `release_memory` once nothing can reach it.
    """

    def __init__(self, connection: Connection, incarnation: bytes) -> None:
        self.connection = connection
        self.board = BoardWriter(limits.TRANSFERS_PER_WORKER_MAX, incarnation)
        self.worker: Worker | None = None
        self.ranges: tuple[MemoryRange, ...] = ()
        self.slots: dict[int, int] = {}
        """Board slot in use to its sequence, until the worker releases it."""
        self.told: dict[int, int] = {}
        """The last use of each slot whose writers the worker was told of, by its sequence
        number."""
        self.writers: set[bytes] = set()
        """Prefill lives whose process the worker has a descriptor of."""
        self._opening: OpenSend | OpenReceive | None = None
        """The last opening that took its slot."""
        self._refused: set[int] = set()
        """Slots whose opening was refused: the board shows FAILED until they are released."""
        self._times: dict[int, list[float]] = {}
        """Slot in use to the times of its transfer."""
        self._mapped: dict[int, SharedMemory] = {}
        self._closed = False

    @property
    def attached(self) -> Worker:
        """The worker.

        Raises:
            ConfigError: nothing has been attached yet.
        """
        if self.worker is None:
            raise ConfigError("attach a layout and memory before the first transfer")
        return self.worker

    def status(self) -> WorkerStatus:
        """What `pdxfer status` shows of this worker."""
        worker = self.attached
        return WorkerStatus(
            worker_id=worker.worker_id,
            pid=self.connection.pid,
            instance=worker.instance,
            rank=worker.rank.index,
            length_bytes=sum(part.length_bytes for part in self.ranges),
            transfers=len(self.slots),
        )

    def attach(self, worker_id: int, message: AttachWorker, fds: list[int]) -> Worker:
        """Map what the worker hands over and check that its layout fits in.

        Raises:
            PdxferError: the layout or a range is refused; nothing stays mapped.
        """
        layout = KVLayout.from_wire(message.layout)
        try:
            _check_regions(message, layout)
            ends = _used_ends(message, layout)
            self.ranges = tuple(
                self._range(message, index, region.length_bytes, fds, ends)
                for index, region in enumerate(layout.regions)
            )
            self.worker = Worker(
                worker_id=worker_id,
                instance=message.instance,
                rank=rank_of(message.rank),
                layout=layout,
                relayout=message.relayout or layout.relayout,
                ignore_parts=tuple(message.ignore_parts),
                regions=tuple(
                    RegionInfo(address=part.address, length_bytes=part.length_bytes)
                    for part in self.ranges
                ),
            )
        except BaseException:
            self.release_memory()
            raise
        return self.worker

    def _range(
        self,
        message: AttachWorker,
        index: int,
        length_bytes: int,
        fds: list[int],
        ends: dict[int, int],
    ) -> MemoryRange:
        """What the layout uses of one part: no more of it is mapped, registered or written."""
        part = message.memory[index]
        if part.kind == "address":
            if self.connection.pid != os.getpid():
                raise ConfigError(
                    f"memory[{index}] is an address of process {self.connection.pid}; a daemon "
                    "maps only sealed memfds: allocate the pool with pdxfer.memory.allocate, or "
                    "run the agent inside the worker (pdxfer.embedded)",
                    fields={"memory": "address"},
                )
            return MemoryRange(part.address, length_bytes, None)
        if part.kind != "memfd" or not 0 <= part.fd_index < len(fds):
            raise ConfigError(
                f"memory[{index}]: kind {part.kind!r} with descriptor {part.fd_index} of "
                f"{len(fds)}; expected 'memfd' and one of the descriptors sent",
                fields={"memory": part.kind},
            )
        mapped = self._mapped.get(part.fd_index)
        if mapped is None:
            fd, end = fds[part.fd_index], ends[part.fd_index]
            mapped = self._mapped[part.fd_index] = map_sealed(fd, end)
        return mapped.range(part.offset_bytes, length_bytes)

    def open_slot(self, message: OpenSend | OpenReceive) -> None:
        """Take the board slot that the worker has chosen for a new transfer.

        Raises:
            LocalProtocolError: it is no free slot, or not its next use.
            ConfigError: the room is none; the slot is taken, to show that.
        """
        self.take_slot(message.transfer, message.sequence, message.room)
        self._opening = message
        if not 1 <= message.room < 1 << 64:
            raise ConfigError(f"room={message.room} is not within 1 and 2**64 - 1")

    def take_slot(self, slot: int, sequence: int, room: int) -> None:
        """Take a board slot that the worker has chosen.

        Raises:
            LocalProtocolError: it is no free slot, or not its next use.
        """
        self.board.take(slot, sequence, room)
        self.slots[slot] = sequence

    def refuse(self, message: OpenSend | OpenReceive) -> None:
        """An opening was refused, and the worker has been told why: show it.

        Nothing that the machine shows of that slot afterwards reaches the worker.
        """
        if self._opening is message:  # else the slot is another transfer's
            self._refused.add(message.transfer)
            self.board.publish(message.transfer, State.FAILED)

    def is_use(self, message: TransferMessage) -> bool:
        """Whether the slot is in the use that the message speaks of."""
        return self.slots.get(message.transfer) == message.sequence

    def check_use(self, message: TransferMessage) -> None:
        """Refuse what is said of a slot's earlier use, or of a slot that is free.

        Raises:
            LocalProtocolError: the slot is not in that use.
        """
        if not self.is_use(message):
            raise LocalProtocolError(
                f"{type(message).__name__} for transfer={message.transfer} "
                f"sequence={message.sequence}: this slot is "
                f"{self._use_of(message.transfer)}; the transfer has been released"
            )

    def _use_of(self, slot: int) -> str:
        return f"in use {self.slots[slot]}" if slot in self.slots else "free"

    def release_slot(self, message: TransferMessage) -> None:
        """The worker has seen the final state."""
        self.check_use(message)
        del self.slots[message.transfer]
        self._refused.discard(message.transfer)
        self._times.pop(message.transfer, None)
        self.board.release(message.transfer, message.sequence)

    def show(self, effect: Show) -> None:
        """Tell the worker: the outcome first, then the board's word."""
        sequence = self.slots.get(effect.slot)
        if sequence is None or self._closed or effect.slot in self._refused:
            return
        times = self._note_time(effect.slot, effect.state)
        error = None
        if effect.error is not None:
            told = effect.error.to_wire()
            fields = {
                **told["fields"],
                "fence": effect.fence or told["fields"].get("fence", "drained"),
            }
            error = Refused(
                code=told["code"], text=told["text"], retryable=told["retryable"], fields=fields
            )
        interesting = error or effect.state in _TOLD
        if interesting:
            self.connection.send(
                Outcome(
                    transfer=effect.slot,
                    sequence=sequence,
                    state=int(effect.state),
                    prefix_tokens=effect.prefix_tokens,
                    error=error,
                    length_bytes=effect.length_bytes,
                    runs=effect.runs,
                    aux=effect.aux,
                    lane=effect.lane,
                    times=times,
                )
            )
        if self.told.get(effect.slot) == sequence:
            self.board.set_details(effect.slot, bytes_done=effect.length_bytes)
        elif effect.peers and effect.state in _BOARD_DETAILS:
            self.board.set_details(
                effect.slot,
                generation=effect.generation,
                lane_code=board_code(effect.lane.partition(",")[0]),
                peer_incarnation=effect.peers[0],
                peer_count=len(effect.peers),
                bytes_done=effect.length_bytes,
            )
        self.board.publish(effect.slot, effect.state)

    def _note_time(self, slot: int, state: State) -> tuple[float, ...]:
        """When a transfer was matched, its first and last byte moved, it committed; 0: unknown."""
        times = self._times.setdefault(slot, [0.0] * 4)
        now = time.monotonic()
        if state in _MATCHED and not times[0]:
            times[0] = now
        if state is State.MOVING and not times[1]:
            times[1] = now
        if state in (State.SENT, State.COMMITTED) and not times[2]:
            times[2] = now
        if state is State.COMMITTED:
            times[3] = now
        return tuple(times)

    def show_returned(self, effect: ShowReturned) -> None:
        """Tell the worker of source pages that are its own again; by the board alone."""
        if effect.slot in self.slots and not self._closed and effect.slot not in self._refused:
            self.board.set_returned(effect.slot, effect.tokens, effect.chunks, wake=effect.wake)

    def close(self) -> None:
        """The connection is gone; memory stays until `release_memory`."""
        if not self._closed:
            self._closed = True
            self.board.close()

    def release_memory(self) -> None:
        """Unmap. Only with proof that no write can reach it."""
        self.ranges = ()
        mapped, self._mapped = self._mapped, {}
        for memory in mapped.values():
            memory.close()


def _check_regions(message: AttachWorker, layout: KVLayout) -> None:
    """Raises: ConfigError where the memory is not what the layout lies in."""
    if len(message.memory) != len(layout.regions):
        raise ConfigError(
            f"the layout has {len(layout.regions)} region(s), the memory {len(message.memory)}",
            fields={"regions": str(len(layout.regions)), "memory": str(len(message.memory))},
        )
    for index, (part, region) in enumerate(zip(message.memory, layout.regions, strict=True)):
        if part.length_bytes < region.length_bytes or part.offset_bytes < 0:
            raise ConfigError(
                f"region {index}: the layout needs {region.length_bytes} bytes, its memory has "
                f"{part.length_bytes} from offset {part.offset_bytes} on",
                fields={"region": str(index)},
            )


def _used_ends(message: AttachWorker, layout: KVLayout) -> dict[int, int]:
    """For each descriptor, where the last byte ends that the layout uses of it."""
    ends: dict[int, int] = {}
    for part, region in zip(message.memory, layout.regions, strict=True):
        end = part.offset_bytes + region.length_bytes
        ends[part.fd_index] = max(end, ends.get(part.fd_index, 0))
    return ends

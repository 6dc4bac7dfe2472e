"""The lane work of a prefill agent: paths, posts, commits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from pdxfer import limits
from pdxfer.agent.lane_work import LaneWork
from pdxfer.agent.lanes import Lanes
from pdxfer.errors import LocalProtocolError, PdxferError, PeerError, TransferError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    CommitSent,
    Fabric,
    FabricEvent,
    Listener,
    Path,
    PathClosed,
    PathOpened,
    RemoteRegion,
    Write,
)
from pdxfer.layout import PlannedChunk
from pdxfer.memory import MemoryRange, unreadable_at
from pdxfer.protocol.effects import (
    Announce,
    Cancel,
    ClosePath,
    Effect,
    ForgetLeg,
    OpenPath,
    Post,
    PostCommit,
)
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.wire.codec import encode_commit
from pdxfer.wire.messages import Message

_LOG = logging.getLogger("pdxfer.agent")

LegKey = tuple[bytes, int, int]
"""(peer, generation, source worker): what one source worker owes one transfer."""


@dataclass(slots=True, eq=False)
class _Posting:
    """A chunk on its way to the lane, interval by interval."""

    key: LegKey
    destination_worker: int
    number: int
    rest: Iterator[PlannedChunk]
    ahead: PlannedChunk | None
    """The next interval; None: all have been posted."""
    tickets_out: int = 0

    @property
    def ended(self) -> bool:
        return self.ahead is None and not self.tickets_out


@dataclass(slots=True, eq=False)
class _Queue:
    """What one leg still has to hand to its lane, in order."""

    works: deque[_Posting | PostCommit] = field(default_factory=deque)
    intervals_out: int = 0
    """How many intervals are posted and have not ended."""
    runs: int = 0
    """How many runs were posted so far; the commit states them."""
    in_turn: bool = False
    closed: bool = False
    """A post was refused or failed, or the leg is cancelled: nothing more of it leaves."""

    def close(self) -> None:
        """Let nothing more of this leg leave; its commit least of all."""
        self.closed = True
        self.works.clear()


@dataclass(frozen=True, slots=True)
class _PathEnd:
    """The sending end of a path, and the lane it is of."""

    path: Path
    lane: str


class Sender(LaneWork):
    """Carries out the effects of one prefill machine on its lanes. Loop thread only.

    Args:
        machine: what asks and is told.
        lanes, memory, tell, lost: see `LaneWork`.
        near: whether a peer has proven to be on this host.
    """

    def __init__(
        self,
        machine: PrefillMachine,
        lanes: Lanes,
        *,
        memory: Callable[[int], tuple[MemoryRange, ...]],
        tell: Callable[[bytes, Message], None],
        lost: Callable[[bytes, PdxferError], None],
        near: Callable[[bytes], bool],
    ) -> None:
        super().__init__(lanes, memory=memory, tell=tell, lost=lost)
        self._machine = machine
        self._near = near
        self._paths: dict[bytes, _PathEnd] = {}
        self._queues: dict[LegKey, _Queue] = {}
        self._turns: deque[LegKey] = deque()
        """Legs that have an interval to post, each once; the first is next."""
        self._tickets: dict[tuple[bytes, int], tuple[_Posting, bool]] = {}
        """(peer, ticket) to its posting, and whether it is the last of an interval."""
        self._commits: dict[tuple[bytes, int], LegKey] = {}
        """(peer, ticket) of commits."""

    # -- effects -----------------------------------------------------------------------------
    def do(self, effect: Effect) -> None:
        """Carry out one effect; see `LaneWork`."""
        match effect:
            case Announce():
                self._announce(effect.peer)
            case OpenPath():
                self._open_path(effect)
            case ClosePath():
                self._close_path(effect.peer)
            case Post():
                self._post(effect)
            case PostCommit():
                key = (effect.peer, effect.generation, effect.payload.source_worker)
                self._append(key, effect)
            case Cancel():
                self._cancel(effect)
            case ForgetLeg():
                self._queues.pop((effect.peer, effect.generation, effect.source_worker), None)
            case _:
                raise LocalProtocolError(f"a prefill agent cannot do {type(effect).__name__}")

    @property
    def has_turns(self) -> bool:
        """Whether intervals wait for `take_turn`."""
        return bool(self._turns)

    def take_turn(self) -> None:
        """Post one interval of the leg whose turn it is; legs of all peers take turns."""
        if self._turns:
            key = self._turns.popleft()
            queue = self._queues.get(key)
            if queue is not None:
                queue.in_turn = False
                self._advance(key)

    # -- paths -------------------------------------------------------------------------------
    def _announce(self, peer_id: bytes) -> None:
        peer = self._machine.peers.get(peer_id)
        if peer is None:
            return
        try:
            address = self._lanes.fabric(peer.path_lane).send_address()
        except PdxferError as error:
            self._lose(peer_id, error)
            return
        self._tell(peer_id, msgspec.structs.replace(peer.accept_template(), lane_address=address))

    def _open_path(self, effect: OpenPath) -> None:
        peer = effect.peer
        try:
            fabric = self._lanes.fabric(effect.lane)
            if fabric.capabilities.needs_pidfd and not self._near(peer):
                raise PeerError(
                    f"lane {effect.lane} writes into processes of this host, and decode agent "
                    f"{peer.hex()[:12]} has not proven to be one"
                )
            path = fabric.connect(peer, effect.address, limits.PATH_OPEN_TIMEOUT_S)
        except PdxferError as error:
            text = str(error)
            self._later(lambda _: self._machine.on_path_opened(peer, text))
            return
        self._paths[peer] = _PathEnd(path, effect.lane)
        if fabric.capabilities.listener is Listener.SENDER:
            self._later(lambda _: self._machine.on_path_awaited(peer))

    def _close_path(self, peer: bytes) -> None:
        end = self._paths.get(peer)
        if end is None:
            self._later(lambda _: self._machine.on_path_closed(peer, "", drained=True))
        else:
            end.path.close()

    # -- posts -------------------------------------------------------------------------------
    def _append(self, key: LegKey, work: _Posting | PostCommit) -> None:
        queue = self._queues.setdefault(key, _Queue())
        if not queue.closed:
            queue.works.append(work)
            self._advance(key)

    def _post(self, effect: Post) -> None:
        key = (effect.peer, effect.generation, effect.source_worker)
        rest = effect.chunk.intervals(limits.INTERVAL_RUNS)
        posting = _Posting(key, effect.destination_worker, effect.number, rest, next(rest, None))
        self._append(key, posting)

    def _advance(self, key: LegKey) -> None:
        """Hand over what can go now: one interval of a large chunk, and commits behind chunks."""
        queue = self._queues[key]
        posted = False
        while queue.works and not queue.in_turn:
            work = queue.works[0]
            if isinstance(work, PostCommit):
                queue.works.popleft()
                self._commit(key, work, queue.runs)
                continue
            if posted or queue.intervals_out >= limits.INTERVALS_IN_FLIGHT:
                break
            posted = True
            if not self._post_interval(queue, work):
                return
            if work.ahead is None:
                queue.works.popleft()
                posted = False
        if queue.works and not queue.in_turn and queue.intervals_out < limits.INTERVALS_IN_FLIGHT:
            queue.in_turn = True
            self._turns.append(key)

    def _post_interval(self, queue: _Queue, posting: _Posting) -> bool:
        """Whether the next interval was posted; if not, the leg has failed, its queue is gone."""
        peer, generation, worker = posting.key
        chunk = posting.ahead
        assert chunk is not None, "a posting without intervals left the queue"
        try:
            end = self._paths.get(peer)
            if end is None:
                raise LocalProtocolError("the path is gone")  # noqa: TRY301
            write = Write(
                generation=generation,
                source_worker=worker,
                number=posting.number,
                chunk=chunk,
                source=self._lanes.regions(end.lane, worker, self._memory(worker)),
                destination=self._remote(peer, posting.destination_worker, end.lane),
            )
            tickets = end.path.post(write)
            posting.ahead = next(posting.rest, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, no commit may follow
            self._refused(posting.key, error)
            return False
        last = len(tickets.numbers) - 1
        for index, ticket in enumerate(tickets.numbers):
            self._tickets[peer, ticket] = (posting, index == last)
        posting.tickets_out += len(tickets.numbers)
        queue.intervals_out += 1
        queue.runs += tickets.runs
        if tickets.length_bytes != chunk.length_bytes:
            text = f"posted {tickets.length_bytes} bytes where {chunk.length_bytes} are planned"
            self._refused(posting.key, LocalProtocolError(text))
            return False
        return True

    def _remote(self, peer: bytes, worker: int, lane: str) -> list[RemoteRegion]:
        infos = self._machine.peers[peer].workers[worker].regions
        return [
            RemoteRegion(info.address, info.length_bytes, info.rkeys.get(lane, b""))
            for info in infos
        ]

    def _refused(self, key: LegKey, error: Exception) -> None:
        """A post could not be handed over: nothing more of its leg leaves."""
        self._queues[key].close()
        _LOG.warning("post_failed", extra={"fields": {"reason": repr(error)}})
        told = error if isinstance(error, PdxferError) else LocalProtocolError(repr(error))
        self._later(lambda _: self._machine.on_post_failed(*key, error=told))

    def _commit(self, key: LegKey, effect: PostCommit, runs: int) -> None:
        peer, generation, worker = key
        if not self._machine.commits(peer, generation, worker):
            return  # a write before it could not be posted: the transfer has failed
        payload = encode_commit(msgspec.structs.replace(effect.payload, runs=runs))
        try:
            ticket = self._paths[peer].path.commit(generation, payload)
        except (PdxferError, KeyError) as error:
            text = str(error) if isinstance(error, PdxferError) else "the path is gone"
            self._later(lambda _: self._commit_ended(key, text))
        else:
            self._commits[peer, ticket] = key

    def _cancel(self, effect: Cancel) -> None:
        for key, queue in self._queues.items():
            if key[:2] == (effect.peer, effect.generation):
                queue.close()
        end = self._paths.get(effect.peer)
        if end is None:
            return
        try:
            end.path.cancel(effect.generation)
        except LocalProtocolError:
            # A path that is closed already answers with its PathClosed, which alone knows whether
            # bytes that had left may still land: never with a Cancelled made up here.
            _LOG.debug("cancel_of_closed_path", extra={"fields": {"peer": effect.peer.hex()[:12]}})

    # -- events ------------------------------------------------------------------------------
    def on_event(self, fabric: Fabric, event: FabricEvent, now: float) -> None:
        """Something happened on a lane; see `LaneWork`."""
        machine = self._machine
        match event:
            case PathOpened():
                self._on_path_opened(event)
            case BatchEnded():
                self._on_batch_ended(event)
            case CommitSent():
                key = self._commits.pop((event.peer, event.ticket), None)
                if key is not None:
                    self._commit_ended(key, event.error)
            case Cancelled():
                machine.on_cancelled(event.peer, event.generation)
            case PathClosed():
                self._on_path_closed(event)
            case _:
                fields = {"event": type(event).__name__, "lane": fabric.lane}
                _LOG.warning("unexpected_event", extra={"fields": fields})

    def _on_batch_ended(self, event: BatchEnded) -> None:
        found = self._tickets.pop((event.peer, event.ticket), None)
        if found is None:
            return
        posting, last = found
        posting.tickets_out -= 1
        queue = self._queues.get(posting.key)
        if queue is not None and last:
            queue.intervals_out -= 1
        if event.error:
            posting.ahead = None  # what is not posted yet never is
            if queue is not None:
                queue.close()
            self._check_readable(posting.key)
        self._machine.on_batch(
            *posting.key,
            posting.number,
            length_bytes=event.length_bytes,
            runs=event.runs if not event.error else 0,
            error=event.error,
            ended=posting.ended,
        )
        if posting.key in self._queues:
            self._advance(posting.key)

    def _on_path_closed(self, event: PathClosed) -> None:
        self._paths.pop(event.peer, None)
        for key, queue in list(self._queues.items()):
            if key[0] == event.peer:
                queue.close()
                if event.error:
                    self._check_readable(key)
        self._machine.on_path_closed(event.peer, event.error, drained=event.drained)

    def _commit_ended(self, key: LegKey, error: str) -> None:
        if error:
            self._check_readable(key)  # a write before it may have ended the path
        self._machine.on_commit_sent(*key, error=error)

    def _check_readable(self, key: LegKey) -> None:
        """A write has failed: say so where it is our own worker's memory that cannot be read.

        A lane then knows no more than that its peer did not get the bytes.
        """
        for region, part in enumerate(self._memory(key[2])):
            at = unreadable_at(part.address, part.length_bytes)
            if at is not None:
                text = (
                    f"the source memory cannot be read at {at:#x}, byte {at - part.address} of "
                    f"region {region}: keep the cache mapped and readable while a transfer reads it"
                )
                error = TransferError(
                    text, fields={"region": str(region), "memory_address": hex(at)}
                )
                self._machine.on_post_failed(*key, error=error)
                return

    def _on_path_opened(self, event: PathOpened) -> None:
        end = self._paths.get(event.peer)
        fields = {
            "peer": event.peer.hex()[:12],
            "lane": end.lane if end else "",
            "transports": event.transports,
            "error": event.error,
        }
        _LOG.info("path_opened", extra={"fields": fields})
        if event.error:
            self._paths.pop(event.peer, None)
            if end is not None:
                end.path.close()
        self._machine.on_path_opened(event.peer, event.error)

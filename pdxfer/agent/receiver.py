"""The lane work of a decode agent: receive sides, generations, commits. Without a loop.

A receive side is the receiving end of a path: one for each prefill life that has a session, over
the first lane that both sides can use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pdxfer.agent.lane_work import LaneWork
from pdxfer.agent.lanes import Lanes
from pdxfer.errors import LocalProtocolError, PdxferError, PeerError
from pdxfer.fabric.base import (
    CommitArrived,
    Destination,
    Fabric,
    FabricEvent,
    GenerationClosed,
    PlacingFailed,
    Scope,
    SenderLost,
)
from pdxfer.fabric.lanes import LANES, Reach
from pdxfer.memory import MemoryRange
from pdxfer.protocol.decode.machine import DecodeMachine
from pdxfer.protocol.effects import (
    Announce,
    CloseGeneration,
    Effect,
    OpenGeneration,
    WatchSender,
)
from pdxfer.protocol.workers import Worker
from pdxfer.wire.codec import decode_commit
from pdxfer.wire.messages import Attach, Hello, LaneFailed, Message, WorkerInfo

_LOG = logging.getLogger("pdxfer.agent")


@dataclass(slots=True)
class ReceiveSide:
    """The receiving end of the path of one prefill life."""

    candidates: list[str]
    """Names of the lanes left to try, best first."""
    works: bool = False
    """Prefill has opened its path over the first candidate since that was last attached."""
    lane: str = ""
    """Name of the lane that the receive side is of; empty: there is no receive side."""
    address: bytes = b""
    since: int = 0
    """Revision of the first `Attach` that named it."""
    generations: dict[tuple[int, int], OpenGeneration] = field(default_factory=dict)
    """(generation, source worker) whose bytes may be placed; a new receive side is told them."""


def silence_of(fabric: Fabric) -> str:
    """What the end of a receive side proves on this lane; empty: nothing."""
    return "" if fabric.capabilities.revoke_scope is Scope.NOTHING else "revoked"


class Receiver(LaneWork):
    """Carries out the effects of one decode machine on its lanes. Loop thread only.

    Args:
        machine: what asks and is told.
        lanes, memory, tell, lost: see `LaneWork`.
    """

    def __init__(
        self,
        machine: DecodeMachine,
        lanes: Lanes,
        *,
        memory: Callable[[int], tuple[MemoryRange, ...]],
        tell: Callable[[bytes, Message], None],
        lost: Callable[[bytes, PdxferError], None],
    ) -> None:
        super().__init__(lanes, memory=memory, tell=tell, lost=lost)
        self._machine = machine
        self._sides: dict[bytes, ReceiveSide] = {}

    # -- sessions ----------------------------------------------------------------------------
    def joined(self, peer: bytes, hello: Hello, ucx_version: str, apart: str) -> list[str]:
        """A session begins; the lanes that both sides can use.

        Args:
            peer: the life it is with.
            hello: what that says of itself.
            ucx_version: of the library here.
            apart: why that life is not proven to be on this host; empty: it is.

        Raises:
            PeerError: there is none.
        """
        usable = [lane for lane in self._lanes.names if _usable(lane, hello, ucx_version, apart)]
        self._sides[peer] = ReceiveSide(usable)
        if not usable:
            raise _none_in_common(self._lanes.names, hello, ucx_version, apart)
        return usable

    def serves(self, peer: bytes) -> bool:
        """Whether there is a receive side over which the peer has opened its path."""
        side = self._sides.get(peer)
        return side is not None and bool(side.lane) and side.works

    def reach(self, peer: bytes) -> list[str]:
        """The lanes that a life may come to use in this session, the present one first."""
        side = self._sides.get(peer)
        return [] if side is None else side.candidates

    def left(self, peer: bytes) -> None:
        """A session is over, and its receive side with it; another session makes another."""
        self._close_side(peer)
        self._sides.pop(peer, None)

    def accepted(self, peer: bytes) -> None:
        """Prefill has answered `Attach`: the lane works."""
        if peer in self._sides:
            self._sides[peer].works = True

    def lane_failed(self, peer: bytes, message: LaneFailed) -> None:
        """Attach anew: over the same lane where it has worked before, else over the next one.

        What an earlier receive side suffered says nothing of the one that is there now.
        """
        side = self._sides.get(peer)
        if side is None or not side.candidates or message.revision < side.since:
            return
        fields = {"peer": peer.hex()[:12], "lane": message.lane, "reason": message.text}
        _LOG.warning("lane_failed", extra={"fields": fields})
        self._close_side(peer)
        lane = side.candidates[0]
        if not side.works:
            side.candidates.pop(0)
        side.works = False
        if side.candidates:
            self._machine.announce_to(peer)
        else:
            self._lost(peer, none_left(lane, message.text))

    def _close_side(self, peer: bytes) -> None:
        side = self._sides.get(peer)
        if side is None or not side.lane:
            return
        fabric = self._lanes.fabric(side.lane)
        fabric.close_receiver(peer)
        side.lane = ""
        self._machine.receiver_closed(peer, silence_of(fabric))

    # -- effects -----------------------------------------------------------------------------
    def do(self, effect: Effect) -> None:
        """Carry out one effect; see `LaneWork`."""
        match effect:
            case Announce():
                self._announce(effect.peer)
            case WatchSender():
                self._watch_sender(effect)
            case OpenGeneration():
                self._open_generation(effect)
            case CloseGeneration():
                self._close_generation(effect)
            case _:
                raise LocalProtocolError(f"a decode agent cannot do {type(effect).__name__}")

    def _announce(self, peer_id: bytes) -> None:
        """Tell a prefill life our workers, and where its receive side is."""
        peer, revision = self._machine.peers.get(peer_id), self._machine.next_revision()
        if peer is None:
            return
        try:
            side = self._open_side(peer_id, revision)
        except PeerError as error:
            self._lose(peer_id, error)
            return
        if side is None:
            return
        siblings = [
            msgspec.structs.replace(worker.info(), regions=[])
            for worker in self._machine.sources.siblings(peer_id)
        ]
        self._tell(
            peer_id,
            Attach(
                revision=revision,
                workers=self._infos(side.lane),
                siblings=siblings,
                lane=side.lane,
                lane_address=side.address,
            ),
        )

    def _open_side(self, peer: bytes, revision: int) -> ReceiveSide | None:
        """The receive side to name in an `Attach`, made if there is none; None without a session.

        Raises:
            PeerError: no lane is left, with what the last one suffered.
        """
        side = self._sides.get(peer)
        if side is None or not side.candidates:
            return None
        while side.lane != side.candidates[0]:
            lane = side.candidates[0]
            try:
                fabric = self._lanes.fabric(lane)
                side.address = fabric.open_receiver(peer)
                side.lane, side.since = lane, revision
                for effect in side.generations.values():
                    self._place_on(fabric, effect)
            except PdxferError as error:
                side.candidates.pop(0)
                if not side.candidates:
                    raise none_left(lane, str(error)) from error
        return side

    def _infos(self, lane: str) -> list[WorkerInfo]:
        """The workers whose memory the lane can have; the others alone are refused."""
        infos = []
        for worker in list(self._machine.workers.values()):
            try:
                infos.append(self._info(lane, worker))
            except PdxferError as error:
                self._bar(worker.worker_id, error)
            else:
                self._machine.unbar(worker.worker_id)
        return infos

    def _bar(self, worker_id: int, error: PdxferError) -> None:
        self._later(lambda now: self._machine.bar(worker_id, error, now))

    def _info(self, lane: str, worker: Worker) -> WorkerInfo:
        regions = self._lanes.regions(lane, worker.worker_id, self._memory(worker.worker_id))
        infos = [
            msgspec.structs.replace(info, rkeys={lane: region.rkey})
            for info, region in zip(worker.regions, regions, strict=True)
        ]
        return msgspec.structs.replace(worker.info(), regions=infos)

    def _watch_sender(self, effect: WatchSender) -> None:
        peer = effect.peer
        try:
            self._lanes.fabric(effect.lane).watch_sender(peer, effect.address)
        except PdxferError as error:
            text = str(error)
            self._later(lambda now: self._machine.sender_unwatched(peer, text, now))

    def _open_generation(self, effect: OpenGeneration) -> None:
        side = self._sides.get(effect.peer)
        if side is None:
            return
        side.generations[effect.generation, effect.source_worker] = effect
        if side.lane:
            self._place_on(self._lanes.fabric(side.lane), effect)

    def _place_on(self, fabric: Fabric, effect: OpenGeneration) -> None:
        if not fabric.capabilities.places_at_receiver:
            return
        memory = self._memory(effect.destination_worker)
        destination = Destination(
            source_worker=effect.source_worker,
            plan=effect.plan,
            pages=effect.pages,
            regions=self._lanes.regions(fabric.lane, effect.destination_worker, memory),
        )
        fabric.open_generation(effect.peer, effect.generation, destination)

    def _close_generation(self, effect: CloseGeneration) -> None:
        side = self._sides.get(effect.peer)
        if side is None:
            return
        for key in [key for key in side.generations if key[0] == effect.generation]:
            del side.generations[key]
        if side.lane:
            self._lanes.fabric(side.lane).close_generation(effect.peer, effect.generation)

    # -- events ------------------------------------------------------------------------------
    def on_event(self, fabric: Fabric, event: FabricEvent, now: float) -> None:
        """Something happened on a lane; see `LaneWork`."""
        match event:
            case CommitArrived():
                try:
                    payload = decode_commit(event.payload)
                except PdxferError as error:
                    self._lost(event.peer, error)
                    return
                self._machine.on_commit(event.peer, payload, now)
            case SenderLost():
                proof = silence_of(fabric)
                fields = {"peer": event.peer.hex()[:12], "error": event.error, "proof": proof}
                _LOG.info("sender_lost", extra={"fields": fields})
                if event.peer in self._sides:
                    self._sides[event.peer].lane = ""
                self._machine.sender_lost(event.peer, event.error, proof, now)
            case GenerationClosed():
                self._machine.on_generation_closed(event.peer, event.generation)
            case PlacingFailed():
                self._machine.on_placing_failed(event.peer, event.generation, event.error, now)
            case _:
                fields = {"event": type(event).__name__, "lane": fabric.lane}
                _LOG.warning("unexpected_event", extra={"fields": fields})


def none_left(lane: str, text: str) -> PeerError:
    """Every lane has failed; another session tries all of them again."""
    return PeerError(
        f"no lane left to the prefill agent: {lane}: {text}", retryable=True, fields={"lane": lane}
    )


def _usable(lane: str, hello: Hello, ucx_version: str, apart: str) -> bool:
    """Whether both sides can use a lane: both offer it, within its reach, of one library."""
    if lane not in hello.lanes:
        return False
    row = LANES.get(lane)
    if row is None:
        return True
    if row.reach is Reach.HOST and apart:
        return False
    ours, theirs = ucx_version, hello.ucx_version
    agree = not (ours and theirs) or ours.split(".")[:2] == theirs.split(".")[:2]
    return row.library != "ucx" or agree


def _none_in_common(
    names: tuple[str, ...], hello: Hello, ucx_version: str, apart: str
) -> PeerError:
    ours = f"{','.join(names)} (UCX {ucx_version or 'none'})"
    theirs = f"{','.join(hello.lanes)} (UCX {hello.ucx_version or 'none'})"
    near = [name for name in names if name in LANES and LANES[name].reach is Reach.HOST]
    ucx = [name for name in names if name in LANES and LANES[name].library == "ucx"]
    hints = (
        [
            f"{'/'.join(near)} needs one host, user and pid namespace and a way from decode to the "
            f"folder of prefill's socket{apart and f' ({apart})'}"
        ]
        if near
        else []
    )
    hints += [f"{'/'.join(ucx)} need UCX of one major.minor version"] if ucx else []
    return PeerError(
        f"no lane in common: prefill offers {theirs}, decode offers {ours}"
        + (f"; {', '.join(hints)}" if hints else ""),
        fields={"lanes": f"prefill={theirs}, decode={ours}"},
    )

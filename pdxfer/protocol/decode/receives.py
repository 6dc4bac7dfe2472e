"""The live receives of a decode agent: how each commits, fails and is fenced. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdxfer import limits
from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    ResourceError,
)
from pdxfer.protocol.decode.held import HeldPages
from pdxfer.protocol.decode.index import Index
from pdxfer.protocol.decode.live_receive import LiveReceive
from pdxfer.protocol.decode.proofs import Proof, Side
from pdxfer.protocol.decode.sources import PrefillPeer
from pdxfer.protocol.effects import CloseGeneration, Effect, Free, Show, Tell
from pdxfer.protocol.given_bytes import GivenBytes
from pdxfer.protocol.state import FINAL, State
from pdxfer.protocol.tables import ReceivingEvent
from pdxfer.wire.messages import (
    Abort,
    Committed,
    Progress,
)

ENDING = frozenset({State.FENCING, State.QUARANTINED})


class Receives:
    """The receives of one agent. State changes through the table only; no clock frees a page."""

    def __init__(self, peers: dict[bytes, PrefillPeer]) -> None:
        self.peers = peers
        self.index = Index()
        self.live = self.index.live
        """Generation to receive, from `receive` until it is final."""
        self.given = GivenBytes()
        self.held: dict[int, HeldPages] = {}
        """Worker to its pages that a live generation may write."""
        self._stuck: dict[int, dict[str, int]] = {}
        """Worker to the quarantined pages of each group."""
        self._quarantined: set[int] = set()
        """Generations whose pages `_stuck` counts."""
        self.departing: set[int] = set()
        """Workers that went away and whose memory may still be written."""
        self.effects: list[Effect] = []
        """What is to be done, in order."""

    def take_given(self, receiving: LiveReceive, length_bytes: int) -> None:
        """Count what a worker gives with a receive, until that is final.

        Raises:
            ResourceError: over a budget; nothing is counted.
        """
        self.given.take(receiving.worker, receiving.room, length_bytes)
        receiving.given_bytes += length_bytes

    def proceed(self, receiving: LiveReceive) -> None:
        """Commit or bind a receive whose legs allow it."""
        if receiving.error is not None:
            return
        if receiving.committed:
            receiving.advance(ReceivingEvent.COMMITTED)
            self.finish(receiving)  # the worker hears it first: this is the latency that counts
            for peer_id in sorted(receiving.bound):
                self.effects.append(Tell(peer_id, Committed(generation=receiving.generation)))
        elif receiving.state is State.WAITING and receiving.matched:
            receiving.advance(ReceivingEvent.READY)
            self.show(receiving)

    def note_progress(self, peer_id: bytes, progress: Iterable[Progress]) -> None:
        """A prefill life says how far it is with each receive."""
        for each in progress:
            receiving = self.live.get(each.generation)
            if receiving is not None:
                receiving.note_progress(peer_id, each.bytes_done)

    def note_moving(self, receiving: LiveReceive) -> None:
        """Bytes of a receive are on their way, or have come from one of several."""
        if receiving.state in (State.WAITING, State.READY):
            receiving.advance(ReceivingEvent.MOVING)
            self.show(receiving)

    def fail(self, receiving: LiveReceive, error: PdxferError, now: float) -> None:
        """Start the end of a receive: tell every sender to stop; fence what knows its pages.

        The first error stays; a receive that has failed or is final is left as it is.
        """
        if receiving.error is not None or receiving.state in FINAL:
            return
        receiving.error = error
        for peer_id in sorted(receiving.bound):
            if not (self.peers[peer_id].gone if peer_id in self.peers else True):
                self.effects.append(
                    Tell(peer_id, Abort(generation=receiving.generation, reason=str(error)))
                )
        if receiving.state is State.WAITING and not receiving.told:
            receiving.advance(ReceivingEvent.FAILED_UNTOLD)
            self.finish(receiving)
            return
        for peer_id, sides in receiving.told.items():
            if not sides:  # each over which it was told has ended since
                receiving.proofs[peer_id] = "revoked"
        self._close_generation(receiving)
        receiving.advance(ReceivingEvent.FAILED_TOLD)
        receiving.fence_deadline = now + limits.FENCE_DEADLINE_S
        self.show(receiving)
        self.end_fence(receiving)

    def note_bound(self, receiving: LiveReceive, peer_id: bytes) -> None:
        """A prefill life is told that the room is held."""
        receiving.bound.add(peer_id)
        self.index.bind(receiving, peer_id)

    def tell(self, receiving: LiveReceive, peer_id: bytes) -> None:
        """A prefill life is told pages, which it may write over every side it has from now on."""
        peer = self.peers.get(peer_id)
        sides = peer.sides if peer is not None else set()
        receiving.told.setdefault(peer_id, set()).update(sides)

    def open_side(self, side: Side) -> None:
        """What its life was told, and what is not aborted, may be written over this one too."""
        for receiving in self.index.of_peer(side.peer):
            if receiving.error is None and side.peer in receiving.told:
                receiving.told[side.peer].add(side)

    def prove(self, proof: Proof) -> None:
        """Take a proof for every receive that it covers; those whose senders are all silent end.

        A proof of one receive side counts for what is live too: no write comes over it ever again.
        Any other says nothing of a receive that goes on.
        """
        if proof.generation:
            found = self.live.get(proof.generation)
            covered = [found] if found is not None else []
        else:
            covered = self.index.of_peer(proof.peer)
        for receiving in covered:
            sides = receiving.told.get(proof.peer)
            if sides is None:
                continue
            if proof.side is not None:
                sides.discard(proof.side)
            elif receiving.state in ENDING:
                sides.clear()
            if receiving.state in ENDING and not sides:
                receiving.proofs.setdefault(proof.peer, proof.kind)
                self.end_fence(receiving)

    def fail_worker(self, worker_id: int, error: PdxferError, now: float) -> None:
        """Start the end of all receives of a worker."""
        for receiving in self.index.of_worker(worker_id):
            self.fail(receiving, error, now)

    def end_fence(self, receiving: LiveReceive) -> None:
        """End a fenced receive once every sender that knew a page is proven silent."""
        if receiving.state in ENDING and not receiving.unproven:
            receiving.advance(ReceivingEvent.PROVEN)
            self.finish(receiving)

    def finish(self, receiving: LiveReceive) -> None:
        """The receive is final: its pages are the worker's."""
        if receiving.pages is not None and receiving.worker in self.held:
            self.held[receiving.worker].release(receiving.generation, receiving.pages)
        self.show(receiving)
        if receiving.error is None:
            self._close_generation(receiving)
        self.index.remove(receiving)
        self.given.give_back(receiving.worker, receiving.given_bytes)
        self._count_quarantined(receiving, -1)
        self.free_departed(receiving.worker)
        for peer_id in receiving.bound:
            self.forget_gone(peer_id)

    def _close_generation(self, receiving: LiveReceive) -> None:
        """Have every lane place nothing more of a receive."""
        for peer_id in sorted(receiving.told):
            self.effects.append(CloseGeneration(peer_id, receiving.generation))

    def check_room(self, worker_id: int, room: int) -> None:
        """Refuse a room of which the worker has a receive.

        Raises:
            LocalProtocolError: that one is live.
        """
        other = self.index.by_room.get((worker_id, room))
        if other is not None:
            raise LocalProtocolError(
                f"duplicate room {room}: this worker has a live receive of it "
                f"({other.state.name}); end that one first"
            )

    def check_quarantine(self, worker_id: int) -> None:
        """Refuse new receives of a worker whose pool is quarantined too far.

        Raises:
            ResourceError: above `QUARANTINED_SHARE_MAX`.
        """
        for name, count in self._stuck.get(worker_id, {}).items():
            share = self.held[worker_id].share(name, count)
            if share > limits.QUARANTINED_SHARE_MAX:
                raise ResourceError(
                    f"{count} pages of group {name} ({share:.0%}) are quarantined, at most "
                    f"{limits.QUARANTINED_SHARE_MAX:.0%} may be; see `pdxfer status` for the "
                    "senders whose end would free them",
                    retryable=True,
                    fields={"quarantined_pages": str(count)},
                )

    def note_quarantined(self, receiving: LiveReceive) -> None:
        """Count the pages of a receive as out of use until a proof comes."""
        self._quarantined.add(receiving.generation)
        self._count_quarantined(receiving, 1)

    def _count_quarantined(self, receiving: LiveReceive, sign: int) -> None:
        if receiving.generation not in self._quarantined:
            return
        if sign < 0:
            self._quarantined.discard(receiving.generation)
        counts = self._stuck.setdefault(receiving.worker, {})
        for name, listed in (receiving.pages or {}).items():
            counts[name] = counts.get(name, 0) + sign * len(listed.ids)

    def forget_gone(self, peer_id: bytes) -> None:
        """Drop a lost prefill life that no live receive is bound to."""
        peer = self.peers.get(peer_id)
        if peer is not None and peer.gone and not self.index.of_peer(peer_id):
            del self.peers[peer_id]

    def free_departed(self, worker_id: int) -> None:
        """Give up the memory of a departed worker after its last receive."""
        if worker_id in self.departing and not self.index.of_worker(worker_id):
            self.departing.discard(worker_id)
            self.held.pop(worker_id, None)
            self._stuck.pop(worker_id, None)
            self.effects.append(Free(worker_id))

    def show(self, receiving: LiveReceive) -> None:
        """Tell the worker where its receive is."""
        legs = receiving.legs.values()
        self.effects.append(
            Show(
                worker=receiving.worker,
                slot=receiving.slot,
                state=receiving.state,
                error=receiving.error,
                fence=receiving.fence if receiving.error is not None else "",
                length_bytes=sum(d.expected_bytes for d in legs if d.committed),
                runs=sum(leg.runs for leg in legs),
                aux=receiving.aux if receiving.state is State.COMMITTED else b"",
                lane=",".join(sorted(receiving.lanes)),
                generation=receiving.generation,
                peers=tuple(sorted(receiving.bound)),
                detail={"room": receiving.room, "generation": receiving.generation},
            )
        )

"""The live receives of a decode agent: how each commits, fails and is fenced. Pure."""

from __future__ import annotations

from pdxfer import limits
from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    ResourceError,
)
from pdxfer.protocol.decode.held import HeldPages
from pdxfer.protocol.decode.receiving import Receiving
from pdxfer.protocol.decode.sources import PrefillPeer
from pdxfer.protocol.effects import CloseGeneration, Effect, Free, Show, Tell
from pdxfer.protocol.state import FINAL, State
from pdxfer.protocol.tables import ReceivingEvent
from pdxfer.wire.messages import (
    Abort,
    Committed,
)

ENDING = frozenset({State.FENCING, State.QUARANTINED})


class Receives:
    """The receives of one agent. State changes through the table only; no clock frees a page."""

    def __init__(self, peers: dict[bytes, PrefillPeer]) -> None:
        self.peers = peers
        self.live: dict[int, Receiving] = {}
        """Generation to receive, from `receive` until it is final."""
        self.by_slot: dict[tuple[int, int], Receiving] = {}
        """(worker, board slot) to receive."""
        self.held: dict[int, HeldPages] = {}
        """Worker to its pages that a live generation may write."""
        self.departing: set[int] = set()
        """Workers that went away and whose memory may still be written."""
        self.effects: list[Effect] = []
        """What is to be done, in order."""

    def settle(self, receiving: Receiving) -> None:
        """Commit or bind a receive whose debts allow it."""
        if receiving.error is not None:
            return
        if receiving.committed:
            receiving.advance(ReceivingEvent.COMMITTED)
            self.finish(receiving)  # the worker hears it first: this is the latency that counts
            for peer_id in sorted(receiving.bound):
                self.effects.append(Tell(peer_id, Committed(generation=receiving.generation)))
        elif receiving.state is State.WAITING and receiving.matched:
            receiving.advance(ReceivingEvent.BOUND)
            self.show(receiving)

    def note_moving(self, receiving: Receiving) -> None:
        """Bytes of a receive are on their way, or have come from one of several."""
        if receiving.state in (State.WAITING, State.READY):
            receiving.advance(ReceivingEvent.MOVING)
            self.show(receiving)

    def fail(self, receiving: Receiving, error: PdxferError, now: float) -> None:
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
        for peer_id in receiving.told:
            if peer_id in self.peers and self.peers[peer_id].silence:
                receiving.proofs[peer_id] = self.peers[peer_id].silence
        self._close_generation(receiving)
        receiving.advance(ReceivingEvent.FAILED_TOLD)
        receiving.drain_deadline = now + limits.DRAIN_DEADLINE_S
        self.show(receiving)
        self.settle_fence(receiving)

    def prove(self, receiving: Receiving, peer_id: bytes, proof: str) -> None:
        """Note that a prefill life can write no more of a failed receive."""
        if receiving.state in ENDING and peer_id in receiving.told:
            receiving.proofs.setdefault(peer_id, proof)
            self.settle_fence(receiving)

    def prove_all(self, peer_id: bytes, proof: str) -> None:
        """A prefill life can write no more of whatever has failed."""
        for receiving in list(self.live.values()):
            self.prove(receiving, peer_id, proof)

    def fail_worker(self, worker_id: int, error: PdxferError, now: float) -> None:
        """Start the end of all receives of a worker."""
        for receiving in [r for r in self.live.values() if r.worker == worker_id]:
            self.fail(receiving, error, now)

    def settle_fence(self, receiving: Receiving) -> None:
        """End a fenced receive once every sender that knew a page is proven silent."""
        if receiving.state in ENDING and not receiving.unproven:
            receiving.advance(ReceivingEvent.PROVEN)
            self.finish(receiving)

    def finish(self, receiving: Receiving) -> None:
        """The receive is final: its pages are the worker's."""
        if receiving.pages is not None and receiving.worker in self.held:
            self.held[receiving.worker].release(receiving.generation, receiving.pages)
        self.show(receiving)
        if receiving.error is None:
            self._close_generation(receiving)
        self.live.pop(receiving.generation, None)
        self.by_slot.pop((receiving.worker, receiving.slot), None)
        self.free_departed(receiving.worker)
        self.forget_gone()

    def _close_generation(self, receiving: Receiving) -> None:
        """No lane places anything of it any more."""
        for peer_id in sorted(receiving.told):
            self.effects.append(CloseGeneration(peer_id, receiving.generation))

    def check_room(self, worker_id: int, room: int) -> None:
        """Refuse a room of which the worker has a receive.

        Raises:
            LocalProtocolError: that one is live.
        """
        for other in self.live.values():
            if (other.worker, other.room) == (worker_id, room):
                raise LocalProtocolError(
                    f"duplicate room {room}: this worker has a live receive of it "
                    f"({other.state.name}); end that one first"
                )

    def check_quarantine(self, worker_id: int) -> None:
        """Refuse new receives of a worker whose pool is quarantined too far.

        Raises:
            ResourceError: above `QUARANTINED_SHARE_MAX`.
        """
        stuck: dict[str, int] = {}
        for receiving in self.live.values():
            if receiving.worker == worker_id and receiving.state is State.QUARANTINED:
                for name, listed in (receiving.pages or {}).items():
                    stuck[name] = stuck.get(name, 0) + len(listed.ids)
        for name, count in stuck.items():
            share = self.held[worker_id].share(name, count)
            if share > limits.QUARANTINED_SHARE_MAX:
                raise ResourceError(
                    f"{count} pages of group {name} ({share:.0%}) are quarantined, at most "
                    f"{limits.QUARANTINED_SHARE_MAX:.0%} may be; see `pdxfer status` for the "
                    "senders whose end would free them",
                    retryable=True,
                    fields={"quarantined_pages": str(count)},
                )

    def forget_gone(self) -> None:
        """Drop lost prefill lives that no live receive is bound to."""
        for peer_id, peer in list(self.peers.items()):
            if peer.gone and not any(peer_id in r.bound for r in self.live.values()):
                del self.peers[peer_id]

    def free_departed(self, worker_id: int) -> None:
        """Give up the memory of a departed worker after its last receive."""
        alive = any(receiving.worker == worker_id for receiving in self.live.values())
        if worker_id in self.departing and not alive:
            self.departing.discard(worker_id)
            self.held.pop(worker_id, None)
            self.effects.append(Free(worker_id))

    def show(self, receiving: Receiving) -> None:
        """Tell the worker where its receive is."""
        debts = receiving.debts.values()
        self.effects.append(
            Show(
                worker=receiving.worker,
                slot=receiving.slot,
                state=receiving.state,
                error=receiving.error,
                fence=receiving.fence if receiving.error is not None else "",
                length_bytes=sum(d.expected_bytes for d in debts if d.committed),
                runs=sum(debt.runs for debt in debts),
                aux=receiving.aux if receiving.state is State.COMMITTED else b"",
                lane=",".join(sorted(receiving.lanes)),
                generation=receiving.generation,
                peers=tuple(sorted(receiving.bound)),
                detail={"room": receiving.room, "generation": receiving.generation},
            )
        )

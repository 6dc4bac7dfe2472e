"""Receives of an older life of this agent: their pages stay held until a proof comes. Pure.

A worker that outlives its agent attaches to the next one with the pages that older transfers of it
still hold. Who may write them is known by the prefill lives that were told; only these can prove
anything, by their own word or by the end of their process. Another life of a prefill agent knows
nothing of what the older one has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer import limits
from pdxfer.errors import PeerError
from pdxfer.layout import KVLayout, Pages, check_page_ids
from pdxfer.protocol.decode.live_receive import LiveReceive
from pdxfer.protocol.decode.proofs import Proof, Side
from pdxfer.protocol.decode.receives import Receives
from pdxfer.protocol.effects import Tell
from pdxfer.protocol.tables import ReceivingEvent
from pdxfer.wire.messages import Abort


@dataclass(frozen=True, slots=True)
class Inheritance:
    """One receive that an older life of this agent left behind."""

    worker: int
    """Number of the worker as it is attached to this life of the agent."""
    room: int
    slot: int
    life: bytes
    """Incarnation of the older life."""
    prefill: tuple[str, ...]
    """Addresses behind which the writers were."""
    pages: dict[str, Pages]
    writers: tuple[bytes, ...]
    """Prefill lives that were told the pages, at least one."""


class Inherited:
    """What older lives of this agent have left to the receives of this one."""

    def __init__(self, receives: Receives) -> None:
        self._receives = receives

    def take(self, left: Inheritance, generation: int, layout: KVLayout, now: float) -> LiveReceive:
        """Hold the pages of an older receive as FENCING, under a generation that nobody is told.

        Raises:
            ConfigError: a page id is out of range, or another transfer holds it.
            LocalProtocolError: the worker has a live receive of this room.
        """
        self._receives.check_room(left.worker, left.room)
        for group, listed in left.pages.items():
            check_page_ids(layout, group, listed.ids)
        self._receives.held[left.worker].hold(generation, left.pages, left.room)
        receiving = LiveReceive(
            left.worker, left.room, generation, left.slot, left.prefill, now, layout
        )
        receiving.origin, receiving.pages = left.life, left.pages
        receiving.error = PeerError(
            f"room {left.room}: the decode agent that received it has ended", retryable=True
        )
        receiving.fence_deadline = now + limits.FENCE_DEADLINE_S
        self._receives.index.add(receiving)
        for writer in left.writers:
            self._receives.note_bound(receiving, writer)
            receiving.told[writer] = {Side(writer)}
        receiving.advance(ReceivingEvent.FAILED_TOLD)
        self._receives.show(receiving)
        for writer in left.writers:
            peer = self._receives.peers.get(writer)
            if peer is not None and not peer.gone:
                self._ask(writer, left.life)
        return receiving

    def ask_again(self, peer_id: bytes) -> None:
        """A session with a prefill life begins: it is asked to prove what it still can."""
        lives: dict[bytes, None] = {}
        for receiving in self._receives.index.of_peer(peer_id):
            if peer_id not in receiving.unproven or receiving.error is None:
                continue
            if receiving.origin:
                lives[receiving.origin] = None
            else:
                again = Abort(generation=receiving.generation, reason=str(receiving.error))
                self._receives.effects.append(Tell(peer_id, again))
        for life in lives:
            self._ask(peer_id, life)

    def drained(self, peer_id: bytes, life: bytes) -> None:
        """A prefill life can write nothing more of an older life; it speaks for itself only."""
        for receiving in self._receives.index.of_peer(peer_id):
            if receiving.origin == life:
                proof = Proof("drained", peer_id, generation=receiving.generation)
                self._receives.prove(proof)

    def writers_ended(self, worker: int, slot: int) -> None:
        """The processes of all that may write an inherited receive of this worker have ended."""
        receiving = self._receives.index.by_slot.get((worker, slot))
        if receiving is not None and receiving.origin:
            for writer in sorted(receiving.unproven):
                self._receives.prove(Proof("dead", writer, generation=receiving.generation))

    def _ask(self, peer_id: bytes, life: bytes) -> None:
        message = Abort(decode_incarnation=life, reason="the older decode agent has ended")
        self._receives.effects.append(Tell(peer_id, message))

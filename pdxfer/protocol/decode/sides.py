"""Over which receive sides each prefill life may write, and what their ends prove. Pure."""

from __future__ import annotations

from pdxfer.protocol.decode.proofs import Proof, Side
from pdxfer.protocol.decode.receives import Receives
from pdxfer.protocol.effects import Announce


class Sides:
    """The receive sides of one agent, at most one at a time for each prefill life."""

    def __init__(self, receives: Receives) -> None:
        self._peers = receives.peers
        self._receives = receives

    def announce(self, peer_id: bytes) -> None:
        """Tell a prefill life our workers, and a receive side that is there from here on.

        What it was told, and what is not aborted, may be written over that one too.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if peer.side is None:
            peer.side = Side(peer_id)
            peer.sides.add(peer.side)
            self._receives.open_side(peer.side)
        self._receives.effects.append(Announce(peer_id))

    def close(self, peer_id: bytes, proof: str) -> None:
        """Note that the receive side of a life has ended.

        With `proof` nothing comes over it after this.
        """
        peer = self._peers.get(peer_id)
        if peer is None or peer.side is None:
            return
        side, peer.side = peer.side, None
        if proof:
            peer.sides.discard(side)
            self._receives.prove(Proof(proof, peer_id, side))

    def close_generation(self, peer_id: bytes, generation: int) -> None:
        """The receive side of a life takes nothing of a generation any more."""
        peer = self._peers.get(peer_id)
        if peer is not None and peer.side is not None:
            self._receives.prove(Proof("revoked", peer_id, peer.side, generation))

"""The live receives of a decode agent, found by what they have to do with. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pdxfer.protocol.decode.live_receive import LiveReceive
from pdxfer.wire.address import split_instance

Key = TypeVar("Key")
ByGeneration = dict[int, LiveReceive]


class Index:
    """Every way to find a live receive, so that nobody looks through all of them.

    The lists that it gives are copies: a receive may end while one is walked.
    """

    def __init__(self) -> None:
        self.live: ByGeneration = {}
        self.by_slot: dict[tuple[int, int], LiveReceive] = {}
        """(worker, board slot) to receive."""
        self.by_room: dict[tuple[int, int], LiveReceive] = {}
        """(worker, room) to receive."""
        self.unbound: ByGeneration = {}
        """Receives that no prefill life was told of, the oldest first."""
        self._of_peer: dict[bytes, ByGeneration] = {}
        self._of_link: dict[str, ByGeneration] = {}
        self._of_worker: dict[int, ByGeneration] = {}

    def add(self, receiving: LiveReceive) -> None:
        """Add a receive, which begins."""
        generation = receiving.generation
        self.live[generation] = self.unbound[generation] = receiving
        self.by_slot[receiving.worker, receiving.slot] = receiving
        self.by_room[receiving.worker, receiving.room] = receiving
        self._of_worker.setdefault(receiving.worker, {})[generation] = receiving
        for control in _controls(receiving.prefill):
            self._of_link.setdefault(control, {})[generation] = receiving

    def bind(self, receiving: LiveReceive, peer_id: bytes) -> None:
        """Note that a prefill life is told of a receive."""
        self.unbound.pop(receiving.generation, None)
        self._of_peer.setdefault(peer_id, {})[receiving.generation] = receiving

    def remove(self, receiving: LiveReceive) -> None:
        """Remove a receive, which is final."""
        generation = receiving.generation
        del self.live[generation]
        self.unbound.pop(generation, None)
        self.by_slot.pop((receiving.worker, receiving.slot), None)
        self.by_room.pop((receiving.worker, receiving.room), None)
        _drop(self._of_worker, receiving.worker, generation)
        for peer_id in receiving.bound:
            _drop(self._of_peer, peer_id, generation)
        for control in _controls(receiving.prefill):
            _drop(self._of_link, control, generation)

    def of_peer(self, peer_id: bytes) -> list[LiveReceive]:
        """Receives that a prefill life was told of."""
        return list(self._of_peer.get(peer_id, {}).values())

    def of_link(self, control: str) -> list[LiveReceive]:
        """Receives that name a control address."""
        return list(self._of_link.get(control, {}).values())

    def of_worker(self, worker_id: int) -> list[LiveReceive]:
        """Receives of a worker."""
        return list(self._of_worker.get(worker_id, {}).values())

    @property
    def links(self) -> set[str]:
        """Control addresses that live receives name."""
        return set(self._of_link)


def _controls(addresses: Iterable[str]) -> set[str]:
    return {split_instance(address)[0] for address in addresses}


def _drop(index: dict[Key, ByGeneration], key: Key, generation: int) -> None:
    found = index.get(key)
    if found is not None:
        found.pop(generation, None)
        if not found:
            del index[key]

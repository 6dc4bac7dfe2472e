"""The receives of one decode life whose sends have not come. Pure."""

from __future__ import annotations

import msgspec

from pdxfer.wire.messages import Place, Receive

SendKey = tuple[int, int]
"""(source worker, room)."""
Waited = dict[SendKey, dict[bytes, None]]
"""For each send of an agent, the decode lives that wait for it, in order."""


class Waiting:
    """Unmatched receives, by the send they wait for and by their generation.

    Args:  peer: the decode life. waited: where all lives of the agent put down what they wait for.
    """

    def __init__(self, peer: bytes = b"", waited: Waited | None = None) -> None:
        self._peer = peer
        self._waited: Waited = {} if waited is None else waited
        self._of_send: dict[SendKey, dict[int, Receive]] = {}
        """The waiting receives of each send, by receiver index."""
        self._keys: dict[int, set[SendKey]] = {}
        """The sends that each generation waits for."""
        self._count = 0
        self.length_bytes = 0
        """Bytes of the page ids that the receives carry."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, generation: int) -> bool:
        return generation in self._keys

    @property
    def generations(self) -> list[int]:
        """The generations of the receives that wait."""
        return list(self._keys)

    def keys(self, generation: int) -> set[SendKey]:
        """The sends that receives of this generation wait for."""
        return self._keys.get(generation, set())

    def knows(self, generation: int, worker: int) -> bool:
        """Whether a receive of this generation waits for a send of a source worker."""
        return any(key[0] == worker for key in self.keys(generation))

    def add(self, receive: Receive) -> None:
        """Keep a receive; a later one of the same receiver replaces it."""
        key = (receive.source_worker, receive.room)
        earlier = self._of_send.get(key, {}).get(receive.receiver_index)
        if earlier is not None:
            if earlier.generation > receive.generation:
                return
            self._forget(earlier)
        self._of_send.setdefault(key, {})[receive.receiver_index] = receive
        self._waited.setdefault(key, {})[self._peer] = None
        self._keys.setdefault(receive.generation, set()).add(key)
        self._count += 1
        self.length_bytes += ids_bytes(receive.place)

    def take(self, worker: int, room: int) -> list[Receive]:
        """The receives that waited for this send; they wait no more."""
        taken = list(self._of_send.get((worker, room), {}).values())
        for receive in taken:
            self._forget(receive)
        return taken

    def placed(self, generation: int, worker: int) -> bool:
        """Whether the receive of this generation from a source worker has its pages already."""
        return any(
            receive.place is not None
            for key in self.keys(generation)
            if key[0] == worker
            for receive in self._of_send[key].values()
            if receive.generation == generation
        )

    def place(self, place: Place) -> None:
        """Put pages to a receive; an unknown one is dead already."""
        for key in self.keys(place.generation):
            for index, receive in self._of_send[key].items():
                if (receive.generation, receive.source_worker) == (
                    place.generation,
                    place.source_worker,
                ):
                    self.length_bytes += ids_bytes(place) - ids_bytes(receive.place)
                    self._of_send[key][index] = msgspec.structs.replace(receive, place=place)

    def clear(self) -> None:
        """Forget all of them."""
        for generation in self.generations:
            self.drop(generation)

    def drop(self, generation: int) -> None:
        """Forget the receives of a generation."""
        for key in list(self.keys(generation)):
            for receive in list(self._of_send[key].values()):
                if receive.generation == generation:
                    self._forget(receive)

    def _forget(self, receive: Receive) -> None:
        key = (receive.source_worker, receive.room)
        receives = self._of_send[key]
        del receives[receive.receiver_index]
        self._count -= 1
        self.length_bytes -= ids_bytes(receive.place)
        if not receives:
            del self._of_send[key]
            peers = self._waited[key]
            del peers[self._peer]
            if not peers:
                del self._waited[key]
        if all(other.generation != receive.generation for other in receives.values()):
            keys = self._keys[receive.generation]
            keys.discard(key)
            if not keys:
                del self._keys[receive.generation]


def ids_bytes(place: Place | None) -> int:
    """Bytes of the page ids of a placement, as they travel."""
    if place is None:
        return 0
    return sum(len(group.ids) + len(group.skipped) for group in place.groups.values())

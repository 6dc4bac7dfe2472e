"""The lanes of one agent: made when first used, their events brought to the loop."""

from __future__ import annotations

from collections.abc import Callable

from pdxfer import limits
from pdxfer.errors import ConfigError, PdxferError
from pdxfer.fabric.base import Fabric, LocalRegion
from pdxfer.memory import MemoryRange

MakeFabric = Callable[[str], Fabric]
"""Makes the fabric of a lane by name; raises where the lane cannot be had here."""


class Lanes:
    """Fabrics by lane name. Loop thread only."""

    def __init__(self, names: tuple[str, ...], make: MakeFabric) -> None:
        self.names = names
        self._make = make
        self._fabrics: dict[str, Fabric] = {}
        self._registered: dict[tuple[str, int], list[LocalRegion]] = {}
        self.on_made: Callable[[Fabric], None] = lambda fabric: None

    def fabric(self, lane: str) -> Fabric:
        """The fabric of a lane.

        Raises:
            ConfigError: the lane is not among the offered ones.
            PdxferError: it cannot be had on this machine, with the reason.
        """
        if lane not in self.names:
            raise ConfigError(
                f"lane {lane} is not offered here, which offers {', '.join(self.names)}",
                fields={"lane": lane},
            )
        if lane not in self._fabrics:
            self._fabrics[lane] = self._make(lane)
            self.on_made(self._fabrics[lane])
        return self._fabrics[lane]

    def needs_pidfd(self, lane: str) -> bool:
        """Whether a lane is written by the peer's own system calls; one that fails here is not.

        Only the end of the peer's process, or its word, proves such a lane silent.
        """
        try:
            return self.fabric(lane).capabilities.needs_pidfd
        except PdxferError:
            return False

    def made(self) -> list[Fabric]:
        """The fabrics in use."""
        return list(self._fabrics.values())

    def regions(self, lane: str, worker: int, ranges: tuple[MemoryRange, ...]) -> list[LocalRegion]:
        """The worker's ranges, registered with a lane on first use."""
        key = (lane, worker)
        if key not in self._registered:
            fabric, regions = self.fabric(lane), list[LocalRegion]()
            try:
                for part in ranges:
                    regions.append(fabric.register(part.address, part.length_bytes, part.owner))
            except BaseException:
                for region in regions:
                    fabric.deregister(region)
                raise
            self._registered[key] = regions
        return self._registered[key]

    def forget(self, worker: int) -> None:
        """Deregister a worker everywhere; the caller has proof that nothing can reach it."""
        for key in [key for key in self._registered if key[1] == worker]:
            for region in self._registered.pop(key):
                self._fabrics[key[0]].deregister(region)

    def close(self) -> None:
        """Close every fabric; bounded."""
        fabrics, self._fabrics = list(self._fabrics.values()), {}
        for fabric in fabrics:
            fabric.close(limits.ENGINE_CLOSE_DEADLINE_S)

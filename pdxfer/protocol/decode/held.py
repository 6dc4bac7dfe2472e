"""Which destination pages are in the hands of a transfer: held or quarantined, by generation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pdxfer import _core
from pdxfer.errors import ConfigError
from pdxfer.layout import KVLayout, Pages


class HeldPages:
    """The pages of one decode worker that a live generation may still write.

    A page is held from `place` until its transfer is committed or fenced; no clock ends it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._owner: dict[str, NDArray[np.int64]] = {
            group.name: np.zeros(group.pages, dtype=np.int64) for group in layout.groups
        }
        self._rooms: dict[int, int] = {}
        """The room of each generation that holds pages."""

    def hold(self, generation: int, pages: Mapping[str, Pages], room: int) -> None:
        """Give pages to a generation; `room` is the name that workers have for it.

        Raises:
            ConfigError: a page is named twice, or another live generation has it; none is held.
        """
        for name, listed in pages.items():
            ids = np.asarray(listed.ids, dtype=np.int64)
            owners = self._owner[name][ids]
            if owners.any():
                at = int(np.flatnonzero(owners)[0])
                holder = int(owners[at])
                holding = self._rooms[holder]
                raise ConfigError(
                    f"page {int(ids[at])} of group {name} is held by room {holding} (generation "
                    f"{holder}), which may still write it; place other pages until that transfer "
                    "has ended",
                    fields={
                        "page": str(int(ids[at])),
                        "room": str(holding),
                        "generation": str(holder),
                    },
                )
            at = _core.first_repeated_id(ids, len(self._owner[name]))
            if at >= 0:
                raise ConfigError(
                    f"page {int(ids[at])} of group {name} is named twice; each page has one place",
                    fields={"page": str(int(ids[at]))},
                )
        for name, listed in pages.items():
            self._owner[name][np.asarray(listed.ids, dtype=np.int64)] = generation
        self._rooms[generation] = room

    def release(self, generation: int, pages: Mapping[str, Pages]) -> None:
        """All pages of a generation are the worker's again."""
        self._rooms.pop(generation, None)
        for name, listed in pages.items():
            self._owner[name][np.asarray(listed.ids, dtype=np.int64)] = 0

    def share(self, name: str, count: int) -> float:
        """`count` pages as a share of the group."""
        return count / max(1, len(self._owner[name]))

"""Which destination pages are in the hands of a transfer: held or quarantined, by generation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

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

    def hold(self, generation: int, pages: Mapping[str, Pages]) -> None:
        """Give pages to a generation.

        Raises:
            ConfigError: a page is named twice, or another live generation has it; none is held.
        """
        for name, listed in pages.items():
            ids = np.asarray(listed.ids, dtype=np.int64)
            owners = self._owner[name][ids]
            if owners.any():
                at = int(np.flatnonzero(owners)[0])
                raise ConfigError(
                    f"page {int(ids[at])} of group {name} is held by generation {int(owners[at])}, "
                    "which may still write it; place other pages until that transfer has ended",
                    fields={"page": str(int(ids[at])), "generation": str(int(owners[at]))},
                )
            if len(np.unique(ids)) != len(ids):
                values, counts = np.unique(ids, return_counts=True)
                twice = int(values[counts > 1][0])
                raise ConfigError(
                    f"page {twice} of group {name} is named twice; each page has one place",
                    fields={"page": str(twice)},
                )
        for name, listed in pages.items():
            self._owner[name][np.asarray(listed.ids, dtype=np.int64)] = generation

    def release(self, pages: Mapping[str, Pages]) -> None:
        """The pages are the worker's again."""
        for name, listed in pages.items():
            self._owner[name][np.asarray(listed.ids, dtype=np.int64)] = 0

    def share(self, name: str, count: int) -> float:
        """`count` pages as a share of the group."""
        return count / max(1, len(self._owner[name]))

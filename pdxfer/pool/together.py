"""Two pools as one cache.

Each is a pool of its own with its own ids; together they are one layout of two groups, and one
cache for a client. Where both lie in one buffer (unified memory) it is one region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.layout import combine

if TYPE_CHECKING:
    import torch

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange
    from pdxfer.pool.base import Pool


class PoolPair:
    """Two pools as one cache."""

    def __init__(self, full: Pool, other: Pool) -> None:
        self._pools = (full, other)
        one_region = full.memory[0].address == other.memory[0].address
        self.layout: KVLayout = combine(full.layout, other.layout, one_region=one_region)
        """Of both groups."""
        self._one_region = one_region

    @property
    def memory(self) -> tuple[MemoryRange, ...]:
        """One range per region of the layout, in order."""
        full, other = self._pools
        return full.memory if self._one_region else full.memory + other.memory

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and bytes of a page of the full-attention pool."""
        return self._pools[0].get_contiguous_buf_infos()

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """As `get_contiguous_buf_infos`, of the other pool."""
        return self._pools[1].get_contiguous_buf_infos()

    def move_pages(
        self, tgt_pages: torch.Tensor, src_pages: torch.Tensor, group: str | None = None
    ) -> None:
        """Whole pages of one group; see `Pool.move_pages`. None: the full-attention group."""
        for pool in self._pools:
            if group in pool.layout.group_by_name or (group is None and pool is self._pools[0]):
                pool.move_pages(tgt_pages, src_pages)
                return
        raise ConfigError(f"no group {group!r}; there are {', '.join(self.layout.group_by_name)}")

    def close(self) -> None:
        """Free the memory that is the pools' own. Idempotent.

        Raises: BufferError while a tensor lives; call again when it is gone. The pool that it is of
            is as before, the other one may be closed.
        """
        for pool in self._pools:
            pool.close()

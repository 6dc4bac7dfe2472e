"""The pools of one instance, a pool a rank: a model's cache scattered over them, and read back.

transformers keeps `[1, heads, tokens, dim]` a layer. Rank r of TP t has the KV heads
`[r * heads / t, (r + 1) * heads / t)`; where ranks outnumber heads it has head `r * heads // t`, as
some other ranks do. In a pool a token lies at `slot = page * page_size + row`; all ranks use the
same page ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from pdxfer.demo.options import HOST_LAYOUTS, Side
from pdxfer.demo.paging import pick_pages, slots
from pdxfer.errors import ConfigError
from pdxfer.layout import Rank
from pdxfer.pool import HostPool, MLAPool, PageMajorPool, TokenMajorPool, TokenPool, UnifiedPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import DynamicCache

    from pdxfer.demo.model import Geometry
    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange

_KV_POOLS: Final = {
    "page-major": PageMajorPool,
    "token-major": TokenMajorPool,
    "unified": UnifiedPool,
}
_MLA_ARRANGEMENTS: Final = {
    "page-major": "page_major",
    "token-major": "token_major",
    "unified": "unified_entries",
}
_SPARE_PAGES: Final = 17
"""Pages that each pool has beyond the longest prompt, so that ids are drawn from more pages than
are needed."""


@dataclass(frozen=True)
class Cache:
    """What a client takes: the layout with the model's name in it, and the memory."""

    layout: KVLayout
    memory: Sequence[MemoryRange]


class RankPools:
    """One pool a rank, all of one shape but for the heads they have.

    Threads:  as torch; nothing here is locked.
    """

    def __init__(self, geometry: Geometry, side: Side, tokens_max: int, model_name: str) -> None:
        """Make the pools, all zero, each with room for `tokens_max` tokens and some pages more."""
        self._geometry = geometry
        self._tp = side.tp
        self.ranks = [Rank(tp=rank, tp_size=side.tp) for rank in range(side.tp)]
        pages = -(-tokens_max // side.page_size) + _SPARE_PAGES
        self.pools = [_pool(geometry, side, rank, pages) for rank in range(side.tp)]
        self.caches = [
            Cache(replace(pool.layout, model=model_name), pool.memory) for pool in self.pools
        ]
        group = self.pools[0].layout.groups[0]
        self._pages, self._reserved_pages = group.pages, group.reserved_pages
        self._page_size = group.page_size

    @property
    def replicas(self) -> int:
        """How many ranks have the same head."""
        return max(self._tp // self._geometry.kv_heads, 1)

    def pick_pages(self, tokens: int, seed: int) -> NDArray[np.int64]:
        """Ids of as many pages as `tokens` need, in random order."""
        count = -(-tokens // self._page_size)
        return pick_pages(self._pages, self._reserved_pages, count, seed)

    def scatter(self, cache: DynamicCache, page_ids: NDArray[np.int64]) -> None:
        """Write every token of the cache, each head into every pool that has it."""
        loc = slots(page_ids, self._page_size, cache.get_seq_length())
        for rank, pool in enumerate(self.pools):
            first, count = heads_of(rank, self._tp, self._geometry.kv_heads)
            for number, layer in enumerate(cache.layers):
                for part, tensor in zip(
                    self._geometry.parts, (layer.keys, layer.values), strict=True
                ):
                    rows = tensor[0, first : first + count].transpose(0, 1).contiguous()
                    pool.rows(part, number).scatter(loc, rows)

    def gather(
        self, cache: DynamicCache, page_ids: NDArray[np.int64], tokens: int, replica: int = 0
    ) -> DynamicCache:
        """Fill an empty cache with `tokens` tokens. The pools are not changed.

        Args:    replica: below `replicas`; of the ranks that have the same head, which one is read.
        """
        loc = slots(page_ids, self._page_size, tokens)
        pools = self.pools[replica :: self.replicas]
        for layer in range(self._geometry.layers):
            keys, values = (
                torch.cat([pool.rows(part, layer).gather(loc) for pool in pools], dim=1)
                for part in self._geometry.parts
            )
            cache.update(_heads_first(keys), _heads_first(values), layer)
        return cache


def heads_of(rank: int, tp: int, heads: int) -> tuple[int, int]:
    """First head of a rank, and how many it has.

    Raises:  ConfigError: neither number is a multiple of the other: some head would be on no rank.
    """
    if heads % tp and tp % heads:
        raise ConfigError(
            f"{tp} ranks cannot share {heads} KV heads: one has to be a multiple of the other"
        )
    if tp <= heads:
        return rank * heads // tp, heads // tp
    return rank * heads // tp, 1


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, dim]` to `[1, heads, tokens, dim]`."""
    return rows.transpose(0, 1).unsqueeze(0).contiguous()


def _pool(geometry: Geometry, side: Side, rank: int, pages: int) -> TokenPool:
    """The pool of a rank, with `pages` usable pages; a host pool has its own order of them."""
    if side.layout in HOST_LAYOUTS:
        like = _pool(geometry, replace(side, layout="token-major"), rank, pages=1)
        return HostPool(like, layout=side.layout.replace("-", "_"), pages=pages, pin_memory=False)
    size, dtype = pages * side.page_size, getattr(torch, geometry.dtype)
    if geometry.latent:
        return MLAPool(
            size=size,
            page_size=side.page_size,
            dtype=dtype,
            kv_lora_rank=geometry.key_dim,
            qk_rope_head_dim=geometry.value_dim,
            layer_num=geometry.layers,
            arrangement=_MLA_ARRANGEMENTS[side.layout],
        )
    first, count = heads_of(rank, side.tp, geometry.kv_heads)
    return _KV_POOLS[side.layout](
        size=size,
        page_size=side.page_size,
        dtype=dtype,
        head_num=count,
        head_dim=geometry.key_dim,
        v_head_dim=geometry.value_dim,
        layer_num=geometry.layers,
        total_kv_heads=geometry.kv_heads,
        head_first=first,
    )

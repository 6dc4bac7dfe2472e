"""Between a transformers cache and the pages of a pool.

transformers keeps `[1, kv_heads, tokens, head_dim]` a layer; a pool is filled by slot,
`slot = page * page_size + row`, and read by page.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import DynamicCache


class PagedPool(Protocol):
    """The part of a pool that the demo uses."""

    def get_key_buffer(self, layer: int, /) -> torch.Tensor:
        """`[pages, page_size, kv_heads, head_dim]`, or the same rows without the page axis."""
        ...

    def get_value_buffer(self, layer: int, /) -> torch.Tensor:
        """As `get_key_buffer`, for values."""
        ...

    def set_kv_buffer(
        self, layer: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, /
    ) -> None:
        """Write `[tokens, kv_heads, head_dim]` at slots `loc`."""
        ...


def pick_pages(pages: int, reserved: int, count: int, seed: int) -> NDArray[np.int64]:
    """`count` different page ids in random order, none of them reserved."""
    generator = np.random.default_rng(seed)
    return reserved + generator.permutation(pages - reserved)[:count].astype(np.int64)


def slots(page_ids: NDArray[np.int64], page_size: int, tokens: int) -> torch.Tensor:
    """The slots of the first `tokens` tokens on these pages, int64 [tokens]."""
    rows = page_ids[:, None] * page_size + np.arange(page_size)
    return torch.from_numpy(np.ascontiguousarray(rows.reshape(-1)[:tokens]))


def scatter(
    cache: DynamicCache, pool: PagedPool, page_ids: NDArray[np.int64], page_size: int
) -> None:
    """Write every token of the cache into the pool, page by page of `page_ids`."""
    tokens = cache.get_seq_length()
    loc = slots(page_ids, page_size, tokens)
    for number, layer in enumerate(cache.layers):
        keys = layer.keys[0].transpose(0, 1).contiguous()
        values = layer.values[0].transpose(0, 1).contiguous()
        pool.set_kv_buffer(number, loc, keys, values)


def gather(
    pool: PagedPool, cache: DynamicCache, page_ids: NDArray[np.int64], tokens: int, layers: int
) -> DynamicCache:
    """Fill an empty cache with `tokens` tokens read from the pool. The pool is not changed."""
    ids = torch.from_numpy(page_ids)
    for layer in range(layers):
        keys = _rows(pool.get_key_buffer(layer)[ids], tokens)
        values = _rows(pool.get_value_buffer(layer)[ids], tokens)
        cache.update(keys, values, layer)
    return cache


def _rows(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[pages, page_size, heads, dim]` to `[1, heads, tokens, dim]`."""
    rows = pages.reshape(-1, *pages.shape[-2:])[:tokens]
    return rows.transpose(0, 1).unsqueeze(0).contiguous()


def digest(cache: DynamicCache) -> str:
    """SHA-256 of every key and value of the cache, in token order: equal bytes, equal digest."""
    total = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()

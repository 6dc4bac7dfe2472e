"""Page ids and slots of a request, and what a cache holds as one digest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import DynamicCache


def pick_pages(pages: int, reserved: int, count: int, seed: int) -> NDArray[np.int64]:
    """`count` different page ids in random order, none of them reserved."""
    generator = np.random.default_rng(seed)
    return reserved + generator.permutation(pages - reserved)[:count].astype(np.int64)


def slots(page_ids: NDArray[np.int64], page_size: int, tokens: int) -> torch.Tensor:
    """The slots of the first `tokens` tokens on these pages, int64 [tokens]."""
    rows = page_ids[:, None] * page_size + np.arange(page_size)
    return torch.from_numpy(np.ascontiguousarray(rows.reshape(-1)[:tokens]))


def digest(cache: DynamicCache) -> str:
    """SHA-256 of every key and value of the cache, in token order: equal bytes, equal digest."""
    total = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()

"""KV cache pools with SGLang's constructor and method names; torch, layout and memory only."""

from pdxfer.pool.base import KVPool, Layer
from pdxfer.pool.page_major import PageMajorPool
from pdxfer.pool.token_major import TokenMajorPool

__all__ = ["KVPool", "Layer", "PageMajorPool", "TokenMajorPool"]

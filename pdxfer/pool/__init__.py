"""KV cache pools with SGLang's constructor and method names; torch, layout and memory only."""

from pdxfer.pool.base import Pool, TokenPool
from pdxfer.pool.copies import HostCopy
from pdxfer.pool.dsa import DSAPool
from pdxfer.pool.engine_pool import EnginePool
from pdxfer.pool.host import HostPool
from pdxfer.pool.hybrid import HybridMambaPool
from pdxfer.pool.kv import DraftLanes, KVPool
from pdxfer.pool.layers import Layer
from pdxfer.pool.mla import MLAPool
from pdxfer.pool.mxfp8 import MXFP8Pool
from pdxfer.pool.page_major import PageMajorPool
from pdxfer.pool.refusals import ShapeError, SlotError
from pdxfer.pool.sparse import SparsePool
from pdxfer.pool.state import StatePool
from pdxfer.pool.token_major import TokenMajorPool
from pdxfer.pool.unified import UnifiedPool
from pdxfer.pool.window import SWAPool

__all__ = [
    "DSAPool",
    "DraftLanes",
    "EnginePool",
    "HostCopy",
    "HostPool",
    "HybridMambaPool",
    "KVPool",
    "Layer",
    "MLAPool",
    "MXFP8Pool",
    "PageMajorPool",
    "Pool",
    "SWAPool",
    "ShapeError",
    "SlotError",
    "SparsePool",
    "StatePool",
    "TokenMajorPool",
    "TokenPool",
    "UnifiedPool",
]

"""Shared buffers: the memory that a worker owns and the agent beside it maps too.

A buffer is a memfd whose size can never change again (sealed SHRINK, GROW and SEAL), so nothing a
worker does later can make an access of the agent fault. All its pages are present from the start:
no memory shortage is found in the middle of a transfer.

`allocate` makes such memory; `adopt` puts it under memory that exists; tensors that lie in it from
the start come from `pdxfer.memory.tensors`, the only file here that knows torch.
"""

from __future__ import annotations

from pdxfer.memory.adopted import adopt
from pdxfer.memory.available import available_bytes
from pdxfer.memory.mappings import unreadable_at
from pdxfer.memory.shared import MemoryRange, Progress, SharedMemory, allocate, map_sealed

__all__ = [
    "MemoryRange",
    "Progress",
    "SharedMemory",
    "adopt",
    "allocate",
    "available_bytes",
    "map_sealed",
    "unreadable_at",
]

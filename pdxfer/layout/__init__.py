"""Layouts as byte maps, and the one planner between any two of them.

Pure: numpy and the native core only; no sockets, no torch, no clock. Both sides of a transfer
compute the same from the same two layouts.
"""

from __future__ import annotations

from pdxfer.layout.builders.draft import fuse_draft
from pdxfer.layout.builders.dsa import dsa
from pdxfer.layout.builders.host import host_layout
from pdxfer.layout.builders.index import k_only
from pdxfer.layout.builders.kv import (
    arranged,
    head_major,
    layer_first,
    page_first,
    page_first_direct,
    page_head,
    page_major,
    page_unified,
    token_major,
    unified_entries,
)
from pdxfer.layout.builders.latent import mla
from pdxfer.layout.builders.mxfp8 import mxfp8
from pdxfer.layout.builders.parts import join_parts, select_parts
from pdxfer.layout.builders.state import StateTensor, state, state_entries
from pdxfer.layout.builders.tiles import vectorized_5d
from pdxfer.layout.builders.vllm import vllm_blocks, vllm_cpu, vllm_mla_blocks
from pdxfer.layout.combining import combine
from pdxfer.layout.compatibility import Side, check_pair
from pdxfer.layout.compiled import Batches, Plan
from pdxfer.layout.groups import Group
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.ownership import Owned, OwnedCells, PageShare, cover
from pdxfer.layout.pages import Pages, as_group_pages, check_page_ids, kept
from pdxfer.layout.planes import Plane, RegionSpec
from pdxfer.layout.planned_chunk import PlannedChunk
from pdxfer.layout.planner import plan
from pdxfer.layout.rank import Rank
from pdxfer.layout.request import Moved
from pdxfer.layout.summary import GroupSummary, PlanSummary

__all__ = [
    "Batches",
    "Group",
    "GroupSummary",
    "KVLayout",
    "Moved",
    "Owned",
    "OwnedCells",
    "PageShare",
    "Pages",
    "Plan",
    "PlanSummary",
    "Plane",
    "PlannedChunk",
    "Rank",
    "RegionSpec",
    "Side",
    "StateTensor",
    "arranged",
    "as_group_pages",
    "check_page_ids",
    "check_pair",
    "combine",
    "cover",
    "dsa",
    "fuse_draft",
    "head_major",
    "host_layout",
    "join_parts",
    "k_only",
    "kept",
    "layer_first",
    "mla",
    "mxfp8",
    "page_first",
    "page_first_direct",
    "page_head",
    "page_major",
    "page_unified",
    "plan",
    "select_parts",
    "state",
    "state_entries",
    "token_major",
    "unified_entries",
    "vectorized_5d",
    "vllm_blocks",
    "vllm_cpu",
    "vllm_mla_blocks",
]

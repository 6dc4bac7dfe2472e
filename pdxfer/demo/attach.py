"""A worker's side of set-up: its pool in shared memory, and its agent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pdxfer.pool import PageMajorPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from pdxfer.demo.model import DemoModel
    from pdxfer.demo.options import WorkerOptions
    from pdxfer.embedded import EmbeddedAgent
    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange


@dataclass(frozen=True)
class Cache:
    """What a client takes: the layout with the model's name in it, and the memory."""

    layout: KVLayout
    memory: Sequence[MemoryRange]


def make_pool(model: DemoModel, options: WorkerOptions) -> tuple[PageMajorPool, Cache]:
    """A page-major pool for this model, and the cache to attach."""
    geometry = model.geometry
    pool = PageMajorPool(
        size=(options.pages - 1) * options.page_size,
        page_size=options.page_size,
        dtype=getattr(torch, geometry.dtype),
        head_num=geometry.kv_heads,
        head_dim=geometry.head_dim,
        layer_num=geometry.layers,
        device="cpu",
    )
    return pool, Cache(replace(pool.layout, model=options.model_name), pool.memory)


def agent_for(role: str, options: WorkerOptions, stack: ExitStack) -> str | EmbeddedAgent:
    """The socket of the daemon, or an agent on a thread of this process."""
    if options.socket_path:
        return options.socket_path
    from pdxfer.agent.config import AgentConfig
    from pdxfer.embedded import decode_agent, prefill_agent

    start = prefill_agent if role == "prefill" else decode_agent
    agent = start(AgentConfig(role=role, socket_path="", lanes=(options.lane,)))
    stack.callback(agent.close)
    return agent

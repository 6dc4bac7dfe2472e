"""A worker's side of set-up: its agent, and a client for every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pdxfer.client import DecodeClient, PrefillClient

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pdxfer.demo.options import WorkerOptions
    from pdxfer.demo.rank_pools import RankPools
    from pdxfer.embedded import EmbeddedAgent

C = TypeVar("C", PrefillClient, DecodeClient)


def attach(kind: type[C], options: WorkerOptions, pools: RankPools, stack: ExitStack) -> list[C]:
    """A client of every rank, in the order of the ranks; `stack` closes them."""
    agent = _agent_for(kind.role, options, stack)
    relayout = "allow" if options.relayout else None
    return [
        stack.enter_context(kind(agent, cache, rank=rank, relayout=relayout))
        for cache, rank in zip(pools.caches, pools.ranks, strict=True)
    ]


def _agent_for(role: str, options: WorkerOptions, stack: ExitStack) -> str | EmbeddedAgent:
    """The socket of the daemon, or an agent on a thread of this process."""
    if options.socket_path:
        return options.socket_path
    from pdxfer.agent.config import AgentConfig
    from pdxfer.embedded import decode_agent, prefill_agent

    start = prefill_agent if role == "prefill" else decode_agent
    agent = start(AgentConfig(role=role, socket_path="", lanes=(options.lane,)))
    stack.callback(agent.close)
    return agent

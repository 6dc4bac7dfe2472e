"""Running an agent on the current loop: start, serve until told, drain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdxfer.agent.config import AgentConfig
from pdxfer.agent.decode import DecodeAgent
from pdxfer.agent.host import lane_network
from pdxfer.agent.lanes import MakeFabric
from pdxfer.agent.prefill import PrefillAgent
from pdxfer.errors import ConfigError
from pdxfer.fabric.base import Fabric
from pdxfer.fabric.lanes import LANES, LaneSettings


def lanes_of(config: AgentConfig) -> MakeFabric:
    """The lanes of the table, each made with this configuration when it is first used.

    Raises: ConfigError when they could not listen on the address that is bound or advertised.
    """
    network = lane_network(config.bind, config.advertise, config.net_device)
    settings = LaneSettings(
        ucx=config.ucx, net_device=network.device, address_family=network.family
    )

    def make(lane: str) -> Fabric:
        return LANES[lane].make(settings)

    return make


async def run_agent(
    config: AgentConfig,
    *,
    ready: Callable[[dict[str, object]], None],
    stop: asyncio.Event,
    make_fabric: MakeFabric | None = None,
) -> int:
    """Serve until `stop` is set.

    Args:
        config: the settings.
        ready: called once with addresses, socket, incarnation, when workers can attach.
        stop: set by the caller, on this loop.
        make_fabric: makes lanes in place of the table (tests).

    Returns: transfers that were still live at the drain deadline.

    Raises:
        ConfigError: a setting is wrong.
        ResourceError: an address or the socket cannot be bound, or no lane can be had.
    """
    make = make_fabric or lanes_of(config)
    agent: PrefillAgent | DecodeAgent
    if config.role == "prefill":
        agent = PrefillAgent(config, make)
    elif config.role == "decode":
        agent = DecodeAgent(config, make)
    else:
        raise ConfigError(f"role={config.role!r} is neither 'prefill' nor 'decode'")
    try:
        await agent.start()
        ready(
            {
                "addresses": agent.addresses,
                "socket": config.socket_path,
                "incarnation": agent.incarnation.hex(),
                "lanes": list(config.lanes),
            }
        )
        await stop.wait()
        return await agent.drain()
    finally:
        await agent.stop("the agent was told to stop")

"""What an agent is told: plain values, no defaults from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdxfer import limits
from pdxfer.fabric.lanes import offered


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The settings of one agent. `pdxfer.daemon.config` fills it for a daemon."""

    role: str
    """`prefill` or `decode`."""
    socket_path: str
    """Unix socket for the workers beside this agent."""
    bind: str = "tcp://127.0.0.1:0"
    """At prefill the control address to listen on. At both roles the UCX lanes use the network
    device that has it."""
    advertise: str = ""
    """Prefill: host of the address told to workers, where `bind` is a wildcard."""
    lanes: tuple[str, ...] = field(default_factory=offered)
    """Names of the lanes that the agent offers, best first."""
    ucx: str = "auto"
    """Which UCX library: auto, wheel, system or a directory."""
    net_device: str = ""
    """Network device that the UCX lanes use; empty: the one that has the bind address."""
    key_file: str = ""
    """File of this agent's secret CURVE key."""
    client_keys: str = ""
    """Prefill: folder of the public keys (`.pub`) of decode agents let in."""
    server_key: str = ""
    """Decode: file of the public key of the prefill agents."""
    insecure: bool = False
    """Allow an address that is not loopback without keys."""
    allowed_uids: tuple[int, ...] = ()
    """Users whose workers may attach; empty: this user."""
    drain_deadline_s: float = limits.DAEMON_DRAIN_DEADLINE_S
    """How long a stopping agent lets live transfers finish."""

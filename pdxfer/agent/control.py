"""The control channel between agents: ZeroMQ with CURVE under numbered sessions.

A prefill agent has one `ControlServer`, a decode agent one `ControlLink` per prefill address.
"""

from pdxfer.agent.control_link import ControlLink
from pdxfer.agent.control_server import ControlServer

__all__ = ["ControlLink", "ControlServer"]

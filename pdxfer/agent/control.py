"""The control channel between agents: ZeroMQ with CURVE under numbered sessions.

A prefill agent has one `ControlServer`, a decode agent one `ControlLink` per prefill address.
"""

from pdxfer.agent.control_link import ControlLink
from pdxfer.agent.control_server import ControlServer
from pdxfer.agent.control_socket import new_context

__all__ = ["ControlLink", "ControlServer", "new_context"]

"""The port that every UCX lane opens, and what whoever can reach it may do there.

UCX has no lane without one: its own peers connect to it, and it takes what they say before pdxfer
sees any of it. So the daemon at its start, `pdxfer doctor` and `pdxfer status` say what it means.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdxfer.fabric.lanes import library_lanes

LISTENING_LANES = library_lanes("ucx")
"""Lanes that open a UCX port: cma too, since its connections and commits go by tcp."""


def listener_warning(lanes: Iterable[str]) -> str:
    """What to say where `lanes` are offered; empty where none of them opens a UCX port."""
    listening = [lane for lane in lanes if lane in LISTENING_LANES]
    if not listening:
        return ""
    return (
        f"UCX listens for lanes {', '.join(listening)}: whoever can reach its tcp ports can write "
        "into all memory that is attached, and can end the daemon with one packet. Let only the "
        "daemons of the other side reach them: bind loopback or a network of trusted machines, fix "
        "the ports with UCX_TCP_PORT_RANGE and close them to all others in the firewall"
    )

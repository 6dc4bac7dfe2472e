"""The table of lanes: all that anybody needs to know of a lane is its row.

Configuration, agents, the status board, `doctor`, `demo`, `bench` and `plan` read this table. To
add a lane, write a file beside this one and a row here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pdxfer.fabric.base import Capabilities, Scope

if TYPE_CHECKING:
    from pdxfer.fabric.base import Fabric


class Reach(Enum):
    """How far apart the two agents of a lane may be."""

    PROCESS = "one process"
    """The lane is for tests; no configuration offers it."""
    HOST = "one host and one pid namespace"
    NETWORK = "any two hosts"


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What an agent's configuration says to a lane that is being made."""

    ucx: str = "auto"
    """Which UCX library is loaded: auto, wheel, system or a directory."""
    net_device: str = ""
    """Network device to listen and send on; empty: any."""
    address_family: str = ""
    """Family of the address that was bound or advertised, `inet` or `inet6`; empty: either."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One way for bytes to travel."""

    name: str
    """Name of the lane in settings, messages and `status`."""
    board_code: int
    """Number of the lane on the status board, 1 to 255; it is never given to another lane."""
    reach: Reach
    library: str
    """Library whose versions have to agree on both sides (`ucx`: major.minor); empty: none."""
    capabilities: Capabilities
    factory: str
    """`module:callable`, imported when the lane is really used; called with (name, settings)."""
    purpose: str
    """What moves how, in a few words for help texts."""

    def make(self, settings: LaneSettings) -> Fabric:
        """Start the lane for one agent.

        Raises:
            PdxferError: it cannot be had here, with the reason.
            ImportError: its native module is not built.
        """
        module, _, name = self.factory.partition(":")
        made: Fabric = getattr(importlib.import_module(module), name)(self.name, settings)
        return made


_ROWS = (
    Lane(
        name="cma",
        board_code=3,
        reach=Reach.HOST,
        library="ucx",
        capabilities=Capabilities(
            places_at_receiver=False, revoke_scope=Scope.NOTHING, needs_pidfd=True
        ),
        factory="pdxfer.fabric.ucx:make",
        purpose="UCX writes from process to process through the kernel",
    ),
    Lane(
        name="tcp",
        board_code=4,
        reach=Reach.NETWORK,
        library="ucx",
        capabilities=Capabilities(
            places_at_receiver=False, revoke_scope=Scope.SENDER, needs_pidfd=False
        ),
        factory="pdxfer.fabric.ucx:make",
        purpose="UCX writes over TCP connections",
    ),
    Lane(
        name="inproc",
        board_code=7,
        reach=Reach.PROCESS,
        library="",
        capabilities=Capabilities(
            places_at_receiver=False, revoke_scope=Scope.SENDER, needs_pidfd=False
        ),
        factory="pdxfer.fabric.inproc:make",
        purpose="memory copies inside one process, for tests",
    ),
)

LANES: dict[str, Lane] = {lane.name: lane for lane in _ROWS}
"""Every lane of this build by name, best first. On tcp the receive worker of a lost sender is
destroyed before `SenderLost` is told; cma writes are made by the sender's own kernel calls, which
nothing at the receiver can stop."""


def offered() -> tuple[str, ...]:
    """Names of the lanes that a configuration may offer, best first."""
    return tuple(name for name, lane in LANES.items() if lane.reach is not Reach.PROCESS)


def library_lanes(library: str) -> tuple[str, ...]:
    """Names of the lanes that one library serves, best first."""
    return tuple(name for name, lane in LANES.items() if lane.library == library)


def board_code(name: str) -> int:
    """The code of a lane on the status board; 0 for none, or one that this build lacks."""
    lane = LANES.get(name)
    return 0 if lane is None else lane.board_code


def board_names() -> dict[int, str]:
    """Lane names by their code on the status board."""
    return {lane.board_code: name for name, lane in LANES.items()}

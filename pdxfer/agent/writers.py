"""Who may write into a decode worker's pages: told to the worker before any of them can.

A worker whose agent has died decides by itself when its pages are its own again. What its agent
placed itself (tcp) ended with the agent. Where the prefill agents write by their own system calls
(cma), each of their processes has to end too: so the worker holds a descriptor of every one that it
was told of, and its board says which transfer is whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.fabric.lanes import board_code
from pdxfer.local.messages import TransferWriters, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.agent.lanes import Lanes
    from pdxfer.agent.neighbours import Neighbours
    from pdxfer.agent.ports import WorkerPort
    from pdxfer.protocol.decode.live_receive import LiveReceive


class Writers:
    """Tells the workers of one decode agent who may write. Loop thread only.

    Args:
        lanes: of this agent.
        neighbours: where the descriptors of the writers' processes are.
        reach: the lanes that a prefill life may still come to use, the present one first.
    """

    def __init__(
        self, lanes: Lanes, neighbours: Neighbours, reach: Callable[[bytes], Sequence[str]]
    ) -> None:
        self._lanes = lanes
        self._neighbours = neighbours
        self._reach = reach

    def note(self, port: WorkerPort, receiving: LiveReceive) -> None:
        """Before the first prefill worker is told pages of a receive: put down who may write them.

        The board then has its generation, the number of processes that may write by themselves and
        the incarnation of one of them, with their lane; where this agent places all that lands, the
        number is 0, and life and lane are those of a peer. `TransferWriters` lists several.
        """
        slot, sequence = receiving.slot, port.slots.get(receiving.slot)
        if sequence is None or port.told.get(slot) == sequence:
            return
        port.told[slot] = sequence
        peers = sorted({peer for peer, _ in receiving.legs})
        foreign = {peer: lane for peer in peers if (lane := self._lane_by_process(peer))}
        for peer in foreign:
            self._hand_over(port, peer)
        if len(foreign) > 1:
            port.connection.send(
                TransferWriters(transfer=slot, sequence=sequence, incarnations=list(foreign))
            )
        lanes = list(foreign.values()) or [name for peer in peers for name in self._reach(peer)]
        port.board.set_details(
            slot,
            generation=receiving.generation,
            lane_code=board_code(lanes[0] if lanes else ""),
            peer_incarnation=next(iter(foreign), peers[0]),
            peer_count=len(foreign),
        )

    def _hand_over(self, port: WorkerPort, peer: bytes) -> None:
        pidfd = self._neighbours.pidfd(peer)
        if pidfd >= 0 and peer not in port.writers:
            port.writers.add(peer)
            port.connection.send(Writer(incarnation=peer), [pidfd])

    def _lane_by_process(self, peer: bytes) -> str:
        """The lane over which the process of a peer may write by itself; empty: there is none.

        Also one that it has not come to yet: a transfer that was told goes on over the next lane.
        """
        for name in self._reach(peer):
            if self._lanes.needs_pidfd(name):
                return name
        return ""

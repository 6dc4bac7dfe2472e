"""Prefill and decode machines joined by a simulated network and the in-memory lane.

One random generator decides every interleaving: control messages (numbered, lost and sent again by
real sessions), lane work, time. Nothing sleeps; a seed is a whole history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from pdxfer.agent.host import host_id
from pdxfer.agent.lanes import Lanes
from pdxfer.agent.pump import Pump
from pdxfer.agent.receiver import Receiver
from pdxfer.agent.sender import Sender
from pdxfer.errors import PdxferError
from pdxfer.fabric.base import Scope
from pdxfer.fabric.inproc import Hub, InprocFabric
from pdxfer.layout import KVLayout, Pages, Rank
from pdxfer.memory import MemoryRange
from pdxfer.protocol import effects as fx
from pdxfer.protocol.decode.machine import DecodeMachine
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Accept, Hello, LaneFailed, RegionInfo
from pdxfer.wire.version import PROTOCOL_VERSION
from tests.support.network import Network

ADDRESS = "tcp://prefill:1"


@dataclass
class Shown:
    """What a worker was told about one slot, in order."""

    states: list[State] = field(default_factory=list)
    last: fx.Show | None = None

    @property
    def state(self) -> State:
        return self.states[-1]


class Node:
    """A machine with its memory and its lane, joined by what agents ship: `Sender`, `Receiver`."""

    def __init__(self, cluster: Cluster, machine, silent: bool = True, scope=None) -> None:
        self.cluster = cluster
        self.machine = machine
        scope = scope or (Scope.SENDER if silent else Scope.NOTHING)
        self.fabric = InprocFabric(cluster.hub, machine.incarnation, scope=scope)
        self.lanes = Lanes(("inproc",), lambda lane: self.fabric)
        self.memory: dict[int, list[np.ndarray]] = {}
        half = Sender if self.is_prefill else Receiver
        also = {"near": lambda peer: True} if self.is_prefill else {}
        self.half = half(
            machine, self.lanes, memory=self.ranges, tell=self.tell, lost=self.lane_lost, **also
        )
        self.effects = Pump(machine.take_effects, self.half, self)
        self.shown: dict[tuple[int, int], Shown] = {}
        self.returned: dict[tuple[int, int], tuple[int, int]] = {}
        """(worker, slot) to the tokens and chunks below which source pages are back."""
        self.freed: list[int] = []
        self.lost: list[tuple[bytes, PdxferError]] = []
        """Sessions that the lane work gave up, with the reason."""
        self.dead = False

    @property
    def is_prefill(self) -> bool:
        return isinstance(self.machine, PrefillMachine)

    def ranges(self, worker_id: int) -> tuple[MemoryRange, ...]:
        return tuple(
            MemoryRange(part.ctypes.data, part.nbytes, part) for part in self.memory[worker_id]
        )

    def attach(
        self, worker_id: int, layout: KVLayout, rank: Rank | None = None, relayout: str = ""
    ) -> None:
        rng = np.random.default_rng(worker_id + (1 if self.is_prefill else 1000))
        memory = [
            rng.integers(0, 256, size=region.length_bytes, dtype=np.uint8)
            for region in layout.regions
        ]
        self.memory[worker_id] = memory
        infos = tuple(
            RegionInfo(address=part.ctypes.data, length_bytes=part.nbytes) for part in memory
        )
        self.machine.attach(
            Worker(
                worker_id=worker_id,
                instance="",
                rank=rank or Rank(),
                layout=layout,
                relayout=relayout or layout.relayout,
                ignore_parts=(),
                regions=infos,
            )
        )
        self.pump()

    def pump(self) -> None:
        self.effects.run()

    # -- what the control channel says -------------------------------------------------------
    def session_began(self, peer: bytes, address: str) -> None:
        """A session with a peer begins; `address` is that of a prefill agent."""
        if self.is_prefill:
            self.machine.peer_joined(peer)
        else:
            hello = Hello(
                version=PROTOCOL_VERSION, role="prefill", lanes=["inproc"], boot_id=host_id()
            )
            self.half.joined(peer, hello, "", "")
            self.machine.link_up(address, peer, self.cluster.now)
        self.pump()

    def session_lost(self, peer: bytes, reason: str) -> None:
        """The session with a peer is over."""
        if self.is_prefill:
            self.machine.peer_lost(peer, reason)
        else:
            self.half.left(peer)
            self.machine.peer_lost(peer, reason, self.cluster.now)
        self.pump()

    def on_message(self, peer: bytes, message) -> None:
        """A message of a peer, in order."""
        self.machine.on_message(peer, message, self.cluster.now)
        if not self.is_prefill and isinstance(message, Accept):
            self.half.accepted(peer)
        if self.cluster.attach_anew and isinstance(message, LaneFailed):
            self.half.lane_failed(peer, message)
        self.pump()

    def heartbeats(self) -> None:
        """Each live peer hears that this node lives."""
        for peer in list(self.machine.peers):
            self.cluster.carry(self, peer, self.machine.heartbeat(peer))

    # -- effects -----------------------------------------------------------------------------
    def do(self, effect) -> None:
        self.effects.carry_out(effect)

    def now(self) -> float:
        return self.cluster.now

    def effect_failed(self, effect, error) -> None:
        raise error

    def show(self, effect) -> None:
        shown = self.shown.setdefault((effect.worker, effect.slot), Shown())
        shown.states.append(effect.state)
        shown.last = effect

    def show_returned(self, effect) -> None:
        self.returned[effect.worker, effect.slot] = (effect.tokens, effect.chunks)

    def free(self, worker_id: int) -> None:
        self.lanes.forget(worker_id)
        self.freed.append(worker_id)

    def tell(self, peer: bytes, message) -> None:
        self.cluster.carry(self, peer, message)

    def lane_lost(self, peer: bytes, error: PdxferError) -> None:
        self.lost.append((peer, error))

    def take_lane_events(self) -> bool:
        events = self.fabric.take_events()
        for event in events:
            self.half.on_event(self.fabric, event, self.cluster.now)
            self.pump()
        return bool(events)

    def take_turn(self) -> bool:
        """Post one more interval of a large chunk."""
        if not self.is_prefill or not self.half.has_turns:
            return False
        self.half.take_turn()
        self.pump()
        return True


class Cluster:
    """Nodes, the network between them, the clock."""

    def __init__(self, seed: int, *, attach_anew: bool = False) -> None:
        self.attach_anew = attach_anew
        """Whether decode answers a broken lane, as the agent does."""
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.hub = Hub()
        self.nodes: dict[bytes, Node] = {}
        self.network = Network(self, self.rng)

    def add(self, machine, **options) -> Node:
        node = self.nodes[machine.incarnation] = Node(self, machine, **options)
        return node

    def prefill(self, **options) -> Node:
        return self.add(PrefillMachine(self.rng.randbytes(16)), **options)

    def decode(self, **options) -> Node:
        return self.add(DecodeMachine(self.rng.randbytes(16)), **options)

    def join(self, decode: Node, prefill: Node, address: str = ADDRESS) -> None:
        """Ask for a session."""
        self.network.join(decode, prefill, address)

    def carry(self, node: Node, peer: bytes, message) -> None:
        """Send a control message."""
        self.network.carry(node, peer, message)

    def deliver_one(self) -> bool:
        """The next frame of one direction arrives."""
        return self.network.deliver_one()

    def step(self) -> bool:
        """One random thing that can happen without time passing; False when nothing can."""
        actions = [self.deliver_one, self.network.notice_one, lambda: self.hub.step(self.rng)]
        nodes = [node for node in self.nodes.values() if not node.dead]
        actions += [node.take_lane_events for node in nodes]
        actions += [node.take_turn for node in nodes]
        self.rng.shuffle(actions)
        return any(action() for action in actions)

    def run(self, steps: int = 100_000) -> None:
        """Until nothing moves."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError("the cluster does not come to rest")

    def pass_time(self, seconds: float, *, heartbeats: bool = True) -> None:
        """Tick in small steps, each live pair exchanging heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for node in list(self.nodes.values()):
                if node.dead:
                    continue
                if heartbeats:
                    node.heartbeats()
                node.machine.tick(self.now)
                node.pump()
            self.network.tick()
            self.run()

    def kill(self, node: Node) -> None:
        """The process dies: no message, no write, no event of it any more."""
        node.dead = True
        self.network.forget(node.machine.incarnation)
        self.hub.kill(node.fabric)


def full(ids) -> dict[str, Pages]:
    """Pages of the only group."""
    return {"full": Pages(np.asarray(ids, dtype=np.int64), 0)}

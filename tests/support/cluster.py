"""Prefill and decode machines joined by a simulated network and the in-memory lane.

One random generator decides every interleaving: control messages (numbered, lost and sent again by
real sessions), lane work, time. Nothing sleeps; a seed is a whole history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdxfer.errors import PdxferError
from pdxfer.fabric.base import (
    Cancelled,
    CommitArrived,
    CommitSent,
    PathClosed,
    PathOpened,
    Posted,
    RemoteRegion,
    SenderLost,
)
from pdxfer.fabric.inproc import Hub, InprocFabric, InprocPath
from pdxfer.layout import KVLayout, Pages, Rank
from pdxfer.protocol import effects as fx
from pdxfer.protocol.decode.machine import DecodeMachine
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire import codec
from pdxfer.wire.messages import Attach, LaneFailed, RegionInfo
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
    """A machine with its memory and its lane; carries out effects."""

    def __init__(self, cluster: Cluster, machine, silent: bool = True) -> None:
        self.cluster = cluster
        self.machine = machine
        self.fabric = InprocFabric(cluster.hub, machine.incarnation, handler_proves_silence=silent)
        self.memory: dict[int, list[np.ndarray]] = {}
        self.regions: dict[int, list] = {}
        self.tickets: dict[tuple[bytes, int], int] = {}
        self.paths: dict[bytes, InprocPath] = {}
        """As the agent keeps them: until it has heard of their end."""
        self.receive_sides: dict[bytes, int] = {}
        """Sender to the revision of the first `Attach` that named its receive side."""
        self.shown: dict[tuple[int, int], Shown] = {}
        self.freed: list[int] = []
        self.dead = False

    @property
    def is_prefill(self) -> bool:
        return isinstance(self.machine, PrefillMachine)

    def attach(
        self, worker_id: int, layout: KVLayout, rank: Rank | None = None, relayout: str = ""
    ) -> None:
        rng = np.random.default_rng(worker_id + (1 if self.is_prefill else 1000))
        memory = [
            rng.integers(0, 256, size=region.length_bytes, dtype=np.uint8)
            for region in layout.regions
        ]
        self.memory[worker_id] = memory
        self.regions[worker_id] = [
            self.fabric.register(part.ctypes.data, part.nbytes, part) for part in memory
        ]
        infos = tuple(
            RegionInfo(address=part.ctypes.data, length_bytes=part.nbytes, rkeys={"inproc": b"k"})
            for part in memory
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
        while effects := self.machine.take_effects():
            for effect in effects:
                self.do(effect)

    # -- what the control channel says -------------------------------------------------------
    def session_began(self, peer: bytes, address: str) -> None:
        """A session with a peer begins; `address` is that of a prefill agent."""
        if self.is_prefill:
            self.machine.peer_joined(peer)
        else:
            self.machine.link_up(address, peer, self.cluster.now)
        self.pump()

    def session_lost(self, peer: bytes, reason: str) -> None:
        """The session with a peer is over."""
        if self.is_prefill:
            self.machine.peer_lost(peer, reason)
        else:
            self.close_receive_side(peer)
            self.machine.peer_lost(peer, reason, self.cluster.now)
        self.pump()

    def on_message(self, peer: bytes, message) -> None:
        """A message of a peer, in order."""
        self.machine.on_message(peer, message, self.cluster.now)
        if self.cluster.attach_anew and isinstance(message, LaneFailed):
            self.lane_failed(peer, message.revision)
        self.pump()

    def heartbeats(self) -> None:
        """Each live peer hears that this node lives."""
        for peer in list(self.machine.peers):
            self.cluster.carry(self, peer, self.machine.heartbeat(peer))

    # -- effects -----------------------------------------------------------------------------
    def do(self, effect) -> None:
        match effect:
            case fx.Tell():
                self.cluster.carry(self, effect.peer, effect.message)
            case fx.Announce():
                self.cluster.carry(self, effect.peer, self.announcement(effect.peer))
            case fx.Show():
                shown = self.shown.setdefault((effect.worker, effect.slot), Shown())
                shown.states.append(effect.state)
                shown.last = effect
            case fx.Free():
                self.freed.append(effect.worker)
            case fx.OpenPath():
                self.paths[effect.peer] = self.fabric.connect(effect.peer, effect.address, 1.0)
            case fx.ClosePath():
                path = self.paths.get(effect.peer)
                if path is None:
                    self.machine.on_path_closed(effect.peer, "", drained=True)
                else:
                    path.close()
            case fx.Post():
                self.post(effect)
            case fx.PostCommit():
                self.commit(effect)
            case fx.Cancel():
                path = self.paths.get(effect.peer)
                if path is not None and not path.closed:  # else its PathClosed is on the way
                    path.cancel(effect.generation)
            case fx.WatchSender():
                try:
                    self.fabric.watch_sender(effect.peer, effect.address)
                except PdxferError as error:
                    self.machine.sender_lost(effect.peer, str(error), "", self.cluster.now)

    def commit(self, effect: fx.PostCommit) -> None:
        path = self.fabric.paths.get(effect.peer)
        worker = effect.payload.source_worker
        if not self.machine.commits(effect.peer, effect.generation, worker):
            return
        if path is None:
            self.machine.on_commit_sent(
                effect.peer, effect.generation, worker, error="the path is gone"
            )
            return
        ticket = path.commit(effect.generation, codec.encode_commit(effect.payload))
        self.tickets[effect.peer, ticket] = worker

    def post(self, effect: fx.Post) -> None:
        infos = self.machine.peers[effect.peer].workers[effect.destination_worker].regions
        destination = [RemoteRegion(i.address, i.length_bytes, b"k") for i in infos]
        if effect.peer not in self.fabric.paths:
            for _ in effect.splits[1:]:
                self.machine.on_batch(
                    effect.peer,
                    effect.generation,
                    effect.source_worker,
                    length_bytes=0,
                    error="the path is gone",
                )
            return
        tickets = self.fabric.paths[effect.peer].post(
            effect.generation,
            effect.runs,
            effect.splits,
            self.regions[effect.source_worker],
            destination,
        )
        for ticket in tickets:
            self.tickets[effect.peer, ticket] = effect.source_worker

    def announcement(self, peer: bytes):
        if self.is_prefill:
            template = self.machine.peers[peer].accept_template()
            return msgspec.structs.replace(template, lane_address=self.fabric.send_address())
        revision, address = self.machine.next_revision(), self.fabric.open_receiver(peer)
        self.receive_sides.setdefault(peer, revision)
        return Attach(
            revision=revision,
            workers=[worker.info() for worker in self.machine.workers.values()],
            siblings=[
                msgspec.structs.replace(worker.info(), regions=[])
                for worker in self.machine.sources.siblings(peer)
            ],
            lane="inproc",
            lane_address=address,
        )

    @property
    def proof(self) -> str:
        """What the end of a receive side proves here."""
        return "revoked" if self.fabric.capabilities.handler_proves_silence else ""

    def close_receive_side(self, peer: bytes) -> None:
        """End it, if it is there."""
        if self.receive_sides.pop(peer, None) is not None:
            self.fabric.close_receiver(peer)
            self.machine.receiver_closed(peer, self.proof)

    def lane_failed(self, peer: bytes, revision: int) -> None:
        """Attach anew, unless it is an earlier receive side that failed."""
        if revision >= self.receive_sides.get(peer, 0):
            self.close_receive_side(peer)
            self.machine.announce_to(peer)

    def take_lane_events(self) -> bool:
        events = self.fabric.drain()
        now = self.cluster.now
        for event in events:
            match event:
                case PathOpened():
                    if event.error:
                        self.paths.pop(event.peer, None)
                    self.machine.on_path_opened(event.peer, event.error)
                case Posted():
                    worker = self.tickets.pop((event.peer, event.ticket))
                    self.machine.on_batch(
                        event.peer,
                        event.generation,
                        worker,
                        length_bytes=event.length_bytes,
                        error=event.error,
                    )
                case CommitSent():
                    worker = self.tickets.pop((event.peer, event.ticket))
                    self.machine.on_commit_sent(
                        event.peer, event.generation, worker, error=event.error
                    )
                case Cancelled():
                    self.machine.on_cancelled(event.peer, event.generation)
                case PathClosed():
                    self.paths.pop(event.peer, None)
                    self.machine.on_path_closed(event.peer, event.error, drained=event.drained)
                case CommitArrived():
                    self.machine.on_commit(event.peer, codec.decode_commit(event.payload), now)
                case SenderLost():
                    self.receive_sides.pop(event.peer, None)
                    self.machine.sender_lost(event.peer, event.error, self.proof, now)
            self.pump()
        return bool(events)


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

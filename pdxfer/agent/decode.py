"""The decode agent: the decode machine, a link per prefill address, receivers, its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdxfer.agent.base import Agent
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.lanes import MakeFabric
from pdxfer.agent.ports import WorkerPort
from pdxfer.agent.receiver import Receiver
from pdxfer.agent.requests import given_places, inheritance
from pdxfer.agent.writers import Writers
from pdxfer.control.keys import load_client_keys
from pdxfer.control.link import ControlLink
from pdxfer.control.links import Links
from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    PeerError,
)
from pdxfer.fabric.base import Fabric, FabricEvent, SenderLost
from pdxfer.layout import PlanSummary
from pdxfer.local.messages import (
    AbortTransfer,
    Connected,
    ConnectPeer,
    FromWorker,
    HeldTransfer,
    OpenReceive,
    PlacePages,
    Refused,
    TransferStatus,
    Verdict,
    WritersEnded,
)
from pdxfer.protocol.decode.machine import DecodeMachine
from pdxfer.protocol.effects import Effect
from pdxfer.protocol.state import FINAL
from pdxfer.protocol.workers import Worker, rank_info
from pdxfer.wire.messages import (
    Accept,
    Hello,
    LaneFailed,
    Message,
    Place,
    Receive,
)

_LOG = logging.getLogger("pdxfer.agent")


@dataclass(slots=True)
class _Connecting:
    """A `connect` that waits for its verdict."""

    port: WorkerPort
    request: int
    prefill: tuple[str, ...]
    deadline: float


class DecodeAgent(Agent):
    """Serves decode workers; prefill agents write into their pages."""

    def __init__(self, config: AgentConfig, make_fabric: MakeFabric) -> None:
        super().__init__(config, make_fabric)
        self.machine = DecodeMachine(self.incarnation)
        self._keys = (
            load_client_keys(config.key_file, config.server_key) if config.key_file else None
        )
        self._links = Links(self.machine, self._make_link, self._on_refused)
        self._receiver = Receiver(
            self.machine,
            self.lanes,
            memory=self.memory_of,
            tell=self.tell,
            lost=self._lane_lost,
        )
        self._writers = Writers(self.lanes, self.neighbours, self._receiver.reach)
        self._connecting: list[_Connecting] = []

    async def stop(self, reason: str) -> None:
        """Say goodbye to every peer and close everything."""
        await self._links.close(reason)
        self.close()

    @property
    def addresses(self) -> list[str]:
        """A decode agent has no addresses: nobody connects to it."""
        return []

    def machine_effects(self) -> list[Effect]:
        """What the machine asks for."""
        return self.machine.take_effects()

    def live_transfers(self) -> int:
        """How many receives are not final."""
        return len(self.machine.live)

    def transfer_statuses(self) -> list[TransferStatus]:
        """The receives that are not final, one by one."""
        return [
            TransferStatus(
                worker_id=receiving.worker,
                room=receiving.room,
                generation=receiving.generation,
                state=receiving.state.name,
                peers=sorted(peer.hex() for peer in receiving.unproven),
                reason=str(receiving.error or ""),
            )
            for receiving in self.machine.live.values()
        ]

    def tick(self, now: float) -> None:
        """Deadlines of receives and of pending connects."""
        self.machine.tick(now)
        self._answer_connecting()
        self._links.drop_idle(now)
        for peer in self.neighbours.peers:
            if peer not in self.machine.peers:  # nothing that it knew of is alive
                self.neighbours.forget(peer)

    # -- workers -----------------------------------------------------------------------------
    def attach_worker(self, worker: Worker, held: list[HeldTransfer]) -> None:
        """A worker came, with pages that an earlier life of its agent had told."""
        self.machine.attach(worker)
        for each in held:
            prefill = self._links.ensure(each.prefill, self.now())
            self.ports[worker.worker_id].take_slot(each.transfer, each.sequence, each.room)
            self.machine.inherit(inheritance(worker.worker_id, each, prefill), self.now())

    def detach_worker(self, worker_id: int, reason: str) -> None:
        """A worker went away."""
        self.machine.detach(worker_id, reason, self.now())

    def on_request(self, port: WorkerPort, message: FromWorker) -> None:
        """Act on a worker's `connect`, `receive` or `place`."""
        match message:
            case ConnectPeer():
                self._connect(port, message)
            case OpenReceive():
                self._receive(port, message)
            case WritersEnded():
                self.machine.writers_ended(port.attached.worker_id, message.transfer)
            case PlacePages():
                worker_id, place = port.attached.worker_id, given_places(message.place)
                self.machine.place(worker_id, message.transfer, place, now=self.now())
            case _:
                raise LocalProtocolError(
                    f"a decode agent takes no {type(message).__name__}; use pdxfer-prefill's socket"
                )

    def _connect(self, port: WorkerPort, message: ConnectPeer) -> None:
        _ = port.attached
        prefill = self._links.ensure(message.prefill, self.now())
        deadline = self.now() + message.timeout_s
        self._connecting.append(_Connecting(port, message.request, prefill, deadline))
        self._answer_connecting()

    def _receive(self, port: WorkerPort, message: OpenReceive) -> None:
        worker = port.attached
        port.open_slot(message)
        self.refuse_when_draining()
        place = None if message.place is None else given_places(message.place)
        prefill = self._links.ensure(message.prefill, self.now())
        receiving = self.machine.receive(
            worker.worker_id,
            message.room,
            message.transfer,
            prefill,
            deadline=self.now() + message.deadline_s,
            now=self.now(),
            unreachable_s=message.unreachable_s,
            must_exist=message.must_exist,
            place=place,
        )
        if receiving.state in FINAL and receiving.error is not None:
            raise receiving.error  # known already: it is the answer

    def on_abort(self, port: WorkerPort, message: AbortTransfer) -> None:
        """The worker gives a receive up."""
        self.machine.abort(port.attached.worker_id, message.transfer, message.reason, self.now())

    def _answer_connecting(self) -> None:
        """Answer every pending `connect` whose verdict is known or whose time is over."""
        waiting, self._connecting = self._connecting, []
        for pending in waiting:
            worker = pending.port.worker
            if worker is None or worker.worker_id not in self.machine.workers:
                continue
            try:
                found = self.machine.summary(worker.worker_id, pending.prefill)
                if isinstance(found, str) and self.now() >= pending.deadline:
                    raise PeerError(f"connect timed out: {found}", retryable=True)
            except PdxferError as error:
                self._tell_connected(pending, None, error)
                continue
            if isinstance(found, str):
                self._connecting.append(pending)
                continue
            self._tell_connected(pending, found, None)

    def _tell_connected(
        self, pending: _Connecting, summary: dict[str, object] | None, error: PdxferError | None
    ) -> None:
        """The verdict of a `connect`, with one of each pair as far as they are known."""
        worker = pending.port.attached
        pairs = self.machine.pair_verdicts(worker.worker_id, pending.prefill)
        pending.port.connection.send(
            Connected(
                request=pending.request,
                summary=summary,
                error=None if error is None else Refused(**error.to_wire()),
                verdicts=[
                    Verdict(rank=rank_info(rank), summary=found.to_wire())
                    if isinstance(found, PlanSummary)
                    else Verdict(rank=rank_info(rank), error=Refused(**found.to_wire()))
                    for rank, found in pairs.items()
                ],
            )
        )

    # -- links -------------------------------------------------------------------------------
    def _make_link(self, control: str) -> ControlLink:
        return ControlLink(
            self.incarnation,
            control,
            keys=self._keys,
            hello=self.hello(),
            on_message=lambda peer, message: self._on_peer_message(control, peer, message),
            on_session=lambda peer, hello: self._on_session(control, peer, hello),
            on_lost=lambda peer, reason: self._on_lost(control, peer, reason),
            on_broken=lambda peer: self._on_broken(control, peer),
            heartbeat=self.machine.heartbeat,
        )

    def _on_refused(self, control: str, error: PdxferError) -> None:
        self.machine.link_refused(control, error, self.now())
        self._answer_connecting()
        self.pump()

    def _on_session(self, control: str, peer: bytes, hello: Hello) -> None:
        self._leave(peer, "it has begun a new session")
        join: Callable[[str], None] = lambda apart: self._join(control, peer, hello, apart)  # noqa: E731
        self.neighbours.meet(peer, hello, join)

    def _join(self, control: str, peer: bytes, hello: Hello, apart: str) -> None:
        """Take up a session; `apart` says why its life is no neighbour, empty where it is one."""
        try:
            usable = self._receiver.joined(peer, hello, self.ucx_version(), apart)
        except PeerError as error:
            self._on_refused(control, error)
            return
        fields = {"peer": peer.hex()[:12], "address": control, "lanes": usable}
        _LOG.info("session_opened", extra={"fields": fields})
        self.machine.link_up(control, peer, self.now())
        self.pump()

    def on_neighbour_dead(self, peer: bytes) -> None:
        """Take the end of a prefill process as proof that it writes nothing more."""
        link = self._link_to(peer)
        if link is not None and link.peer == peer:
            link.end("its process has ended")  # what it has not been told of fails here
        self.machine.sender_dead(peer)

    def on_neighbour_silent(self, peer: bytes) -> None:
        """Take the word of a prefill life that it has closed its lanes; its process may live on."""
        link = self._link_to(peer)
        if link is not None and link.peer == peer:
            link.end("it has closed")
        self.machine.sender_silent(peer)
        self.pump()

    def _on_broken(self, control: str, peer: bytes) -> None:
        """End a session whose control connection and lane have both broken."""
        link = self._links.get(control)
        if link is not None and not self._receiver.serves(peer):
            link.end("its connections broke")

    def _on_lost(self, control: str, peer: bytes, reason: str) -> None:
        _LOG.info("session_lost", extra={"fields": {"peer": peer.hex()[:12], "reason": reason}})
        self._leave(peer, reason)
        self.machine.link_troubled(control, reason)
        self._answer_connecting()
        self.pump()
        self._links.watch(control)

    def _leave(self, peer: bytes, reason: str) -> None:
        """A session is over: another one writes to another receive side; this one ends."""
        self.neighbours.stop_meeting(peer)
        self._receiver.left(peer)
        self.machine.peer_lost(peer, reason, self.now())

    def _on_peer_message(self, control: str, peer: bytes, message: Message) -> None:
        try:
            self.machine.on_message(peer, message, self.now())
            if isinstance(message, Accept):
                self._receiver.accepted(peer)
            elif isinstance(message, LaneFailed):
                self._receiver.lane_failed(peer, message)
        finally:  # a ProtocolError ends the session in the control channel, which calls _on_lost
            self._answer_connecting()
            self.pump()

    def _lane_lost(self, peer: bytes, error: PdxferError) -> None:
        """Tell those who wait why no lane is left; another session tries all lanes again."""
        known = self.machine.peers.get(peer)
        control = known.address if known is not None else ""
        told = PeerError(f"{error} (at {control})", retryable=True, fields=error.fields)
        self._end_session(peer, told)
        if control:
            self._on_refused(control, told)

    def tell(self, peer: bytes, message: Message) -> None:
        """Send a control message; the session with a peer that cannot be told is ended."""
        link = self._link_to(peer)
        if link is None:
            return
        if isinstance(message, Place) or (isinstance(message, Receive) and message.place):
            self._note_writers(message.generation)
        try:
            link.send(message)
        except PdxferError as error:
            lost = error
            self.effects.later(lambda: self._end_session(peer, lost))

    def _note_writers(self, generation: int) -> None:
        receiving = self.machine.live.get(generation)
        port = self.ports.get(receiving.worker) if receiving is not None else None
        if receiving is not None and port is not None:
            self._writers.note(port, receiving)

    def _link_to(self, peer: bytes) -> ControlLink | None:
        known = self.machine.peers.get(peer)
        return None if known is None else self._links.get(known.address)

    def _end_session(self, peer: bytes, error: PdxferError) -> None:
        fields = {"peer": peer.hex()[:12], "reason": str(error)}
        _LOG.warning("session_ended", extra={"fields": fields})
        link = self._link_to(peer)
        if link is not None and link.peer == peer:
            link.refuse(error)
        self._leave(peer, str(error))  # also without a session any more

    # -- lanes -------------------------------------------------------------------------------
    @property
    def lane_work(self) -> Receiver:
        """Receive sides and the generations on them."""
        return self._receiver

    def on_fabric(self, fabric: Fabric, event: FabricEvent) -> None:
        """Something happened on a lane."""
        self._receiver.on_event(fabric, event, self.now())
        if isinstance(event, SenderLost):
            link = self._link_to(event.peer)
            if link is not None and link.peer == event.peer and not link.is_connected:
                link.end("its connections broke")
        self._answer_connecting()

"""The prefill agent: the prefill machine, a ROUTER socket, sending paths, the workers beside it."""

from __future__ import annotations

import contextlib
import logging

from pdxfer.agent.base import Agent
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.event_watch import EventWatch, Then
from pdxfer.agent.lanes import MakeFabric
from pdxfer.agent.ports import WorkerPort
from pdxfer.agent.requests import given_chunk
from pdxfer.agent.sender import Sender
from pdxfer.control.keys import load_server_keys
from pdxfer.control.server import ControlServer
from pdxfer.errors import LocalProtocolError, PdxferError, PeerError
from pdxfer.fabric.base import (
    Fabric,
    FabricEvent,
)
from pdxfer.local import events
from pdxfer.local.messages import (
    AbortTransfer,
    BeginChunk,
    FromWorker,
    HeldTransfer,
    LayerDone,
    OpenSend,
    SendChunk,
    TransferStatus,
)
from pdxfer.protocol.effects import Effect
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Hello, Message

_LOG = logging.getLogger("pdxfer.agent")


class PrefillAgent(Agent):
    """Serves prefill workers and writes their pages to decode agents."""

    def __init__(self, config: AgentConfig, make_fabric: MakeFabric) -> None:
        super().__init__(config, make_fabric)
        self.machine = PrefillMachine(self.incarnation)
        self._address = ""
        self._sender = Sender(
            self.machine,
            self.lanes,
            memory=self.memory_of,
            tell=self.tell,
            lost=self._end_session,
            near=self.neighbours.is_near,
        )
        self._turn_asked = False
        self._events = EventWatch(self._on_event)
        self._control = ControlServer(
            self.incarnation,
            config.bind,
            advertise_host=config.advertise,
            keys=load_server_keys(config.key_file, config.client_keys) if config.key_file else None,
            insecure=config.insecure,
            on_message=self._on_peer_message,
            on_session=self._on_session,
            on_lost=self._on_lost,
            heartbeat=self.machine.heartbeat,
        )

    async def start(self) -> None:
        """Bind the control socket, then serve workers."""
        self._address = await self._control.start()
        await super().start()

    async def stop(self, reason: str) -> None:
        """Say goodbye to every peer and close everything."""
        self._events.close()
        await self._control.close(reason)
        self.close()

    @property
    def addresses(self) -> list[str]:
        """What decode passes as `prefill=`."""
        return [self._address]

    def machine_effects(self) -> list[Effect]:
        """What the machine asks for."""
        return self.machine.take_effects()

    def live_transfers(self) -> int:
        """How many sends are not final."""
        return len(self.machine.sendings)

    def transfer_statuses(self) -> list[TransferStatus]:
        """The sends that are not final, one by one."""
        return [
            TransferStatus(
                worker_id=sending.worker,
                room=sending.room,
                generation=0,
                state=sending.state.name,
                peers=sorted({peer.hex() for peer, _ in sending.legs}),
                reason=str(sending.error or ""),
            )
            for sending in self.machine.sendings.values()
        ]

    def tick(self, now: float) -> None:
        """Deadlines and leases."""
        self.machine.tick(now)

    # -- workers -----------------------------------------------------------------------------
    def attach_worker(self, worker: Worker, held: list[HeldTransfer]) -> None:
        """A worker came. What a dead agent read of it has ended with that."""
        self.machine.attach(worker)

    def detach_worker(self, worker_id: int, reason: str) -> None:
        """A worker went away."""
        self.machine.detach(worker_id, reason)

    def on_request(self, port: WorkerPort, message: FromWorker) -> None:
        """Act on a worker's `open` or `send`."""
        match message:
            case OpenSend():
                self._open(port, message)
            case SendChunk():
                worker_id, chunk = port.attached.worker_id, given_chunk(message.chunk)
                self.machine.send(worker_id, message.transfer, chunk)
            case BeginChunk():
                worker_id, chunk = port.attached.worker_id, given_chunk(message.chunk)
                self.machine.begin(worker_id, message.transfer, chunk)
            case LayerDone():
                self._layer_done(port, message)
            case _:
                raise LocalProtocolError(
                    f"a prefill agent takes no {type(message).__name__}; use pdxfer-decode's socket"
                )

    def _open(self, port: WorkerPort, message: OpenSend) -> None:
        worker = port.attached
        port.open_slot(message)
        self.refuse_when_draining()
        chunk = None if message.chunk is None else given_chunk(message.chunk)
        self.machine.open(
            worker.worker_id,
            message.room,
            message.transfer,
            deadline=self.now() + message.deadline_s,
            lease_s=message.lease_s,
            chunk=chunk,
        )

    def _layer_done(self, port: WorkerPort, message: LayerDone) -> None:
        """Let a layer go, after its event: that is asked off this loop."""
        event = events.take(message.event) if message.event else None
        if not port.is_use(message):
            return  # the send has ended, and its worker has seen it
        if event is None:
            self.machine.layer_done(port.attached.worker_id, message.transfer, message.layer)
            return

        def then(error: Exception | None) -> None:
            if not port.is_use(message):
                return
            if error is not None:
                reason = f"the event of layer {message.layer} cannot be asked: {error!r}"
                self.machine.abort(port.attached.worker_id, message.transfer, reason)
            else:
                self.machine.layer_done(port.attached.worker_id, message.transfer, message.layer)
            self.pump()

        self._events.add(event, then)

    def _on_event(self, then: Then, error: Exception | None) -> None:
        """An event is done, on the thread that asks; nothing follows on a loop that is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(then, error)

    def on_abort(self, port: WorkerPort, message: AbortTransfer) -> None:
        """The worker gives a send up."""
        self.machine.abort(port.attached.worker_id, message.transfer, message.reason)

    # -- peers -------------------------------------------------------------------------------
    def _on_session(self, peer: bytes, hello: Hello) -> None:
        fields = {"peer": peer.hex()[:12], "lanes": hello.lanes, "ucx": hello.ucx_version}
        _LOG.info("session_opened", extra={"fields": fields})
        self.machine.peer_joined(peer)
        self.neighbours.expect(peer, hello)
        self._control.send(peer, self.hello(peer))
        self.pump()

    def _on_lost(self, peer: bytes, reason: str) -> None:
        _LOG.info("session_lost", extra={"fields": {"peer": peer.hex()[:12], "reason": reason}})
        self.machine.peer_lost(peer, reason)
        self.neighbours.forget(peer)
        self.pump()

    def _on_peer_message(self, peer: bytes, message: Message) -> None:
        try:
            self.machine.on_message(peer, message, self.now())
        finally:  # a ProtocolError ends the session in the control channel, which calls _on_lost
            self.pump()

    def on_neighbour_dead(self, peer: bytes) -> None:
        """End what is bound to a decode life: its process has ended, so nothing more comes."""
        text = f"the process of decode agent {peer.hex()[:12]} has ended"
        self._end_session(peer, PeerError(text, retryable=True))

    def on_neighbour_silent(self, peer: bytes) -> None:
        """Decode writes nothing anyway; its goodbye comes on the control channel."""

    def _end_session(self, peer: bytes, error: PdxferError) -> None:
        fields = {"peer": peer.hex()[:12], "reason": str(error)}
        _LOG.warning("session_ended", extra={"fields": fields})
        self._control.refuse(peer, error)
        self.machine.peer_lost(peer, str(error))  # also where there was no session any more

    def tell(self, peer: bytes, message: Message) -> None:
        """Send a control message; the session with a peer that cannot be told is ended."""
        try:
            self._control.send(peer, message)
        except PdxferError as error:
            if peer in self.machine.peers and not self.machine.peers[peer].gone:
                lost = error
                self.effects.later(lambda: self._end_session(peer, lost))

    # -- lanes -------------------------------------------------------------------------------
    @property
    def lane_work(self) -> Sender:
        """Paths, posts, commits."""
        return self._sender

    def pump(self) -> None:
        """Carry out what the machine asks for; large chunks go on behind what else there is."""
        super().pump()
        if self._sender.has_turns and not self._turn_asked:
            self._turn_asked = True
            self.loop.call_soon(self._take_turn)

    def on_fabric(self, fabric: Fabric, event: FabricEvent) -> None:
        """Something happened on a lane."""
        self._sender.on_event(fabric, event, self.now())

    def _take_turn(self) -> None:
        self._turn_asked = False
        self._sender.take_turn()
        self.pump()

"""The prefill agent: the prefill machine, a ROUTER socket, sending paths, the workers beside it."""

from __future__ import annotations

import contextlib
import logging

import msgspec

from pdxfer import limits
from pdxfer.agent.base import Agent
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.lanes import MakeFabric
from pdxfer.agent.ports import WorkerPort, to_pages
from pdxfer.control.keys import load_server_keys
from pdxfer.control.server import ControlServer
from pdxfer.errors import LocalProtocolError, PdxferError, PeerError
from pdxfer.fabric.base import (
    Cancelled,
    CommitSent,
    Fabric,
    FabricEvent,
    Path,
    PathClosed,
    PathOpened,
    Posted,
    RemoteRegion,
)
from pdxfer.layout import Pages
from pdxfer.local.messages import (
    AbortTransfer,
    Chunk,
    FromWorker,
    OpenSend,
    SendChunk,
    TransferStatus,
)
from pdxfer.protocol.effects import Announce, Cancel, ClosePath, Effect, OpenPath, Post, PostCommit
from pdxfer.protocol.prefill.machine import PrefillMachine
from pdxfer.protocol.workers import Worker
from pdxfer.wire.codec import encode_commit
from pdxfer.wire.messages import Hello, Message

_LOG = logging.getLogger("pdxfer.agent")


class PrefillAgent(Agent):
    """Serves prefill workers and writes their pages to decode agents."""

    def __init__(self, config: AgentConfig, make_fabric: MakeFabric) -> None:
        super().__init__(config, make_fabric)
        self.machine = PrefillMachine(self.incarnation)
        self._address = ""
        self._paths: dict[bytes, Path] = {}
        self._tickets: dict[tuple[bytes, int], int] = {}
        """(peer, ticket) to source worker."""
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
        """Sends that are not final."""
        return len(self.machine.sendings)

    def transfer_statuses(self) -> list[TransferStatus]:
        """Sends that are not final."""
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
    def attach_worker(self, worker: Worker) -> None:
        """A worker came."""
        self.machine.attach(worker)

    def detach_worker(self, worker_id: int, reason: str) -> None:
        """A worker went away."""
        self.machine.detach(worker_id, reason)

    def on_request(self, port: WorkerPort, message: FromWorker) -> None:
        """`open` and `send`."""
        match message:
            case OpenSend():
                self._open(port, message)
            case SendChunk():
                self._send(port, message.transfer, message.chunk, to_pages(message.chunk.groups))
            case _:
                raise LocalProtocolError(
                    f"a prefill agent takes no {type(message).__name__}; use pdxfer-decode's socket"
                )

    def _open(self, port: WorkerPort, message: OpenSend) -> None:
        worker = port.attached
        port.open_slot(message)
        self.refuse_when_draining()
        slot, chunk = message.transfer, message.chunk
        pages = None if chunk is None else to_pages(chunk.groups)  # refused before the room is open
        deadline = self.now() + message.deadline_s
        self.machine.open(
            worker.worker_id, message.room, slot, deadline=deadline, lease_s=message.lease_s
        )
        if chunk is not None and pages is not None:
            self._send(port, slot, chunk, pages)

    def _send(self, port: WorkerPort, slot: int, chunk: Chunk, pages: dict[str, Pages]) -> None:
        self.machine.send(
            port.attached.worker_id,
            slot,
            pages,
            tokens=chunk.tokens,
            layers=chunk.layers,
            last=chunk.last,
            aux=chunk.aux,
        )

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
        """No receive of that life comes, and no commit: what is bound to it ends now."""
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
                self._end_session(peer, error)

    # -- effects -----------------------------------------------------------------------------
    def do(self, effect: Effect) -> None:
        """Paths, posts, commits."""
        match effect:
            case Announce():
                self._announce(effect.peer)
            case OpenPath():
                self._open_path(effect)
            case Post():
                self._post(effect)
            case PostCommit():
                self._commit(effect)
            case Cancel():
                self._cancel(effect)
            case ClosePath():
                path = self._paths.get(effect.peer)
                if path is None:
                    self.machine.on_path_closed(effect.peer, "", drained=True)
                else:
                    path.close()
            case _:
                raise LocalProtocolError(f"a prefill agent cannot do {type(effect).__name__}")

    def _announce(self, peer_id: bytes) -> None:
        peer = self.machine.peers.get(peer_id)
        if peer is None:
            return
        try:
            address = self.lanes.fabric(peer.path_lane).send_address()
        except PdxferError as error:
            self._end_session(peer_id, error)
            return
        accept = msgspec.structs.replace(peer.accept_template(), lane_address=address)
        self.tell(peer_id, accept)

    def _open_path(self, effect: OpenPath) -> None:
        try:
            fabric = self.lanes.fabric(effect.lane)
            if fabric.capabilities.needs_pidfd and not self.neighbours.is_near(effect.peer):
                raise PeerError(
                    f"lane {effect.lane} writes into processes of this host, and decode agent "
                    f"{effect.peer.hex()[:12]} has not proven to be one"
                )
            self._paths[effect.peer] = fabric.connect(
                effect.peer, effect.address, limits.PATH_OPEN_TIMEOUT_S
            )
        except PdxferError as error:
            self.machine.on_path_opened(effect.peer, str(error))

    def _post(self, effect: Post) -> None:
        batches = len(effect.splits) - 1
        try:
            peer = self.machine.peers[effect.peer]
            port = self.ports[effect.source_worker]
            source = self.lanes.regions(peer.path_lane, effect.source_worker, port.ranges)
            infos = peer.workers[effect.destination_worker].regions
            destination = [
                RemoteRegion(info.address, info.length_bytes, info.rkeys.get(peer.path_lane, b""))
                for info in infos
            ]
            path = self._paths[effect.peer]
            tickets = path.post(effect.generation, effect.runs, effect.splits, source, destination)
        except Exception as error:  # noqa: BLE001 - whatever it is, no commit may follow
            _LOG.warning("post_failed", extra={"fields": {"reason": repr(error)}})
            for _ in range(batches):
                self.machine.on_batch(
                    effect.peer,
                    effect.generation,
                    effect.source_worker,
                    length_bytes=0,
                    error=str(error) or type(error).__name__,
                )
            return
        for ticket in tickets:
            self._tickets[effect.peer, ticket] = effect.source_worker

    def _commit(self, effect: PostCommit) -> None:
        worker = effect.payload.source_worker
        if not self.machine.commits(effect.peer, effect.generation, worker):
            return  # a write before it could not be posted: the transfer has failed
        try:
            path = self._paths[effect.peer]
            ticket = path.commit(effect.generation, encode_commit(effect.payload))
        except (PdxferError, KeyError) as error:
            self.machine.on_commit_sent(
                effect.peer, effect.generation, worker, error=str(error) or "the path is gone"
            )
            return
        self._tickets[effect.peer, ticket] = worker

    def _cancel(self, effect: Cancel) -> None:
        path = self._paths.get(effect.peer)
        if path is None:
            return
        # A path that is closed already answers with its PathClosed, which alone knows whether
        # bytes that had left may still land: never with a Cancelled made up here.
        with contextlib.suppress(LocalProtocolError):
            path.cancel(effect.generation)

    def on_fabric(self, fabric: Fabric, event: FabricEvent) -> None:
        """Something happened on a lane."""
        machine = self.machine
        match event:
            case PathOpened():
                self._on_path_opened(event)
            case Posted():
                machine.on_batch(
                    event.peer,
                    event.generation,
                    self._tickets.pop((event.peer, event.ticket), -1),
                    length_bytes=event.length_bytes,
                    error=event.error,
                )
            case CommitSent():
                worker = self._tickets.pop((event.peer, event.ticket), -1)
                machine.on_commit_sent(event.peer, event.generation, worker, error=event.error)
            case Cancelled():
                machine.on_cancelled(event.peer, event.generation)
            case PathClosed():
                self._paths.pop(event.peer, None)
                machine.on_path_closed(event.peer, event.error, drained=event.drained)
            case _:
                _LOG.warning("unexpected_event", extra={"fields": {"event": type(event).__name__}})

    def _on_path_opened(self, event: PathOpened) -> None:
        peer = self.machine.peers.get(event.peer)
        fields = {
            "peer": event.peer.hex()[:12],
            "lane": peer.path_lane if peer else "",
            "transports": event.transports,
            "error": event.error,
        }
        _LOG.info("path_opened", extra={"fields": fields})
        if event.error:
            path = self._paths.pop(event.peer, None)
            if path is not None:
                path.close()
        self.machine.on_path_opened(event.peer, event.error)

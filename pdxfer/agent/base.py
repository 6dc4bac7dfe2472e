"""What both agents share: workers, lanes, the pump from effects to the outside, the clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

from pdxfer import __version__, limits
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.host import host_id
from pdxfer.agent.lane_work import LaneWork
from pdxfer.agent.lanes import Lanes, MakeFabric
from pdxfer.agent.neighbours import Neighbours
from pdxfer.agent.ports import WorkerPort
from pdxfer.agent.pump import Pump
from pdxfer.errors import ConfigError, DaemonUnavailableError, PdxferError, ResourceError
from pdxfer.fabric.base import Fabric, FabricEvent
from pdxfer.local.messages import (
    AbortTransfer,
    AgentHello,
    AgentStatus,
    AskStatus,
    Attached,
    AttachWorker,
    BeginChunk,
    FromWorker,
    HeldTransfer,
    LayerDone,
    OpenReceive,
    OpenSend,
    PlacePages,
    Refused,
    ReleaseSlot,
    SendChunk,
    Together,
    TransferStatus,
    WorkerHello,
)
from pdxfer.local.server import Connection, LocalServer
from pdxfer.memory import MemoryRange
from pdxfer.protocol.effects import Effect, Show, ShowReturned
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Hello, Message
from pdxfer.wire.version import PROTOCOL_VERSION

TICK_S = 0.1
"""How often an agent looks at its deadlines, and so how late it may notice one."""
_LOG = logging.getLogger("pdxfer.agent")


_IN_USE = (SendChunk, BeginChunk, LayerDone, PlacePages)
"""Messages of a worker about a transfer that it has."""


class Agent(ABC):
    """One agent: a machine, and everything that carries out what the machine asks for.

    Threads:  the loop's thread only. No method blocks, `close` excepted (bounded).
    """

    def __init__(self, config: AgentConfig, make_fabric: MakeFabric) -> None:
        self.config = config
        self.incarnation = os.urandom(16)
        self.loop: asyncio.AbstractEventLoop
        self.ports: dict[int, WorkerPort] = {}
        """The port of each worker by its id, until the worker's memory is released."""
        self.lanes = Lanes(config.lanes, make_fabric)
        self.lanes.on_made = self._watch_fabric
        self.neighbours = Neighbours(
            self.incarnation,
            config.socket_path,
            on_dead=self._on_neighbour_dead,
            on_silent=self.on_neighbour_silent,
        )
        self._by_connection: dict[Connection, WorkerPort] = {}
        self._next_worker = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._log_lines: list[dict[str, object]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._server = LocalServer(
            config.socket_path, self, allowed_uids=config.allowed_uids or None
        )

    # -- what a role adds --------------------------------------------------------------------
    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """Control addresses of a prefill agent."""

    @abstractmethod
    def machine_effects(self) -> list[Effect]:
        """`take_effects` of the machine."""

    @abstractmethod
    def attach_worker(self, worker: Worker, held: list[HeldTransfer]) -> None:
        """Tell the machine of a new worker, and of transfers of an agent that has died.

        Raises: PdxferError: those are none of this worker's; the caller lets it go.
        """

    @abstractmethod
    def detach_worker(self, worker_id: int, reason: str) -> None:
        """Tell the machine that a worker went away."""

    @abstractmethod
    def on_request(self, port: WorkerPort, message: FromWorker) -> None:
        """A request of an attached worker; a raised `PdxferError` becomes its answer."""

    @abstractmethod
    def on_abort(self, port: WorkerPort, message: AbortTransfer) -> None:
        """A worker gives a transfer up."""

    @property
    @abstractmethod
    def lane_work(self) -> LaneWork:
        """The sender or the receiver of this agent."""

    @abstractmethod
    def tell(self, peer: bytes, message: Message) -> None:
        """Send a control message to a peer life."""

    @abstractmethod
    def on_fabric(self, fabric: Fabric, event: FabricEvent) -> None:
        """Something happened on a lane."""

    @abstractmethod
    def on_neighbour_dead(self, peer: bytes) -> None:
        """The process of a peer on this host has ended; it writes nothing more."""

    @abstractmethod
    def on_neighbour_silent(self, peer: bytes) -> None:
        """A peer on this host has closed its lanes in order; that life writes nothing more."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Time has passed."""

    @abstractmethod
    def live_transfers(self) -> int:
        """Transfers that are not final."""

    @abstractmethod
    def transfer_statuses(self) -> list[TransferStatus]:
        """What `pdxfer status` shows of the transfers that are not final."""

    # -- life --------------------------------------------------------------------------------
    async def start(self) -> None:
        """Serve workers.

        Raises:
            ResourceError: the socket cannot be bound, or none of the lanes can be had.
            ConfigError: a setting is wrong.
        """
        self.loop = asyncio.get_running_loop()
        self.neighbours.start(self.loop, listening=self.config.role == "prefill")
        self._check_lanes()
        await self._server.start(self.loop)
        self._timer = self.loop.call_later(TICK_S, self._on_timer)

    def _check_lanes(self) -> None:
        missing: dict[str, str] = {}
        for lane in self.lanes.names:
            try:
                self.lanes.fabric(lane)
            except PdxferError as error:
                missing[lane] = str(error)
            else:
                return
        text = "; ".join(f"{lane}: {why}" for lane, why in missing.items())
        raise ResourceError(f"none of the lanes can be had here: {text}", fields=missing)

    async def drain(self) -> int:
        """Refuse new transfers, wait for live ones up to the drain deadline; how many are left."""
        self._draining = True
        self._idle.clear()
        self._note_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.drain_deadline_s)
        return self.live_transfers()

    def _note_idle(self) -> None:
        if self._draining and not self.live_transfers():
            self._idle.set()

    def close(self) -> None:
        """Stop serving workers, close lanes, unmap. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._server.close()
        for fabric in self.lanes.made():
            self.loop.remove_reader(fabric.fileno())
        try:
            self.lanes.close()
            self.neighbours.close(silent=True)
        finally:  # a lane that could not be ended may write on: only the process's end proves it
            self.neighbours.close()
        for port in [*self.ports.values(), *self._by_connection.values()]:
            port.close()
            port.release_memory()
        self.ports.clear()
        self._by_connection.clear()

    def hello(self, peer: bytes = b"") -> Hello:
        """What this agent says of itself to a peer; without one, before the peer is known."""
        return Hello(
            version=PROTOCOL_VERSION,
            role=self.config.role,
            lanes=list(self.lanes.names),
            ucx_version=self.ucx_version(),
            boot_id=host_id(),
            uid=os.geteuid(),
            local_socket=self.neighbours.local_socket,
            nonce=self.neighbours.nonce(peer),
        )

    def ucx_version(self) -> str:
        """Version of the library behind the UCX lanes; empty without one."""
        return max((fabric.version for fabric in self.lanes.made()), default="")

    def now(self) -> float:
        """Seconds of the agent's monotonic clock."""
        return self.loop.time()

    # -- workers (called by the local server) ------------------------------------------------
    def on_connected(self, conn: Connection) -> None:
        """A worker connected; it says hello first."""
        _LOG.debug("worker_connected", extra={"fields": {"pid": conn.pid}})

    def on_message(self, conn: Connection, message: FromWorker, fds: list[int]) -> None:
        """Answer a worker's requests; whatever is wrong with one ends in a `Refused`."""
        for each in message.messages if isinstance(message, Together) else [message]:
            self._answer(conn, each, fds)
        self.pump()

    def _answer(self, conn: Connection, message: FromWorker, fds: list[int]) -> None:
        try:
            self._on_worker_message(conn, message, fds)
        except PdxferError as error:
            told = error.to_wire()
            conn.send(Refused(request=message.request, **told))
            self._end_refused(conn, message, str(error))
            _LOG.info(
                "request_refused",
                extra={"fields": {"pid": conn.pid, "request": type(message).__name__, **told}},
            )

    def _end_refused(self, conn: Connection, message: FromWorker, reason: str) -> None:
        """What is left of a transfer whose opening, chunk or pages were refused fails."""
        port = self._by_connection.get(conn)
        if port is None:
            return
        if isinstance(message, OpenSend | OpenReceive):
            port.refuse(message)
        elif isinstance(message, _IN_USE) and port.is_use(message):
            abort = AbortTransfer(
                transfer=message.transfer, sequence=message.sequence, reason=reason
            )
            self.on_abort(port, abort)

    def _on_worker_message(self, conn: Connection, message: FromWorker, fds: list[int]) -> None:
        port = self._by_connection.get(conn)
        if isinstance(message, WorkerHello):
            self._welcome(conn, message)
        elif isinstance(message, AskStatus):
            conn.send(self._status(message.request))
        elif port is None:
            raise ConfigError("the first message of a worker is its hello")
        elif isinstance(message, AttachWorker):
            self._attach(port, message, fds)
        elif isinstance(message, ReleaseSlot):
            port.release_slot(message)
        elif isinstance(message, AbortTransfer):
            if port.is_use(message):
                self.on_abort(port, message)
        else:
            if isinstance(message, _IN_USE) and not isinstance(message, LayerDone):
                port.check_use(message)
            self.on_request(port, message)

    def _welcome(self, conn: Connection, message: WorkerHello) -> None:
        if message.version != __version__:
            raise ConfigError(
                f"version: worker={message.version}, agent={__version__}; run the same one",
                fields={"version": f"worker={message.version}, agent={__version__}"},
            )
        if message.role != self.config.role:
            raise ConfigError(
                f"role: the worker is for {message.role}, this agent is for {self.config.role}; "
                f"use the socket of pdxfer-{message.role}",
                fields={"role": f"worker={message.role}, agent={self.config.role}"},
            )
        if conn in self._by_connection:
            raise ConfigError("this worker has said hello already")
        port = self._by_connection[conn] = WorkerPort(conn, self.incarnation)
        conn.send(
            AgentHello(
                request=message.request,
                version=__version__,
                role=self.config.role,
                incarnation=self.incarnation,
                addresses=self.addresses,
                board_slots=port.board.slots,
            ),
            [port.board.fd, port.board.eventfd],
        )

    def _status(self, request: int) -> AgentStatus:
        return AgentStatus(
            request=request,
            version=__version__,
            role=self.config.role,
            pid=os.getpid(),
            incarnation=self.incarnation,
            addresses=self.addresses,
            lanes=list(self.lanes.names),
            lanes_in_use=[fabric.lane for fabric in self.lanes.made()],
            ucx_version=self.ucx_version(),
            workers=[port.status() for port in self.ports.values()],
            live_transfers=self.live_transfers(),
            transfers=sorted(
                self.transfer_statuses(), key=lambda transfer: transfer.state != "QUARANTINED"
            )[: limits.STATUS_TRANSFERS_MAX],
            stopping=self._draining,
        )

    def _attach(self, port: WorkerPort, message: AttachWorker, fds: list[int]) -> None:
        if self._draining:
            raise self._stopping()
        if port.worker is not None:
            raise ConfigError("this worker has attached already; open another client")
        for other in self._by_connection.values():
            taken = other.worker
            if taken is None or taken.instance != message.instance:
                continue
            rank = message.rank
            if (taken.rank.tp, taken.rank.pp, taken.rank.cp) == (rank.tp, rank.pp, rank.cp):
                raise ConfigError(
                    f"rank tp={rank.tp} pp={rank.pp} cp={rank.cp} of instance {message.instance!r} "
                    f"is attached already, by process {other.connection.pid}: close that client "
                    "first, or give this worker its own rank= or instance=",
                    fields={"rank": f"tp={rank.tp}, pp={rank.pp}, cp={rank.cp}"},
                )
        worker_id, self._next_worker = self._next_worker, self._next_worker + 1
        worker = port.attach(worker_id, message, fds)
        self.ports[worker_id] = port
        self.attach_worker(worker, message.held)
        port.connection.send(Attached(request=message.request, worker_id=worker_id))
        _LOG.info(
            "worker_attached",
            extra={
                "fields": {
                    "worker": worker_id,
                    "pid": port.connection.pid,
                    "instance": worker.instance,
                    "rank": worker.rank.index,
                    "bytes": sum(part.length_bytes for part in port.ranges),
                }
            },
        )

    def on_closed(self, conn: Connection, reason: str) -> None:
        """A worker is gone: its transfers end, its memory stays until nothing can reach it."""
        port = self._by_connection.pop(conn, None)
        if port is None:
            return
        port.close()
        if port.worker is None:
            return
        fields = {"worker": port.worker.worker_id, "pid": conn.pid, "reason": reason}
        _LOG.info("worker_gone", extra={"fields": fields})
        self.detach_worker(port.worker.worker_id, reason)
        self.pump()

    def refuse_when_draining(self) -> None:
        """Raises: DaemonUnavailableError while this agent is stopping."""
        if self._draining:
            raise self._stopping()

    def _stopping(self) -> DaemonUnavailableError:
        return DaemonUnavailableError(
            f"this {self.config.role} agent is stopping: running transfers may finish, new workers "
            "and transfers go to the one that is started after it",
            retryable=True,
        )

    def memory_of(self, worker_id: int) -> tuple[MemoryRange, ...]:
        """The memory ranges of a worker, in the order of its layout's regions.

        Raises:
            KeyError: it has been released.
        """
        return self.ports[worker_id].ranges

    # -- effects -----------------------------------------------------------------------------
    @cached_property
    def effects(self) -> Pump:
        """Carries out what the machine asks for."""
        return Pump(self.machine_effects, self.lane_work, self)

    def pump(self) -> None:
        """Carry out what the machine asks for, until it asks for nothing more."""
        if self.effects.run():
            # Last: a log line is never in the way of bytes, commits and wake-ups.
            lines, self._log_lines = self._log_lines, []
            for fields in lines:
                _LOG.info("transfer", extra={"fields": fields})

    def show(self, effect: Show) -> None:
        """Tell a worker where a transfer is, and note it for the log."""
        port = self.ports.get(effect.worker)
        if port is None:
            return
        port.show(effect)
        fields = {"worker": effect.worker, "state": effect.state.name, **effect.detail}
        fields["peers"] = [peer.hex()[:12] for peer in effect.peers]
        if effect.state in (State.SENT, State.COMMITTED):
            fields.update(bytes=effect.length_bytes, runs=effect.runs, lane=effect.lane)
        if effect.error is not None:
            fields.update(error=effect.error.code, reason=str(effect.error), fence=effect.fence)
        self._log_lines.append(fields)

    def show_returned(self, effect: ShowReturned) -> None:
        """Tell a worker how many tokens' pages are its own again."""
        port = self.ports.get(effect.worker)
        if port is not None:
            port.show_returned(effect)

    def effect_failed(self, effect: Effect, error: Exception) -> None:
        """Log a fault of this program; other transfers go on."""
        fields = {"effect": type(effect).__name__}
        _LOG.error("effect_failed", exc_info=error, extra={"fields": fields})

    def free(self, worker_id: int) -> None:
        """Give up the memory of a worker that went away."""
        self.lanes.forget(worker_id)
        port = self.ports.pop(worker_id, None)
        if port is not None:
            port.release_memory()

    # -- time, lanes, neighbours -------------------------------------------------------------
    def _on_neighbour_dead(self, peer: bytes) -> None:
        _LOG.info("neighbour_dead", extra={"fields": {"peer": peer.hex()[:12]}})
        self.on_neighbour_dead(peer)
        self.pump()

    def _on_timer(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._on_timer)
        self.tick(self.now())
        self.pump()
        self._note_idle()

    def _watch_fabric(self, fabric: Fabric) -> None:
        handle: Callable[[], None] = lambda: self._on_fabric_readable(fabric)  # noqa: E731
        self.loop.add_reader(fabric.fileno(), handle)

    def _on_fabric_readable(self, fabric: Fabric) -> None:
        for event in fabric.take_events():
            try:
                self.on_fabric(fabric, event)
            except Exception:  # noqa: BLE001 - as in `pump`: no event comes a second time
                failed = {"event": type(event).__name__, "lane": fabric.lane}
                _LOG.exception("event_failed", extra={"fields": failed})
        self.pump()

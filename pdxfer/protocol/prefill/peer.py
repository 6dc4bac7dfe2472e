"""What the prefill machine keeps of one decode life: workers, verdicts, legs, dead generations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from pdxfer import limits
from pdxfer.errors import PdxferError, RemoteProtocolError, TransferError
from pdxfer.protocol.prefill.ended import EndedReceives
from pdxfer.protocol.prefill.waiting import Waiting
from pdxfer.protocol.told import ToldWorkers, Verdicts
from pdxfer.protocol.workers import Pair, Worker, missing_ranks
from pdxfer.wire.messages import Accept, Attach, PairPlan, PairReject, Receive


class PathState(Enum):
    """How far the sending path to a peer is."""

    NONE = "never opened"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(slots=True)
class DecodePeer:
    """One decode life, from its first message until its path is closed."""

    peer_id: bytes
    last_heard: float = 0.0
    gone: bool = False
    path: PathState = PathState.NONE
    lane: str = ""
    lane_address: bytes = b""
    """Address of the receive side that the last `Attach` named."""
    path_lane: str = ""
    """The lane that the path goes, or went, by: what is posted on it uses this lane's regions."""
    path_address: bytes = b""
    """Address of the receive side that the path goes, or went, to."""
    path_revision: int = 0
    """Revision of the `Attach` that the path was opened for."""
    revision: int = 0
    workers: dict[int, Worker] = field(default_factory=dict)
    siblings: list[Worker] = field(default_factory=list)
    told: ToldWorkers = field(default_factory=ToldWorkers)
    judged: Verdicts[tuple[str, int]] = field(default_factory=Verdicts)
    verdicts: dict[tuple[int, int], Pair] = field(default_factory=dict)
    own: list[Worker] = field(default_factory=list)
    """The prefill workers as they were when pairs were last judged."""
    waiting: Waiting = field(default_factory=Waiting)
    ended: EndedReceives = field(default_factory=EndedReceives)
    """Receives that ended before their send came, of all decode lives."""
    committed: dict[int, float] = field(default_factory=dict)
    """Committed generation with receives still waiting for a send that owes nothing, and when they
    are forgotten."""
    legs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Live generation to the (worker, room) of its sends here."""
    legs_bytes: int = 0
    """Bytes of the page ids of this life's live legs."""
    asked: set[int] = field(default_factory=set)
    """Generations that decode waits to hear `Drained` of."""
    mark: int = 0
    """No generation up to this one is alive at decode."""
    tombstones: set[int] = field(default_factory=set)
    moved: dict[int, None] = field(default_factory=dict)
    """Generations of which bytes were placed since the last heartbeat, in order."""
    unproven: set[int] = field(default_factory=set)
    """Generations whose path broke with writes on it: what the network still holds may land, so
    `Drained` is never said of them. Decode's own end of the connection is the proof."""
    drained_asked_by: set[bytes] = field(default_factory=set)
    """Newer lives that wait for this one to be drained."""

    def take_attach(self, message: Attach) -> None:
        """Replace what is known of the decode workers.

        Raises:
            RemoteProtocolError: a worker of the message is malformed; nothing has changed.
        """
        if len(message.workers) > limits.WORKERS_PER_AGENT_MAX:
            raise RemoteProtocolError(
                f"Attach names {len(message.workers)} workers, "
                f"at most {limits.WORKERS_PER_AGENT_MAX}"
            )
        workers, siblings = self.told.take(message.workers, message.siblings)
        self.workers = {worker.worker_id: worker for worker in workers}
        self.siblings = siblings
        self.ended.drop_verdicts(self.peer_id)
        self.revision, self.lane = message.revision, message.lane
        self.lane_address = message.lane_address

    def renew(self) -> None:
        """A new session of the same life forgets what it attached, not what is in flight."""
        self.gone = False
        self.revision, self.lane_address = 0, b""
        self.workers, self.siblings, self.verdicts = {}, [], {}
        self.waiting.clear()
        self.committed = {}

    def judge(self, own: Iterable[Worker]) -> None:
        """Give a verdict on every pair whose source instance is complete."""
        self.own = list(own)
        self.verdicts = {}
        for instance in {worker.instance for worker in self.own}:
            mine = {w.worker_id: w for w in self.own if w.instance == instance}
            sources: dict[tuple[str, int], Worker] = {("own", key): w for key, w in mine.items()}
            for index, sibling in enumerate(self.siblings):
                if sibling.instance == instance:
                    sources["sibling", index] = sibling
            attached, expected = missing_ranks(sources.values())
            if attached < expected:
                continue
            for destination in self.workers.values():
                name = (instance, destination.worker_id)
                verdicts = self.judged.judge(name, sources, destination)
                for worker_id in mine:
                    key = (worker_id, destination.worker_id)
                    self.verdicts[key] = verdicts["own", worker_id]

    def accept_template(self) -> Accept:
        """The answer to the last `Attach`; the agent adds what its send side is called."""
        plans: list[PairPlan] = []
        rejects: list[PairReject] = []
        for source in self.own:
            for destination in self.workers:
                pair = self.verdicts.get((source.worker_id, destination))
                if pair is not None and pair.error is not None:
                    rejects.append(
                        PairReject(
                            source_worker=source.worker_id,
                            destination_worker=destination,
                            code=pair.error.code,
                            text=str(pair.error),
                            fields=pair.error.fields,
                        )
                    )
                    continue
                plans.append(
                    PairPlan(
                        source_worker=source.worker_id,
                        destination_worker=destination,
                        digest=b"" if pair is None else pair.digest,
                    )
                )
        return Accept(
            revision=self.revision,
            workers=[worker.info() for worker in self.own],
            plans=plans,
            rejects=rejects,
            lane=self.lane,
            lane_address=b"",
        )

    @property
    def ids_bytes(self) -> int:
        """Bytes of page ids that this life has placed here, of receives matched and not."""
        return self.waiting.length_bytes + self.legs_bytes

    def knows(self, generation: int, worker: int) -> bool:
        """Whether a generation has been received from a source worker, matched or not."""
        matched = any(key[0] == worker for key in self.legs.get(generation, ()))
        return matched or self.waiting.knows(generation, worker)

    def wait(self, receive: Receive) -> None:
        """Keep a receive until its send comes."""
        self.waiting.add(receive)
        self.ended.drop((receive.source_worker, receive.room))

    def keep_error(self, worker: int, room: int, error: PdxferError) -> None:
        """A receive ended whose send has not come: that send, when it comes, ends with it."""
        self.ended.keep((worker, room), error, self.peer_id)

    def lose_waiting(self, error: PdxferError) -> None:
        """The session is over: what waits has ended, unless it committed."""
        for generation in self.waiting.generations:
            if generation not in self.committed:
                self.abort_waiting(generation, error)
        self.waiting.clear()

    def abort_waiting(self, generation: int, error: PdxferError) -> None:
        """End the unmatched receives of a generation."""
        for worker, room in self.waiting.keys(generation):
            self.keep_error(worker, room, error)
        self.waiting.drop(generation)

    def is_dead(self, generation: int) -> bool:
        """Whether no send may join a generation any more: its pages may be decode's again.

        One that has committed may still be joined, by a send that owes it nothing.
        """
        ended = generation <= self.mark or generation in self.tombstones
        return ended and generation not in self.committed

    def _drop_dead(self, generation: int) -> None:
        if self.is_dead(generation):
            for worker, room in self.waiting.keys(generation):
                self.keep_error(worker, room, failed_elsewhere(room))
            self.waiting.drop(generation)

    def commit_waiting(self, generation: int, forget_at: float) -> None:
        """Decode has committed without a send that owes it nothing; the send may still come."""
        if generation in self.waiting:
            self.committed[generation] = forget_at

    def forget_unclaimed(self, now: float) -> None:
        """Drop what no send has come for in time."""
        for generation in [g for g, forget_at in self.committed.items() if forget_at <= now]:
            del self.committed[generation]
            self.waiting.drop(generation)

    def bury(self, generation: int) -> None:
        """A generation is dead: what waits of it is dropped, and nothing of it is matched again."""
        if generation > self.mark:
            self.tombstones.add(generation)
        self._drop_dead(generation)

    def check_tombstones(self, generation: int) -> None:
        """Take no generation not heard of before while too many are remembered.

        Here and not where one is added: the end of a transfer must not fail.

        Raises:
            RemoteProtocolError: `TOMBSTONES_PER_SESSION_MAX` of them; nothing has changed.
        """
        if generation <= self.mark or generation in self.tombstones or generation in self.legs:
            return
        if len(self.tombstones) >= limits.TOMBSTONES_PER_SESSION_MAX:
            raise RemoteProtocolError(
                f"{len(self.tombstones)} generations have ended above decode's mark {self.mark}, "
                f"at most {limits.TOMBSTONES_PER_SESSION_MAX} may; its heartbeats must raise the "
                "mark"
            )

    def advance_mark(self, oldest_live_generation: int) -> None:
        """Decode says that no smaller generation is alive: what waits of those is dropped."""
        if oldest_live_generation - 1 <= self.mark:
            return
        self.mark = oldest_live_generation - 1
        self.tombstones = {g for g in self.tombstones if g > self.mark}
        for generation in self.waiting.generations:
            self._drop_dead(generation)

    def forget(self, generation: int, key: tuple[int, int]) -> None:
        """A send of this generation is final."""
        keys = [other for other in self.legs.get(generation, []) if other != key]
        if keys:
            self.legs[generation] = keys
        else:
            self.legs.pop(generation, None)
            self.bury(generation)


def failed_elsewhere(room: int) -> TransferError:
    """The error of a send whose transfer has failed at another source worker."""
    return TransferError(
        f"room {room}: its transfer has failed at another prefill worker", retryable=True
    )

"""What the decode machine keeps of prefill: links, lives, their workers, the verdicts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdxfer.errors import LayoutMismatchError, PdxferError, from_wire
from pdxfer.layout import PlanSummary, Rank, check_pair
from pdxfer.protocol.decode.live_receive import SourceKey
from pdxfer.protocol.decode.proofs import Side
from pdxfer.protocol.naming import called, fields_of
from pdxfer.protocol.told import ToldWorkers, Verdicts
from pdxfer.protocol.workers import Pair, Worker, missing_ranks
from pdxfer.wire.address import split_instance
from pdxfer.wire.messages import Accept

Pairs = dict[SourceKey, Pair]
"""Each source worker of an instance with what it owes one destination worker."""


@dataclass(slots=True)
class PrefillPeer:
    """One prefill life, from its `Hello` until it is lost and owes nothing."""

    peer_id: bytes
    address: str
    last_heard: float = 0.0
    gone: bool = False
    lane: str = ""
    watched: bool = False
    side: Side | None = None
    """The receive side that it may open paths to; None until its lane is attached (anew)."""
    sides: set[Side] = field(default_factory=set)
    """The receive sides of this session over which a write of that life may still come, the present
    one included."""
    revision: int = 0
    """Revision of our `Attach` that the peer's last `Accept` answers."""
    workers: dict[int, Worker] = field(default_factory=dict)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    refusals: dict[tuple[int, int], PdxferError] = field(default_factory=dict)
    told: ToldWorkers = field(default_factory=ToldWorkers)

    def take_accept(self, message: Accept) -> None:
        """Replace what is known of the prefill workers.

        Raises:
            RemoteProtocolError: a worker of the message is malformed; nothing has changed.
        """
        [workers] = self.told.take(message.workers)
        self.workers = {worker.worker_id: worker for worker in workers}
        self.digests = {(p.source_worker, p.destination_worker): p.digest for p in message.plans}
        self.refusals = {
            (r.source_worker, r.destination_worker): from_wire(
                {"code": r.code, "text": r.text, "retryable": False, "fields": r.fields}
            )
            for r in message.rejects
        }
        self.revision, self.lane = message.revision, message.lane
        if self.side is not None:
            self.side.lane = message.lane


@dataclass(slots=True)
class Link:
    """One prefill address, as decode reaches it."""

    address: str
    peer_id: bytes = b""
    """The life behind it; empty while there is none."""
    error: PdxferError | None = None
    """Why the link was refused; a later life clears it."""
    problem: str = ""
    """Why the link has no session, in words; it goes on trying."""
    silent_since: float | None = None
    """Since when nobody answers there: since it was first named, or its life was lost. None: the
    machine was not told."""


@dataclass(frozen=True, slots=True)
class Instance:
    """The source workers that a list of addresses names, as far as they are known."""

    workers: dict[SourceKey, Worker]
    pending: str
    """What is still missing, in words; empty: the instance is complete."""


def _unfit(source: Worker, destination: Worker) -> PdxferError | None:
    """Why this very pair cannot be joined, whatever the others are."""
    try:
        check_pair(source.side, destination.side)
    except LayoutMismatchError as error:
        return error
    return None


def names(addresses: tuple[str, ...], control: str) -> bool:
    """Whether one of the addresses is behind a control address."""
    return any(split_instance(address)[0] == control for address in addresses)


def verdicts(
    instance: Instance,
    peers: dict[bytes, PrefillPeer],
    destination: Worker,
    judged: Mapping[SourceKey, Pair],
) -> Pairs | str:
    """The verdict of both sides on a complete instance, or what is still awaited, in words.

    Args:  judged: the verdict of this side.

    Raises:
        LayoutMismatchError: this side or the other refuses, or the digests of a plan differ.
    """
    _check_once(instance, peers)
    for (peer_id, worker_id), _ in sorted(instance.workers.items()):
        refusal = peers[peer_id].refusals.get((worker_id, destination.worker_id))
        if refusal is not None:
            raise refusal
    pairs: Pairs = {}
    for key in instance.workers:
        pair = judged[key]
        if pair.error is not None:
            raise pair.error
        pairs[key] = pair
        theirs = peers[key[0]].digests.get((key[1], destination.worker_id), b"")
        if not theirs:
            return f"the prefill agent has not yet judged decode worker {destination.worker_id}"
        if theirs != pair.digest:
            raise LayoutMismatchError(
                "the two sides computed different plans from the same layouts: plan digest "
                f"prefill={theirs.hex()}, decode={pair.digest.hex()}; run the same version of "
                "pdxfer on both sides",
                fields={"digest": f"prefill={theirs.hex()}, decode={pair.digest.hex()}"},
            )
    return pairs


def _check_once(instance: Instance, peers: dict[bytes, PrefillPeer]) -> None:
    """Refuse a rank that two workers say they are, by the addresses of both."""
    found: dict[int, str] = {}
    for (peer_id, worker_id), worker in instance.workers.items():
        where = f"worker {worker_id} at {peers[peer_id].address}"
        other = found.setdefault(worker.rank.index, where)
        if other != where:
            raise LayoutMismatchError(
                f"{called('prefill', worker)} appears twice: {other}, and {where}; end the one "
                "that is not wanted, or name the addresses of one instance only",
                fields={**fields_of("prefill", worker), "address": f"{other}, {where}"},
            )


def summarize(pairs: Pairs) -> PlanSummary:
    """The plans of an instance towards one destination worker as one."""
    parts = [pair.plan.summary() for pair in pairs.values() if pair.plan is not None]
    groups = tuple(group for part in parts for group in part.groups)
    return PlanSummary(groups, parts[0].lane_hint)


class Sources:
    """All that a decode agent knows of prefill: links, lives, and what was agreed on with them."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        """The links by control address."""
        self.peers: dict[bytes, PrefillPeer] = {}
        self._spread: set[tuple[str, ...]] = set()
        """Address lists of instances with ranks at more than one prefill agent."""
        self._agreed: dict[tuple[tuple[str, ...], int], Pairs] = {}
        """(addresses, worker) to the pairs agreed on; emptied when either side changes."""
        self._judged: Verdicts[SourceKey] = Verdicts()
        self.barred: dict[int, PdxferError] = {}
        """The workers whose memory the lane cannot have, each with the reason."""

    def link(self, address: str) -> Link:
        """The link of a control address, made when first named."""
        control, _ = split_instance(address)
        return self.links.setdefault(control, Link(control))

    def silent(self, addresses: tuple[str, ...], now: float) -> tuple[Link, float] | None:
        """The link without an answer for longest, and for how many seconds; None: all answer."""
        found: tuple[Link, float] | None = None
        for address in addresses:
            link = self.links.get(split_instance(address)[0])
            if link is None or link.peer_id or link.silent_since is None:
                continue
            silent_s = now - link.silent_since
            if found is None or silent_s > found[1]:
                found = link, silent_s
        return found

    def forget_link(self, control: str) -> None:
        """Forget a link: nobody answers there, and no room names it."""
        self.links.pop(control, None)
        named = {key for key in self._agreed if names(key[0], control)}
        for key in named:
            del self._agreed[key]
        self._spread = {each for each in self._spread if not names(each, control)}

    def changed(self) -> None:
        """One side has changed: what was agreed on is asked anew."""
        self._agreed.clear()

    def note_instance(self, addresses: tuple[str, ...]) -> bool:
        """Whether this names, for the first time, an instance spread over several prefill agents.

        Each of them has to be told the ranks of all.
        """
        new = len(addresses) > 1 and addresses not in self._spread
        if new:
            self._spread.add(addresses)
        return new

    @property
    def any_spread(self) -> bool:
        """Whether an instance has ranks at more than one prefill agent."""
        return bool(self._spread)

    def gather(self, addresses: tuple[str, ...]) -> Instance:
        """Collect the source workers behind `addresses`.

        Raises:
            PdxferError: a link of them was refused; the reason of that link.
        """
        workers: dict[SourceKey, Worker] = {}
        pending = ""
        for address in addresses:
            control, instance = split_instance(address)
            link = self.links.get(control)
            if link is not None and link.error is not None:
                raise link.error
            peer = self.peers.get(link.peer_id) if link is not None else None
            if peer is None or not peer.revision:
                problem = link.problem if link is not None else ""
                pending = pending or problem or f"no answer from the prefill agent at {control}"
                continue
            for worker in peer.workers.values():
                if worker.instance == instance:
                    workers[peer.peer_id, worker.worker_id] = worker
        attached, expected = missing_ranks(workers.values())
        if not pending and not expected:
            pending = f"no prefill worker is attached at {', '.join(addresses)}"
        if not pending and attached < expected:
            pending = f"{attached} of {expected} ranks attached"
        return Instance(workers, pending)

    def agree(self, addresses: tuple[str, ...], worker: Worker) -> Pairs | str:
        """The pairs that both sides agree on, or what is still awaited, in words.

        Raises:
            PdxferError: the refusal of a pair, of a link or of the worker's memory.
        """
        barred = self.barred.get(worker.worker_id)
        if barred is not None:
            raise barred
        key = (addresses, worker.worker_id)
        known = self._agreed.get(key)
        if known is not None:
            return known
        instance = self.gather(addresses)
        if instance.pending:
            return instance.pending
        judged = self._judged.judge(key, instance.workers, worker)
        found = verdicts(instance, self.peers, worker, judged)
        if not isinstance(found, str):
            self._agreed[key] = found
        return found

    def pair_verdicts(
        self, addresses: tuple[str, ...], worker: Worker
    ) -> dict[Rank, PlanSummary | PdxferError]:
        """What is to be said of each source worker and this one, by the rank of the source.

        A pair that fits is refused too where another one is, since a transfer needs all of them:
        each then has its own reason, or that of the others. Empty: the ranks are not all known.
        """
        try:
            instance = self.gather(addresses)
        except PdxferError:
            return {}
        if instance.pending:
            return {}
        judged = self._judged.judge((addresses, worker.worker_id), instance.workers, worker)
        found: dict[Rank, PlanSummary | PdxferError] = {}
        for (peer_id, worker_id), source in instance.workers.items():
            pair = judged[peer_id, worker_id]
            refusal = self.peers[peer_id].refusals.get((worker_id, worker.worker_id))
            error = self.barred.get(worker.worker_id) or refusal or _unfit(source, worker)
            plan = None if pair.plan is None else pair.plan.summary()
            found[source.rank] = error or pair.error or plan or PlanSummary((), "nothing is owed")
        return found

    def siblings(self, peer_id: bytes) -> list[Worker]:
        """Source workers that other prefill lives hold of the instances this life has a part of."""
        address = self.peers[peer_id].address
        found: dict[SourceKey, Worker] = {}
        for addresses in self._spread:
            if all(split_instance(each)[0] != address for each in addresses):
                continue
            for each in addresses:
                control, instance = split_instance(each)
                other = self.peers.get(self.link(control).peer_id)
                if other is None or other.peer_id == peer_id:
                    continue
                for worker in other.workers.values():
                    if worker.instance == instance:
                        found[other.peer_id, worker.worker_id] = worker
        return list(found.values())

"""The decode machine: binds receives, places pages, counts commits, fences what failed.

No I/O and no clock, like the prefill machine beside it. A destination page leaves a transfer in two
ways only: the commit of every source worker that owes bytes, or a proof from every sender that knew
the page. Time alone never frees one.
"""

from __future__ import annotations

from pdxfer.errors import (
    ConfigError,
    LayoutMismatchError,
    LocalProtocolError,
    PdxferError,
    PeerError,
    RemoteProtocolError,
    TransferError,
    from_wire,
)
from pdxfer.layout import Pages, PlanSummary
from pdxfer.protocol.effects import Announce, Effect, Tell, WatchSender
from pdxfer.protocol.held import HeldPages
from pdxfer.protocol.placing import check_places, commit_fault, place_message
from pdxfer.protocol.receives import Receives
from pdxfer.protocol.receiving import Debt, Receiving, SourceKey
from pdxfer.protocol.sources import Link, PrefillPeer, gather, split_address, verdicts
from pdxfer.protocol.state import State
from pdxfer.protocol.tables import ReceivingEvent
from pdxfer.protocol.workers import Pair, Worker
from pdxfer.wire.messages import (
    Abort,
    Accept,
    Chunk,
    CommitPayload,
    Drained,
    Failed,
    Heartbeat,
    LaneFailed,
    Matched,
    Message,
    Receive,
)

ENDING = frozenset({State.FENCING, State.QUARANTINED})


class DecodeMachine:
    """All receives of one decode agent, and all prefill lives that send to it."""

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.workers: dict[int, Worker] = {}
        self.links: dict[str, Link] = {}
        self.peers: dict[bytes, PrefillPeer] = {}
        self._receives = Receives(self.peers)
        self.live = self._receives.live
        """Generation to receive, from `receive` until it is final."""
        self.revision = 0
        self._next_generation = 1
        self._spread: set[tuple[str, ...]] = set()
        """Address lists of instances with ranks at more than one prefill agent."""
        self._let_go: dict[int, Receiving] = {}
        """Aborted before any prefill worker knew of them; told so once there is one to tell."""
        self._agreed: dict[tuple[tuple[str, ...], int], dict[SourceKey, Pair]] = {}
        """(addresses, worker) to the pairs agreed on; emptied when either side changes."""

    def take_effects(self) -> list[Effect]:
        """What is to be done since the last call, in order."""
        effects, self._receives.effects = self._receives.effects, []
        return effects

    def mark(self, peer_id: bytes) -> int:
        """No smaller generation will be asked of this prefill life; what heartbeats carry.

        A receive that has failed does not hold it back, however long its fence takes: it is told
        once, by its abort, and never matched again.
        """
        live = (
            receiving.generation
            for receiving in self.live.values()
            if receiving.error is None and (peer_id in receiving.bound or not receiving.bound)
        )
        return min([*live, *self._let_go], default=self._next_generation)

    # -- what a worker says ------------------------------------------------------------------
    def attach(self, worker: Worker) -> None:
        """A worker has handed over its memory; every peer is told."""
        self.workers[worker.worker_id] = worker
        self._receives.held[worker.worker_id] = HeldPages(worker.layout)
        self._announce()

    def detach(self, worker_id: int, reason: str, now: float) -> None:
        """A worker went away. Its receives are fenced; its memory is freed after the last proof."""
        if self.workers.pop(worker_id, None) is None:
            return
        self._receives.departing.add(worker_id)
        error = PeerError(f"the decode worker of this room went away: {reason}", retryable=True)
        for receiving in [r for r in self.live.values() if r.worker == worker_id]:
            self._receives.fail(receiving, error, now)
        self._announce()
        self._receives.free_departed(worker_id)

    def summary(self, worker_id: int, addresses: tuple[str, ...]) -> dict[str, object] | str:
        """The plan towards these addresses, or what is still awaited, in words.

        Raises:
            PdxferError: the refusal of the pair or of the link.
        """
        self._note_instance(addresses)
        found = self._verdicts(addresses, self.workers[worker_id])
        if isinstance(found, str):
            return found
        parts = [pair.plan.summary() for pair in found.values() if pair.plan is not None]
        groups = tuple(group for part in parts for group in part.groups)
        return PlanSummary(groups, parts[0].lane_hint).to_wire()

    def receive(
        self,
        worker_id: int,
        room: int,
        slot: int,
        addresses: tuple[str, ...],
        *,
        deadline: float,
        now: float,
    ) -> Receiving:
        """Hold a room; a refusal known already leaves the returned receive FAILED with its error.

        Raises:
            LocalProtocolError: the worker has a live receive of this room; nothing has changed.
            ResourceError: too large a share of the pool is quarantined.
        """
        for other in self.live.values():
            if (other.worker, other.room) == (worker_id, room):
                raise LocalProtocolError(
                    f"duplicate room {room}: this worker has a live receive of it "
                    f"({other.state.name}); end that one first"
                )
        self._receives.check_quarantine(worker_id)
        self._note_instance(addresses)
        layout = self.workers[worker_id].layout
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        receiving = Receiving(worker_id, room, generation, slot, addresses, deadline, layout)
        self.live[generation] = receiving
        self._receives.by_slot[worker_id, slot] = receiving
        self._receives.show(receiving)
        self._bind(receiving, now)
        return receiving

    def place(
        self,
        worker_id: int,
        slot: int,
        pages: dict[str, Pages],
        *,
        tokens: int,
        prefix_tokens: int,
        now: float,
    ) -> None:
        """Give a receive its pages, once. An error in them fails the receive."""
        receiving = self._receives.by_slot.get((worker_id, slot))
        if receiving is None or receiving.error is not None:
            return
        try:
            if receiving.pages is not None:
                raise LocalProtocolError(f"room {receiving.room}: its pages are placed already")
            placed = check_places(receiving, pages, tokens, prefix_tokens)
            self._receives.held[worker_id].hold(receiving.generation, placed)
        except PdxferError as error:
            self._receives.fail(receiving, error, now)
            return
        receiving.pages = placed
        receiving.tokens, receiving.prefix_tokens = tokens, prefix_tokens
        if receiving.debts:
            self._tell_places(receiving)
            self._receives.settle(receiving)
        else:
            self._bind(receiving, now)

    def abort(self, worker_id: int, slot: int, reason: str, now: float) -> None:
        """The worker gives its receive up; its pages come back after the proof."""
        receiving = self._receives.by_slot.get((worker_id, slot))
        if receiving is not None:
            text = f"aborted by the decode worker: {reason or 'no reason given'}"
            if not receiving.bound:
                self._let_go[receiving.generation] = receiving
            self._receives.fail(receiving, TransferError(f"room {receiving.room} was {text}"), now)

    def siblings(self, peer_id: bytes) -> list[Worker]:
        """Source workers that other prefill lives hold of the instances this life has a part of."""
        address = self.peers[peer_id].address
        found: dict[SourceKey, Worker] = {}
        for addresses in self._spread:
            if all(split_address(each)[0] != address for each in addresses):
                continue
            for each in addresses:
                control, instance = split_address(each)
                other = self.peers.get(self.links[control].peer_id)
                if other is None or other.peer_id == peer_id:
                    continue
                for worker in other.workers.values():
                    if worker.instance == instance:
                        found[other.peer_id, worker.worker_id] = worker
        return list(found.values())

    def _note_instance(self, addresses: tuple[str, ...]) -> None:
        """An instance spread over several prefill agents: each has to know the ranks of all."""
        if len(addresses) > 1 and addresses not in self._spread:
            self._spread.add(addresses)
            self._announce()

    # -- what a link and a peer say ----------------------------------------------------------
    def link(self, address: str) -> Link:
        """The link of a control address, made when first named."""
        control, _ = split_address(address)
        return self.links.setdefault(control, Link(control))

    def link_up(self, address: str, peer_id: bytes, now: float) -> None:
        """A prefill life answers behind an address; it is told our workers."""
        self._agreed.clear()
        link = self.link(address)
        link.peer_id, link.error, link.problem = peer_id, None, ""
        self.peers[peer_id] = PrefillPeer(peer_id, link.address, last_heard=now)
        for receiving in self.live.values():
            if peer_id in receiving.unproven and receiving.error is not None:
                again = Abort(generation=receiving.generation, reason=str(receiving.error))
                self._receives.effects.append(Tell(peer_id, again))
        self._receives.effects.append(Announce(peer_id))

    def link_refused(self, address: str, error: PdxferError, now: float) -> None:
        """The link cannot come up, or its life refuses the session; rooms named on it fail."""
        self._agreed.clear()
        link = self.link(address)
        link.error = error
        for receiving in self._on_link(link.address):
            self._receives.fail(receiving, error, now)

    def peer_lost(self, peer_id: bytes, reason: str, now: float) -> None:
        """A prefill life ended (goodbye, a new life, silence). No proof of anything."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.gone = True
        self._agreed.clear()
        link = self.links.get(peer.address)
        if link is not None and link.peer_id == peer_id:
            link.peer_id = b""
        text = f"the prefill agent at {peer.address} is away: {reason}"
        for receiving in list(self.live.values()):
            if peer_id in receiving.bound:
                self._receives.fail(receiving, PeerError(text, retryable=True), now)
        self._receives.forget_gone()

    def on_message(self, peer_id: bytes, message: Message, now: float) -> None:
        """Act on one message of a prefill life."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.last_heard = now
        match message:
            case Accept():
                self._on_accept(peer, message, now)
            case LaneFailed():
                peer.watched = False
            case Matched():
                self._on_matched(peer, message)
            case Chunk():
                self._on_chunk(peer, message, now)
            case Failed():
                self._on_failed(message, now)
            case Drained():
                self._on_drained(peer, message, now)
            case Heartbeat():
                pass
            case _:
                raise RemoteProtocolError(
                    f"prefill may not send {type(message).__name__} to a decode agent"
                )

    def _on_accept(self, peer: PrefillPeer, message: Accept, now: float) -> None:
        before = [worker.layout.fingerprint for worker in peer.workers.values()]
        peer.take_accept(message)
        self._agreed.clear()
        if self._spread and before != [w.layout.fingerprint for w in peer.workers.values()]:
            self._announce()
        if not peer.watched:
            peer.watched = True
            self._receives.effects.append(
                WatchSender(peer.peer_id, message.lane, message.lane_address)
            )
        for receiving in self._on_link(peer.address):
            lost = [
                key
                for key in receiving.debts
                if key[0] == peer.peer_id and key[1] not in peer.workers
            ]
            if lost:
                text = f"prefill worker {lost[0][1]} at {peer.address} went away"
                self._receives.fail(receiving, PeerError(text, retryable=True), now)
            elif not receiving.debts:
                self._bind(receiving, now)
        self._tell_let_go()

    def _on_matched(self, peer: PrefillPeer, message: Matched) -> None:
        receiving = self.live.get(message.generation)
        debt = receiving.debts.get((peer.peer_id, message.source_worker)) if receiving else None
        if receiving is None or debt is None:
            return
        debt.matched = True
        self._receives.settle(receiving)

    def _on_chunk(self, peer: PrefillPeer, message: Chunk, now: float) -> None:
        receiving = self.live.get(message.generation)
        debt = receiving.debts.get((peer.peer_id, message.source_worker)) if receiving else None
        if receiving is None or debt is None or receiving.error is not None:
            return
        ranges = {name: (r.first, r.end) for name, r in message.ranges.items()}
        layers = None if message.layers is None else tuple(message.layers)
        try:
            planned = debt.plan.length_bytes(ranges, layers=layers) if debt.plan is not None else 0
        except ConfigError as error:
            text = f"chunk {message.number} of room {receiving.room}: {error}"
            self._receives.fail(receiving, RemoteProtocolError(text), now)
            return
        if planned != message.length_bytes:
            text = (
                f"chunk {message.number} of room {receiving.room} announces "
                f"{message.length_bytes} bytes, its plan here has {planned}"
            )
            self._receives.fail(receiving, RemoteProtocolError(text), now)
            return
        self._receives.note_moving(receiving)

    def _on_failed(self, message: Failed, now: float) -> None:
        receiving = self.live.get(message.generation)
        if receiving is None:
            return
        told = from_wire(
            {
                "code": message.code,
                "text": message.text,
                "retryable": message.retryable,
                "fields": message.fields,
            }
        )
        self._receives.fail(receiving, told, now)

    def _on_drained(self, peer: PrefillPeer, message: Drained, now: float) -> None:
        receiving = self.live.get(message.generation)
        if receiving is None:
            return
        if receiving.error is None:
            text = f"the prefill agent holds room {receiving.room} for dead; receive it again"
            self._receives.fail(receiving, PeerError(text, retryable=True), now)
        self._receives.prove(receiving, peer.peer_id, "drained")

    # -- what the lane says ------------------------------------------------------------------
    def on_commit(self, peer_id: bytes, payload: CommitPayload, now: float) -> None:
        """A commit came behind the bytes of one source worker."""
        if payload.decode_incarnation != self.incarnation:
            return
        receiving = self.live.get(payload.generation)
        debt = receiving.debts.get((peer_id, payload.source_worker)) if receiving else None
        if receiving is None or debt is None or receiving.error is not None:
            return
        wrong = commit_fault(receiving, debt, payload)
        if wrong:
            self._receives.fail(receiving, RemoteProtocolError(wrong), now)
            return
        debt.committed = debt.matched = True
        debt.runs, debt.aux = payload.runs, payload.aux
        self._receives.settle(receiving)
        self._receives.note_moving(receiving)

    def sender_lost(self, peer_id: bytes, error: str, proof: str, now: float) -> None:
        """Our endpoint to a prefill life reported an error.

        `proof` is `revoked` on a lane where nothing of that life can land after this, else empty.
        """
        self.receiver_closed(peer_id, proof)
        text = f"the lane from the prefill agent broke: {error}"
        for receiving in list(self.live.values()):
            if peer_id in receiving.bound:
                self._receives.fail(receiving, PeerError(text, retryable=True), now)

    def receiver_closed(self, peer_id: bytes, proof: str) -> None:
        """Our receive side of a prefill life is no more; what is alive may go on over another.

        `proof` is `revoked` on a lane where nothing of that life can land after this, else empty.
        """
        if peer_id in self.peers:
            self.peers[peer_id].silence = proof
        if proof:
            for receiving in list(self.live.values()):
                self._receives.prove(receiving, peer_id, proof)

    def lane_attached(self, peer_id: bytes) -> None:
        """A new receive side was made for a prefill life: its writes may land from now on."""
        if peer_id in self.peers:
            self.peers[peer_id].silence = ""

    def sender_dead(self, peer_id: bytes) -> None:
        """The writing process of a prefill life is known to be dead (its pidfd is readable)."""
        for receiving in list(self.live.values()):
            if receiving.state in ENDING:
                self._receives.prove(receiving, peer_id, "dead")

    # -- time --------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Fail what waited past its deadline; show as QUARANTINED what has no proof in time."""
        for receiving in list(self.live.values()):
            unmatched = receiving.state is State.WAITING or (
                receiving.state is State.MOVING
                and not all(d.matched for d in receiving.debts.values() if d.plan is not None)
            )
            if unmatched and now >= receiving.deadline:
                self._receives.fail(
                    receiving, PeerError(self._why_waiting(receiving), retryable=True), now
                )
            elif receiving.state is State.FENCING and now >= receiving.drain_deadline:
                receiving.advance(ReceivingEvent.UNPROVEN)
                self._receives.show(receiving)

        for generation, receiving in list(self._let_go.items()):
            if now >= receiving.deadline:
                del self._let_go[generation]

    def _why_waiting(self, receiving: Receiving) -> str:
        room = f"room {receiving.room}"
        if receiving.debts:
            matched = sum(debt.matched for debt in receiving.debts.values())
            if receiving.pages is None:
                return f"{room}: no pages were placed before its deadline"
            sent = f"{matched} of {len(receiving.debts)} prefill workers sent it"
            return f"{room}: {sent} before its deadline"
        try:
            found = self._verdicts(receiving.prefill, self.workers[receiving.worker])
        except PdxferError as error:
            return f"{room}: {error}"
        return f"{room}: {found if isinstance(found, str) else 'not bound'} before its deadline"

    # -- inside ------------------------------------------------------------------------------
    def _verdicts(self, addresses: tuple[str, ...], worker: Worker) -> dict[SourceKey, Pair] | str:
        key = (addresses, worker.worker_id)
        known = self._agreed.get(key)
        if known is not None:
            return known
        instance = gather(addresses, self.links, self.peers)
        if instance.pending:
            return instance.pending
        found = verdicts(instance, self.peers, worker)
        if not isinstance(found, str):
            self._agreed[key] = found
        return found

    def _bind(self, receiving: Receiving, now: float) -> None:
        """Tell every source worker of the room, once the instance is complete and agreed on."""
        worker = self.workers[receiving.worker]
        try:
            found = self._verdicts(receiving.prefill, worker)
        except PdxferError as error:
            if isinstance(error, LayoutMismatchError):
                self._tell_refused(receiving, worker)
            self._receives.fail(receiving, error, now)
            return
        if isinstance(found, str):
            return
        instance = gather(receiving.prefill, self.links, self.peers)
        for key, pair in found.items():
            index = instance.workers[key].rank.index
            receiving.debts[key] = Debt(sender_index=index, plan=pair.plan)
            receiving.bound.add(key[0])
            receiving.lanes.add(self.peers[key[0]].lane)
        self._tell_receives(receiving, worker, list(found))

    def _tell_receives(self, receiving: Receiving, worker: Worker, keys: list[SourceKey]) -> None:
        for key in keys:
            place = None
            if receiving.pages is not None and key in receiving.debts:
                place = place_message(receiving, key)
            message = Receive(
                room=receiving.room,
                generation=receiving.generation,
                source_worker=key[1],
                destination_worker=receiving.worker,
                receiver_index=worker.rank.index,
                receiver_count=worker.rank.instance_size,
                place=place,
            )
            self._receives.effects.append(Tell(key[0], message))

    def _tell_let_go(self) -> None:
        """Bind and abort what the worker gave up early, so that the room's send ends."""
        for generation, receiving in list(self._let_go.items()):
            worker = self.workers.get(receiving.worker)
            if worker is None:
                del self._let_go[generation]
                continue
            try:
                instance = gather(receiving.prefill, self.links, self.peers)
            except PdxferError:
                del self._let_go[generation]
                continue
            if instance.pending:
                continue
            del self._let_go[generation]
            self._tell_receives(receiving, worker, list(instance.workers))
            for peer_id in sorted({key[0] for key in instance.workers}):
                message = Abort(generation=generation, reason=str(receiving.error))
                self._receives.effects.append(Tell(peer_id, message))

    def _tell_refused(self, receiving: Receiving, worker: Worker) -> None:
        """Name the room to a refusing pair, so that its send fails with the same error."""
        instance = gather(receiving.prefill, self.links, self.peers)
        self._tell_receives(receiving, worker, list(instance.workers))

    def _tell_places(self, receiving: Receiving) -> None:
        for key in receiving.debts:
            self._receives.effects.append(Tell(key[0], place_message(receiving, key)))

    def _announce(self) -> None:
        self._agreed.clear()
        self.revision += 1
        for peer in self.peers.values():
            if not peer.gone:
                self._receives.effects.append(Announce(peer.peer_id))

    def _on_link(self, control: str) -> list[Receiving]:
        return [
            receiving
            for receiving in self.live.values()
            if receiving.error is None
            and any(split_address(address)[0] == control for address in receiving.prefill)
        ]

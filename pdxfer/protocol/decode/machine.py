"""The decode machine: binds receives, places pages, counts commits, fences what failed.

No I/O and no clock, like the prefill machine beside it. A destination page leaves a transfer in two
ways only: the commit of every source worker that owes bytes, or a proof from every sender that knew
the page. Time alone never frees one.
"""

from __future__ import annotations

from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    PeerError,
    RemoteProtocolError,
    TransferError,
)
from pdxfer.layout import PlanSummary, Rank
from pdxfer.protocol.decode.binding import Binding
from pdxfer.protocol.decode.deadlines import Deadlines
from pdxfer.protocol.decode.held import HeldPages
from pdxfer.protocol.decode.inherited import Inheritance, Inherited
from pdxfer.protocol.decode.live_receive import LiveReceive
from pdxfer.protocol.decode.placing import check_places, chunk_fault, commit_fault, failure_of
from pdxfer.protocol.decode.proofs import Proof
from pdxfer.protocol.decode.receives import Receives
from pdxfer.protocol.decode.sides import Sides
from pdxfer.protocol.decode.sources import PrefillPeer, Sources, summarize
from pdxfer.protocol.effects import Effect, WatchSender, lane_work_first
from pdxfer.protocol.given import GivenPlaces
from pdxfer.protocol.given_bytes import pages_bytes
from pdxfer.protocol.naming import called, fields_of, shown_reason
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import (
    Accept,
    Chunk,
    CommitPayload,
    Drained,
    Failed,
    Heartbeat,
    LaneFailed,
    Matched,
    Message,
)


class DecodeMachine:
    """All receives of one decode agent, and all prefill lives that send to it."""

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.workers: dict[int, Worker] = {}
        self.sources = Sources()
        self.peers = self.sources.peers
        self._receives = Receives(self.peers)
        self._binding = Binding(self.workers, self.sources, self._receives)
        self._inherited = Inherited(self._receives)
        self._sides = Sides(self._receives)
        self._deadlines = Deadlines(self._receives, self._binding)
        self.live = self._receives.live
        """Generation to receive, from `receive` until it is final."""
        self._revision, self._next_generation = 0, 1

    def take_effects(self) -> list[Effect]:
        """What is to be done since the last call, in order."""
        effects, self._receives.effects = self._receives.effects, []
        return lane_work_first(effects)

    def next_revision(self) -> int:
        """Revision of the next `Attach`; no earlier one has had it."""
        self._revision += 1
        return self._revision

    def mark(self, peer_id: bytes) -> int:
        """No smaller generation will be asked of this prefill life; what heartbeats carry.

        A receive that has failed does not hold it back, however long its fence takes: it is told
        once, by its abort, and never matched again.
        """
        index = self._receives.index
        told = (each.generation for each in index.of_peer(peer_id) if each.error is None)
        oldest_unbound = next(iter(index.unbound), self._next_generation)
        return min([*told, oldest_unbound, *self._binding.let_go])

    def heartbeat(self, peer_id: bytes) -> Heartbeat:
        """What the next heartbeat to a prefill life says."""
        return Heartbeat(oldest_live_generation=self.mark(peer_id))

    @property
    def named_links(self) -> set[str]:
        """Control addresses that live receives name."""
        return self._receives.index.links | self._binding.named_links

    # -- what a worker says ------------------------------------------------------------------
    def attach(self, worker: Worker) -> None:
        """A worker has handed over its memory; every peer is told."""
        self.workers[worker.worker_id] = worker
        self._receives.held[worker.worker_id] = HeldPages(worker.layout)
        self._announce()

    def detach(self, worker_id: int, reason: str, now: float) -> None:
        """A worker went away. Its receives are fenced; its memory is freed after the last proof."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        self.sources.barred.pop(worker_id, None)
        self._receives.departing.add(worker_id)
        text = f"the decode worker of this room, {called('decode', worker)}, went away: {reason}"
        error = PeerError(text, retryable=True, fields=fields_of("decode", worker))
        self._receives.fail_worker(worker_id, error, now)
        self._announce()
        self._receives.free_departed(worker_id)

    def bar(self, worker_id: int, error: PdxferError, now: float) -> None:
        """The lane cannot have a worker's memory: its receives fail until it can."""
        self.sources.barred[worker_id] = error
        self._receives.fail_worker(worker_id, error, now)

    def unbar(self, worker_id: int) -> None:
        """The lane can have this worker's memory (again)."""
        self.sources.barred.pop(worker_id, None)

    def summary(self, worker_id: int, addresses: tuple[str, ...]) -> dict[str, object] | str:
        """The plan towards these addresses, or what is still awaited, in words.

        Raises:
            PdxferError: the refusal of the pair or of the link.
        """
        self._note_instance(addresses)
        found = self.sources.agree(addresses, self.workers[worker_id])
        return found if isinstance(found, str) else summarize(found).to_wire()

    def pair_verdicts(
        self, worker_id: int, addresses: tuple[str, ...]
    ) -> dict[Rank, PlanSummary | PdxferError]:
        """For each source rank, the plan of its pair with a worker, or why there is none.

        Empty where the source ranks did not become known.
        """
        return self.sources.pair_verdicts(addresses, self.workers[worker_id])

    def receive(  # noqa: PLR0913 keywords, each a term of its own
        self,
        worker_id: int,
        room: int,
        slot: int,
        addresses: tuple[str, ...],
        *,
        deadline: float,
        now: float,
        unreachable_s: float | None = None,
        must_exist: bool = False,
        place: GivenPlaces | None = None,
    ) -> LiveReceive:
        """Hold a room, with `place` for pages that are given already.

        A refusal that is known already, or an error in the places, leaves the returned receive
        FAILED with its error.

        Raises:
            LocalProtocolError: the worker has a live receive of this room; nothing has changed.
            ResourceError: too large a share of the pool is quarantined.
        """
        self._receives.check_room(worker_id, room)
        self._receives.check_quarantine(worker_id)
        self._binding.forget_let_go(worker_id, room)
        self._note_instance(addresses)
        layout = self.workers[worker_id].layout
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        receiving = LiveReceive(
            worker_id,
            room,
            generation,
            slot,
            addresses,
            deadline,
            layout,
            unreachable_s,
            must_exist,
        )
        self._receives.index.add(receiving)
        self._receives.show(receiving)
        if place is None or self._take(receiving, place, now):
            self._binding.bind(receiving, now)
        return receiving

    def inherit(self, left: Inheritance, now: float) -> LiveReceive:
        """Hold pages of an older life of this agent until a proof comes: see `Inherited.take`."""
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        layout = self.workers[left.worker].layout
        return self._inherited.take(left, generation, layout, now)

    def writers_ended(self, worker_id: int, slot: int) -> None:
        """The worker has seen the processes of all writers of an inherited receive end."""
        self._inherited.writers_ended(worker_id, slot)

    def place(self, worker_id: int, slot: int, place: GivenPlaces, *, now: float) -> None:
        """Give a receive its pages, once. An error in them fails the receive."""
        receiving = self._receives.index.by_slot.get((worker_id, slot))
        if receiving is None or receiving.error is not None:
            return
        if not self._take(receiving, place, now):
            return
        if receiving.legs:
            self._binding.tell_places(receiving)
            self._receives.proceed(receiving)
        else:
            self._binding.bind(receiving, now)

    def _take(self, receiving: LiveReceive, place: GivenPlaces, now: float) -> bool:
        """Hold the pages that a worker gives; False where an error in them has failed the room."""
        try:
            if receiving.pages is not None:
                raise LocalProtocolError(f"room {receiving.room}: its pages are placed already")
            placed = check_places(
                receiving.layout, receiving.room, place.pages, place.tokens, place.prefix_tokens
            )
            self._receives.take_given(receiving, pages_bytes(placed))
            held = self._receives.held[receiving.worker]
            held.hold(receiving.generation, placed, receiving.room)
        except PdxferError as error:
            self._receives.fail(receiving, error, now)
            return False
        receiving.pages = placed
        receiving.tokens, receiving.prefix_tokens = place.tokens, place.prefix_tokens
        return True

    def abort(self, worker_id: int, slot: int, reason: str, now: float) -> None:
        """The worker gives its receive up; its pages come back after the proof."""
        receiving = self._receives.index.by_slot.get((worker_id, slot))
        if receiving is not None:
            text = f"aborted by the decode worker: {shown_reason(reason)}"
            if not receiving.bound:
                self._binding.let_go[receiving.generation] = receiving
            self._receives.fail(receiving, TransferError(f"room {receiving.room} was {text}"), now)

    # -- what a link and a peer say ----------------------------------------------------------
    def link_up(self, address: str, peer_id: bytes, now: float) -> None:
        """A prefill life answers behind an address; it is told our workers."""
        self.sources.changed()
        link = self.sources.link(address)
        link.peer_id, link.error, link.problem = peer_id, None, ""
        self.peers[peer_id] = PrefillPeer(peer_id, link.address, last_heard=now)
        self._inherited.ask_again(peer_id)
        self.announce_to(peer_id)

    def link_named(self, control: str, now: float) -> None:
        """A link to this control address is being made."""
        self.sources.link(control).silent_since = now

    def link_forgotten(self, control: str) -> None:
        """The link is no more: nobody answered there, and no receive names it."""
        self.sources.forget_link(control)

    def link_troubled(self, control: str, problem: str) -> None:
        """The link has no session now and goes on trying; `problem` says why, in words."""
        self.sources.link(control).problem = problem

    def link_refused(self, address: str, error: PdxferError, now: float) -> None:
        """The link cannot come up, or its life refuses the session; rooms named on it fail."""
        self.sources.changed()
        link = self.sources.link(address)
        link.error = error
        for receiving in self._on_link(link.address):
            self._receives.fail(receiving, error, now)

    def peer_lost(self, peer_id: bytes, reason: str, now: float) -> None:
        """A prefill life ended (goodbye, a new life, silence). No proof of anything."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.gone = True
        self.sources.changed()
        link = self.sources.links.get(peer.address)
        if link is not None and link.peer_id == peer_id:
            link.peer_id, link.silent_since = b"", now
        self._fail_bound(peer_id, "", f"is away: {reason}", now)
        self._receives.forget_gone(peer_id)

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
                self._on_failed(peer, message, now)
            case Drained():
                self._on_drained(peer, message, now)
            case Heartbeat():
                self._receives.note_progress(peer.peer_id, message.progress)
            case _:
                raise RemoteProtocolError(
                    f"prefill may not send {type(message).__name__} to a decode agent"
                )

    def _on_accept(self, peer: PrefillPeer, message: Accept, now: float) -> None:
        known = peer.workers
        before = [worker.layout.fingerprint for worker in peer.workers.values()]
        peer.take_accept(message)
        self.sources.changed()
        after = [worker.layout.fingerprint for worker in peer.workers.values()]
        if self.sources.any_spread and before != after:
            self._announce()
        if not peer.watched:
            peer.watched = True
            watch = WatchSender(peer.peer_id, message.lane, message.lane_address)
            self._receives.effects.append(watch)
        self._binding.tell_let_go()  # generations are told in order
        for receiving in self._on_link(peer.address):
            self._binding.take_workers(receiving, peer, known, now)

    def _on_matched(self, peer: PrefillPeer, message: Matched) -> None:
        receiving = self.live.get(message.generation)
        leg = receiving.legs.get((peer.peer_id, message.source_worker)) if receiving else None
        if receiving is None or leg is None:
            return
        leg.matched = receiving.moved = True
        self._receives.proceed(receiving)

    def _on_chunk(self, peer: PrefillPeer, message: Chunk, now: float) -> None:
        receiving = self.live.get(message.generation)
        leg = receiving.legs.get((peer.peer_id, message.source_worker)) if receiving else None
        if receiving is None or leg is None or receiving.error is not None:
            return
        wrong = chunk_fault(receiving, leg, message)
        if wrong:
            self._receives.fail(receiving, RemoteProtocolError(wrong), now)
            return
        receiving.moved = True
        self._receives.note_moving(receiving)

    def _on_failed(self, peer: PrefillPeer, message: Failed, now: float) -> None:
        receiving = self.live.get(message.generation)
        if receiving is None or peer.peer_id not in receiving.bound:
            return
        told = failure_of(message)
        who = peer.workers.get(message.source_worker)
        told.fields = {"address": peer.address, **fields_of("prefill", who), **told.fields}
        self._receives.fail(receiving, told, now)

    def _on_drained(self, peer: PrefillPeer, message: Drained, now: float) -> None:
        if message.decode_incarnation:
            self._inherited.drained(peer.peer_id, message.decode_incarnation)
            return
        receiving = self.live.get(message.generation)
        if receiving is None or peer.peer_id not in receiving.bound:
            return
        if receiving.error is None:
            text = f"the prefill agent holds room {receiving.room} for dead; receive it again"
            self._receives.fail(receiving, PeerError(text, retryable=True), now)
        proof = Proof("drained", peer.peer_id, generation=receiving.generation)
        self._receives.prove(proof)

    # -- what the lane says ------------------------------------------------------------------
    def on_commit(self, peer_id: bytes, payload: CommitPayload, now: float) -> None:
        """A commit came behind the bytes of one source worker."""
        if payload.decode_incarnation != self.incarnation:
            return
        receiving = self.live.get(payload.generation)
        leg = receiving.legs.get((peer_id, payload.source_worker)) if receiving else None
        if receiving is None or leg is None or receiving.error is not None:
            return
        wrong = commit_fault(receiving, leg, payload)
        if wrong:
            self._receives.fail(receiving, RemoteProtocolError(wrong), now)
            return
        leg.committed = leg.matched = receiving.moved = True
        leg.runs, leg.aux = payload.runs, payload.aux
        self._receives.proceed(receiving)
        self._receives.note_moving(receiving)

    def sender_lost(self, peer_id: bytes, error: str, proof: str, now: float) -> None:
        """The lane has ended our receive side of a prefill life, with an error.

        `proof` is `revoked` where nothing of that life can come over it after this, else empty.
        """
        self.receiver_closed(peer_id, proof)
        self._fail_bound(peer_id, "the lane from", f"broke: {error}", now)

    def sender_unwatched(self, peer_id: bytes, error: str, now: float) -> None:
        """The lane cannot watch a prefill life; its receive side is still there."""
        self._fail_bound(peer_id, "the lane cannot watch", f"any more: {error}", now)

    def on_generation_closed(self, peer_id: bytes, generation: int) -> None:
        """Our lane places nothing more of a generation from a prefill life: that is a proof."""
        self._sides.close_generation(peer_id, generation)

    def on_placing_failed(self, peer_id: bytes, generation: int, error: str, now: float) -> None:
        """What came on the lane is not what was planned; nothing of it was placed."""
        receiving = self.live.get(generation)
        if receiving is not None and peer_id in receiving.bound:
            text = f"room {receiving.room}: the lane refused what prefill sent: {error}"
            self._receives.fail(receiving, RemoteProtocolError(text), now)

    def receiver_closed(self, peer_id: bytes, proof: str) -> None:
        """Our receive side of a prefill life is no more; what is alive may go on over another.

        `proof` is `revoked` where nothing of that life can come over it after this, else empty. It
        counts for what was told over this receive side, not for what may come over earlier ones.
        """
        self._sides.close(peer_id, proof)

    def announce_to(self, peer_id: bytes) -> None:
        """A prefill life is told our workers, and a receive side if it has none.

        Its writes may come over that one from here on: what fails later is told behind this
        `Attach`, and what has failed was told before it.
        """
        self._sides.announce(peer_id)

    def sender_dead(self, peer_id: bytes) -> None:
        """The writing process of a prefill life is known to be dead (its pidfd is readable)."""
        self._receives.prove(Proof("dead", peer_id))

    def sender_silent(self, peer_id: bytes) -> None:
        """A prefill life has ended in order, with all its lanes closed; its process may live on."""
        self._receives.prove(Proof("drained", peer_id))

    # -- time --------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Time has passed: see `Deadlines`."""
        for receiving in list(self.live.values()):
            if now >= receiving.check_at:
                self._deadlines.check(receiving, now)
        self._binding.expire_let_go(now)

    # -- inside ------------------------------------------------------------------------------
    def _note_instance(self, addresses: tuple[str, ...]) -> None:
        if self.sources.note_instance(addresses):
            self._announce()

    def _announce(self) -> None:
        self.sources.changed()
        for peer in self.peers.values():
            if not peer.gone:
                self.announce_to(peer.peer_id)

    def _fail_bound(self, peer_id: bytes, before: str, after: str, now: float) -> None:
        """Fail what a prefill life owes; its address and lane stand between the two texts."""
        peer = self.peers.get(peer_id)
        where = "" if peer is None else f" at {peer.address} (lane {peer.lane})"
        text = f"{before} the prefill agent{where} {after}".lstrip()
        fields = {} if peer is None else {"address": peer.address, "lane": peer.lane}
        for receiving in self._receives.index.of_peer(peer_id):
            error = PeerError(text, retryable=True, fields=dict(fields))
            self._receives.fail(receiving, error, now)

    def _on_link(self, control: str) -> list[LiveReceive]:
        return [each for each in self._receives.index.of_link(control) if each.error is None]

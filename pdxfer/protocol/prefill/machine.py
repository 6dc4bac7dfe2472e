"""The prefill machine: matches sends with receives, turns chunks into posts, ends every leg.

No I/O and no clock: callers give `now` (seconds, monotonic), `take_effects` gives what is to be
done. What a worker, a peer and the lane can say are three groups of methods; `tick` is the passing
of time. One machine an agent; not thread-safe, called on the agent's loop only.
"""

from __future__ import annotations

from pdxfer import limits
from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    PeerError,
    RemoteProtocolError,
    TransferError,
)
from pdxfer.protocol.effects import (
    Announce,
    ClosePath,
    Effect,
    OpenPath,
    Tell,
    lane_work_first,
)
from pdxfer.protocol.given import GivenChunk
from pdxfer.protocol.given_bytes import chunk_bytes
from pdxfer.protocol.naming import called, fields_of, leg_failed, shown_reason
from pdxfer.protocol.prefill.deadlines import Deadlines
from pdxfer.protocol.prefill.extent import Extent
from pdxfer.protocol.prefill.live_send import LiveSend, SendLeg
from pdxfer.protocol.prefill.matching import Matching
from pdxfer.protocol.prefill.peer import DecodePeer, PathState
from pdxfer.protocol.prefill.posting import check_given
from pdxfer.protocol.prefill.sends import Sends
from pdxfer.protocol.prefill.waiting import Waiting
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import (
    Abort,
    Attach,
    Committed,
    Drained,
    Failed,
    Heartbeat,
    LaneFailed,
    Message,
    Place,
    Receive,
)


class PrefillMachine:
    """All sends of one prefill agent, and all decode lives that receive from it."""

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.workers: dict[int, Worker] = {}
        self.peers: dict[bytes, DecodePeer] = {}
        self._unproven: dict[bytes, set[int]] = {}
        """Decode life without a record to its generations that `Drained` is never said of."""
        self._sends = Sends(self.workers, self.peers)
        self._matching = Matching(self._sends)
        self._deadlines = Deadlines(self._sends)
        self.sendings = self._sends.live
        """(worker, room) to send, until it is final."""

    def take_effects(self) -> list[Effect]:
        """What is to be done since the last call, in order."""
        effects, self._sends.effects = self._sends.effects, []
        return lane_work_first(effects)

    # -- what a worker says ------------------------------------------------------------------
    def attach(self, worker: Worker) -> None:
        """A worker has handed over its memory; every peer is told."""
        self.workers[worker.worker_id] = worker
        self._tell_workers()

    def detach(self, worker_id: int, reason: str) -> None:
        """A worker went away. Its sends fail; its memory is freed once nothing reads it."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        self._sends.departing.add(worker_id)
        text = f"the prefill worker of this room, {called('prefill', worker)}, went away: {reason}"
        error = PeerError(text, retryable=True, fields=fields_of("prefill", worker))
        for sending in [s for s in self.sendings.values() if s.worker == worker_id]:
            self._sends.fail(sending, error)
        self._tell_workers()
        self._sends.free_departed(worker_id)

    def open(
        self,
        worker_id: int,
        room: int,
        slot: int,
        *,
        deadline: float,
        lease_s: float,
        chunk: GivenChunk | None = None,
    ) -> LiveSend:
        """Hold a room for a send, with `chunk` for pages that are given already.

        An error in the chunk leaves the returned send FAILED with its error.

        Raises:
            LocalProtocolError: the worker has a live send of this room; nothing has changed.
        """
        key = (worker_id, room)
        if key in self.sendings:
            raise LocalProtocolError(
                f"duplicate room {room}: this worker has a live send of it "
                f"({self.sendings[key].state.name}); end that one first"
            )
        worker = self.workers[worker_id]
        extent = Extent(room, worker.layout, shares_pages=worker.rank.cp_size > 1)
        sending = LiveSend(worker_id, room, slot, deadline, lease_s, worker.layout, extent)
        self.sendings[key] = sending
        self._sends.failed.pop(key, None)
        self._sends.by_slot[worker_id, slot] = sending
        self._sends.show(sending)
        for peer_id in list(self._sends.waited.get(key, ())):
            peer = self.peers[peer_id]
            for receive in peer.waiting.take(worker_id, room):
                self._matching.bind(peer, receive, sending)
        ended = self._sends.ended.take(key)
        if ended is not None:
            self._sends.fail(sending, ended)
        if chunk is None or sending.error is not None or self._take(sending, chunk):
            self._sends.pump(sending)
        return sending

    def send(self, worker_id: int, slot: int, chunk: GivenChunk) -> None:
        """Append a chunk. An error in it fails the send, since a chunk cannot be left out."""
        sending = self._sends.by_slot.get((worker_id, slot))
        if sending is None or sending.error is not None:
            return
        if self._take(sending, chunk):
            self._sends.pump(sending)

    def begin(self, worker_id: int, slot: int, chunk: GivenChunk) -> None:
        """Append a chunk whose layers may go one by one, each at its `layer_done`.

        An error in it fails the send.
        """
        sending = self._sends.by_slot.get((worker_id, slot))
        if sending is None or sending.error is not None:
            return
        try:
            check_given(sending, chunk, chunks=len(sending.layout.layers))
            sending.begin(chunk.pages, chunk.tokens, last=chunk.last)
        except PdxferError as error:
            self._sends.give_up(sending, error)
            return
        sending.aux = chunk.aux or sending.aux
        self._sends.pump(sending)

    def layer_done(self, worker_id: int, slot: int, layer: int) -> None:
        """The bytes of a layer of what was begun may go. A wrong layer fails the send."""
        sending = self._sends.by_slot.get((worker_id, slot))
        if sending is None or sending.error is not None:
            return
        try:
            sending.add_layer(layer)
        except PdxferError as error:
            self._sends.give_up(sending, error)
            return
        self._sends.pump(sending)

    def _take(self, sending: LiveSend, chunk: GivenChunk) -> bool:
        """Append a chunk; False where an error in it has failed the send."""
        try:
            check_given(sending, chunk)
            self._sends.take_given(sending, chunk_bytes(chunk))
            sending.add_chunk(chunk.pages, chunk.tokens, chunk.layers, last=chunk.last)
            sending.aux = chunk.aux or sending.aux
        except PdxferError as error:
            self._sends.give_up(sending, error)
            return False
        return True

    def abort(self, worker_id: int, slot: int, reason: str) -> None:
        """The worker gives its send up; a commit that has left cannot be called back."""
        sending = self._sends.by_slot.get((worker_id, slot))
        if sending is not None and sending.state is not State.SENT:
            text = f"aborted by the prefill worker: {shown_reason(reason)}"
            self._sends.give_up(sending, TransferError(f"room {sending.room} was {text}"))

    # -- what a peer says --------------------------------------------------------------------
    def on_message(self, peer_id: bytes, message: Message, now: float) -> None:
        """Act on one message of a decode life."""
        peer = self.peers.get(peer_id)
        if peer is None:
            unproven = self._unproven.pop(peer_id, set())
            waiting = Waiting(peer_id, self._sends.waited)
            peer = DecodePeer(peer_id, unproven=unproven, ended=self._sends.ended, waiting=waiting)
            self.peers[peer_id] = peer
        peer.last_heard = now
        if isinstance(message, Receive | Abort | Failed):
            peer.check_tombstones(message.generation)
        match message:
            case Attach():
                self._on_attach(peer, message)
            case Receive():
                self._matching.on_receive(peer, message)
            case Place():
                self._matching.on_place(peer, message)
            case Abort():
                self._on_abort(peer, message)
            case Committed():
                self._on_committed(peer, message.generation, now)
            case Failed():
                abort = Abort(generation=message.generation, reason=message.text)
                self._on_abort(peer, abort)
            case Heartbeat():
                peer.advance_mark(message.oldest_live_generation)
            case _:
                raise RemoteProtocolError(
                    f"decode may not send {type(message).__name__} to a prefill agent"
                )

    def heartbeat(self, peer_id: bytes) -> Heartbeat:
        """What the next heartbeat to a decode life says: how far each transfer is that moved."""
        return Heartbeat(progress=self._sends.take_progress(self.peers.get(peer_id)))

    def peer_lost(self, peer_id: bytes, reason: str) -> None:
        """A decode life ended (goodbye, a new life, silence past every lease)."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.gone = True
        text = f"decode agent {peer_id.hex()[:12]} is away: {reason}"
        error = PeerError(text, retryable=True, fields={"peer": peer_id.hex(), "lane": peer.lane})
        peer.lose_waiting(error)
        for sending in self._sends.of_peer(peer_id):
            self._sends.fail(sending, error)
        if peer.path in (PathState.OPENING, PathState.OPEN):
            self._close_path(peer)
        elif peer.path is not PathState.CLOSING:
            self._forget(peer)

    def peer_joined(self, peer_id: bytes) -> None:
        """A session with a decode life begins; what an earlier one had of it is over."""
        self.peer_lost(peer_id, "it has begun a new session")
        if peer_id in self.peers:
            self.peers[peer_id].renew()

    def _forget(self, peer: DecodePeer) -> None:
        self.peers.pop(peer.peer_id, None)
        if peer.unproven:
            self._unproven[peer.peer_id] = peer.unproven

    def _close_path(self, peer: DecodePeer) -> None:
        peer.path = PathState.CLOSING
        self._sends.effects.append(ClosePath(peer.peer_id))

    def _open_path(self, peer: DecodePeer) -> None:
        peer.path = PathState.OPENING
        peer.path_lane, peer.path_address = peer.lane, peer.lane_address
        peer.path_revision = peer.revision
        self._sends.effects.append(OpenPath(peer.peer_id, peer.lane, peer.lane_address))

    def _on_attach(self, peer: DecodePeer, message: Attach) -> None:
        peer.take_attach(message)
        peer.judge(self.workers.values())
        if peer.path in (PathState.OPENING, PathState.OPEN):
            if (peer.path_lane, peer.path_address) != (message.lane, message.lane_address):
                # Another receive side, or another lane to the same: the new path opens behind the
                # old one.
                self._close_path(peer)
            elif peer.path is PathState.OPEN:
                self._sends.effects.append(Announce(peer.peer_id))
        elif peer.path is not PathState.CLOSING:
            self._open_path(peer)

    def _on_abort(self, peer: DecodePeer, message: Abort) -> None:
        if message.decode_incarnation:
            self._abort_life(peer, message)
            return
        generation = message.generation
        error = TransferError(f"aborted by decode: {shown_reason(message.reason)}")
        peer.abort_waiting(generation, error)
        peer.bury(generation)
        legs = list(self._sends.legs(peer, generation))
        peer.asked.add(generation)
        for sending, _ in legs:
            self._sends.fail(sending, error, aborted=(peer.peer_id, generation))
        self._sends.answer_drained(peer, generation)

    def _abort_life(self, peer: DecodePeer, message: Abort) -> None:
        life = message.decode_incarnation
        if life == peer.peer_id:
            raise RemoteProtocolError(
                "field decode_incarnation: the life that asks; it aborts older lives as a whole, "
                "and its own transfers by generation"
            )
        older = self.peers.get(life)
        if older is not None:
            older.drained_asked_by.add(peer.peer_id)
            self.peer_lost(life, f"replaced by a new life: {message.reason}")
            if life in self.peers:
                return
        if self._unproven.get(life):
            return
        self._sends.effects.append(Tell(peer.peer_id, Drained(decode_incarnation=life)))

    def commits(self, peer_id: bytes, generation: int, worker: int) -> bool:
        """Whether a `PostCommit` may still be carried out; else it is to be dropped."""
        return self._sends.commits(peer_id, generation, worker)

    def _on_committed(self, peer: DecodePeer, generation: int, now: float) -> None:
        for _, leg in self._sends.legs(peer, generation):
            if leg.plan is not None and not leg.commit_asked:
                raise RemoteProtocolError(
                    f"decode says that generation {generation} has committed before prefill worker "
                    f"{leg.receive.source_worker} asked for it"
                )
        peer.commit_waiting(generation, now + limits.UNMATCHED_DEADLINE_S)
        for sending, leg in list(self._sends.legs(peer, generation)):
            leg.committed = True
            self._sends.proceed(sending)

    # -- what the lane says ------------------------------------------------------------------
    def on_path_opened(self, peer_id: bytes, error: str) -> None:
        """The path to a decode life is usable, or could not be opened."""
        peer = self.peers.get(peer_id)
        if peer is None:
            self._sends.effects.append(ClosePath(peer_id))
            return
        if peer.path is PathState.CLOSING:
            if error:  # closed before it was open: no PathClosed follows
                self.on_path_closed(peer_id, error, drained=True)
            return
        if error:
            peer.path = PathState.CLOSED
            self._lane_failed(peer, f"the lane could not be opened: {error}")
            return
        peer.path = PathState.OPEN
        self._sends.effects.append(Announce(peer_id))
        for sending in self._sends.of_peer(peer_id):
            self._sends.pump(sending)

    def on_path_awaited(self, peer_id: bytes) -> None:
        """The lane waits for decode to connect: decode is told where."""
        if peer_id in self.peers:
            self._sends.effects.append(Announce(peer_id))

    def on_batch(  # noqa: PLR0913 the leg, its chunk, and what became of it
        self,
        peer_id: bytes,
        generation: int,
        source_worker: int,
        number: int,
        *,
        length_bytes: int,
        runs: int,
        error: str,
        ended: bool,
    ) -> None:
        """A part of a chunk ended: placed and flushed, or with its first error.

        Args:  number: of the chunk.
               ended: nothing more of that chunk is in flight, nor will be posted.
        """
        peer = self.peers.get(peer_id)
        for sending, leg in self._sends.legs(peer, generation):
            if sending.worker != source_worker:
                continue
            if peer is not None:
                peer.moved[generation] = None
            if ended:
                leg.posts_in_flight.discard(number)
            leg.bytes_placed += length_bytes
            sending.moved = True
            leg.runs += runs
            if error:
                leg.batch_failed = True
                self._leg_failed(f"a write to decode failed: {error}", sending, leg)
            elif ended and (leg.posts_in_flight or not sending.complete):
                self._sends.note_returned(sending)  # else all of it, with its commit
            return

    def on_post_failed(
        self, peer_id: bytes, generation: int, source_worker: int, *, error: PdxferError
    ) -> None:
        """A chunk could not be handed to the lane, or not in full: no commit may follow."""
        for sending, leg in self._sends.legs(self.peers.get(peer_id), generation):
            if sending.worker == source_worker:
                leg.batch_failed = True
                self._sends.fail(sending, error)
                return

    def on_commit_sent(
        self, peer_id: bytes, generation: int, source_worker: int, *, error: str
    ) -> None:
        """A commit has left behind its bytes, or cannot."""
        for sending, leg in self._sends.legs(self.peers.get(peer_id), generation):
            if sending.worker != source_worker:
                continue
            if error:
                self._leg_failed(f"the commit failed: {error}", sending, leg)
                return
            if leg.bytes_placed != leg.bytes_planned and sending.error is None:
                text = (
                    f"placed {leg.bytes_placed} of {leg.bytes_planned} bytes and no error was told"
                )
                self._sends.fail(sending, LocalProtocolError(f"room {sending.room}: {text}"))
                return
            leg.sent = True
            self._sends.proceed(sending)
            return

    def on_cancelled(self, peer_id: bytes, generation: int) -> None:
        """The path has nothing of this generation left."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        for sending, leg in list(self._sends.legs(peer, generation)):
            leg.drained = True
            leg.posts_in_flight.clear()
            self._sends.proceed(sending)
        peer.asked.add(generation)
        self._sends.answer_drained(peer, generation)

    def on_path_closed(self, peer_id: bytes, error: str, *, drained: bool) -> None:
        """The path is closed: nothing reads our memory for it any more; its transfers fail.

        Without `drained`, bytes that had left may still reach decode's memory.
        """
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        asked, peer.path = peer.path is PathState.CLOSING, PathState.CLOSED
        text = (
            f"the path to decode agent {peer_id.hex()[:12]} by lane {peer.path_lane} is closed: "
            f"{error or 'in order'}"
        )
        fields = {"peer": peer_id.hex(), "lane": peer.path_lane}
        failure = PeerError(text, retryable=True, fields=fields)
        for sending in self._sends.of_peer(peer_id):
            self._sends.fail(sending, failure)
        for generation in list(peer.legs):
            busy = any(not leg.drained for _, leg in self._sends.legs(peer, generation))
            if busy and not drained:
                peer.unproven.add(generation)
            self.on_cancelled(peer_id, generation)
        if peer.gone:
            self._forget(peer)
            for asker in sorted(peer.drained_asked_by) if not peer.unproven else ():
                self._sends.effects.append(Tell(asker, Drained(decode_incarnation=peer_id)))
        elif not asked:
            self._lane_failed(peer, str(failure))
        elif peer.lane_address:
            self._open_path(peer)

    # -- time --------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """End what has waited past its deadline or lost its lease."""
        for sending in list(self.sendings.values()):
            if now >= sending.check_at:
                self._deadlines.check(sending, now)
            if sending.state is State.MOVING:
                self._sends.announce(sending)
        self._sends.forget_failed(now)
        self._sends.ended.forget(now)
        for peer in self.peers.values():
            peer.forget_unclaimed(now)

    # -- inside ------------------------------------------------------------------------------
    def _tell_workers(self) -> None:
        for peer in self.peers.values():
            peer.judge(self.workers.values())
            if peer.path is PathState.OPEN:
                self._sends.effects.append(Announce(peer.peer_id))

    def _leg_failed(self, what: str, sending: LiveSend, leg: SendLeg) -> None:
        peer = self.peers.get(leg.peer)
        self._sends.fail(sending, leg_failed(what, self.workers, peer, sending, leg))

    def _lane_failed(self, peer: DecodePeer, text: str) -> None:
        message = LaneFailed(revision=peer.path_revision, lane=peer.path_lane, text=text)
        self._sends.effects.append(Tell(peer.peer_id, message))

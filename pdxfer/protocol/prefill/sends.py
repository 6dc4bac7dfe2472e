"""The live sends of a prefill agent: each is moved as far as it can be, and ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdxfer import limits
from pdxfer.errors import PdxferError
from pdxfer.protocol.effects import (
    Cancel,
    Effect,
    ForgetLeg,
    Free,
    Show,
    ShowReturned,
    Tell,
)
from pdxfer.protocol.given_bytes import GivenBytes
from pdxfer.protocol.prefill.ended import EndedReceives
from pdxfer.protocol.prefill.live_send import LiveSend, SendLeg
from pdxfer.protocol.prefill.peer import DecodePeer, PathState
from pdxfer.protocol.prefill.posting import ask_commit, check_tokens, post_chunk
from pdxfer.protocol.prefill.waiting import SendKey, Waited
from pdxfer.protocol.state import FINAL, State
from pdxfer.protocol.tables import SendingEvent
from pdxfer.protocol.workers import Worker
from pdxfer.wire.messages import Drained, Failed, Progress, Receive


@dataclass(slots=True)
class FailedSend:
    """A send that failed before every receiver of its room had come."""

    error: PdxferError
    told: set[int]
    """Receivers that were told of the failure, by index: a later receive of theirs is a new
    attempt."""
    forget_at: float | None = None
    """When this is forgotten; the next tick sets it."""


class Sends:
    """The sends of one agent. State changes through the table only."""

    def __init__(self, workers: dict[int, Worker], peers: dict[bytes, DecodePeer]) -> None:
        self.workers = workers
        self.peers = peers
        self.live: dict[tuple[int, int], LiveSend] = {}
        """(worker, room) to send, until it is final."""
        self.by_slot: dict[tuple[int, int], LiveSend] = {}
        """(worker, board slot) to send."""
        self.failed: dict[tuple[int, int], FailedSend] = {}
        """(worker, room) to why its send failed, for receivers that have not come yet."""
        self.given = GivenBytes()
        self.ended = EndedReceives()
        self.waited: Waited = {}
        self.departing: set[int] = set()
        """Workers that went away and whose memory may still be read."""
        self.effects: list[Effect] = []
        """What is to be done, in order."""

    def take_given(self, sending: LiveSend, length_bytes: int) -> None:
        """Count what a worker gives with a send, until that is final.

        Raises:
            ResourceError: over a budget; nothing is counted.
        """
        self.given.take(sending.worker, sending.room, length_bytes)
        sending.given_bytes += length_bytes

    def pump(self, sending: LiveSend) -> None:
        """Move what can move: bind, post chunks in order to every leg, ask for commits."""
        if sending.error is not None or not sending.matched:
            return
        try:
            if sending.state is State.WAITING:
                sending.advance(SendingEvent.READY)
                self.show(sending)
            for leg in sending.legs.values():
                self._pump_leg(sending, leg)
        except PdxferError as error:
            self.fail(sending, error)
            return
        self.proceed(sending)

    def _pump_leg(self, sending: LiveSend, leg: SendLeg) -> None:
        """Post writes, then the commit, then change the state; announcements come later."""
        check_tokens(sending, leg)
        if not self._has_path(leg):
            return  # `on_path_opened` goes on from here
        began = sending.state is State.READY and bool(sending.chunks)
        if began:
            sending.advance(SendingEvent.MOVING)
        while leg.chunks_posted < len(sending.chunks):
            self.effects += post_chunk(sending, leg, sending.chunks[leg.chunks_posted])
        if sending.complete and not leg.commit_asked:
            index = self.workers[sending.worker].rank.index
            self.effects += ask_commit(sending, leg, index)
        if began:
            self.show(sending)

    def _has_path(self, leg: SendLeg) -> bool:
        """Whether writes can be posted now; a leg that owes nothing needs no path."""
        peer = self.peers.get(leg.peer)
        return leg.plan is None or (peer is not None and peer.path is PathState.OPEN)

    def why_stuck(self, sending: LiveSend) -> str:
        """What a matched send that does not move waits for, in words."""
        unplaced = [leg for leg in sending.legs.values() if leg.place is None]
        if unplaced:
            return f"{_receivers(unplaced)} of {sending.receiver_count} placed no pages"
        if any(not self._has_path(leg) for leg in sending.legs.values()):
            return "no path to decode is open"
        if sending.layers_left:
            left = sorted(sending.layers_left)
            return f"layers {left} of the chunk that was begun were not told done (layer_done)"
        if not sending.complete:
            return f"{len(sending.chunks)} chunk(s) came from the prefill worker, and no last one"
        return "the lane has not flushed what was posted"

    def why_unmatched(self, sending: LiveSend) -> str:
        """Which receivers a send has waited for, in words."""
        room = f"room {sending.room}"
        if not sending.legs:
            return f"no receive came for {room} before its deadline"
        came = list(sending.legs.values())
        placed = [leg for leg in came if leg.place is not None]
        return (
            f"{room}: {_receivers(came)} of {sending.receiver_count} had come before its deadline, "
            f"{_receivers(placed)} had placed pages"
        )

    def announce(self, sending: LiveSend) -> None:
        """Tell decode of chunks that are still on their way.

        Not at once: what is moved in less than a tick is told by its commit alone, and nothing
        competes with the bytes.
        """
        for leg in sending.legs.values():
            if not leg.sent:
                self.effects += [Tell(leg.peer, message) for message in leg.announcements]
            leg.announcements.clear()

    def proceed(self, sending: LiveSend) -> None:
        """Take every step that the flags of the legs allow."""
        legs = sending.legs.values()
        if sending.state is State.FENCING:
            if all(leg.drained for leg in legs):
                sending.advance(SendingEvent.DRAINED)
                self.finish(sending)
            return
        if sending.state is State.MOVING and sending.complete and all(leg.sent for leg in legs):
            sending.advance(SendingEvent.FLUSHED)
            self.note_returned(sending, wake=False)
            self.show(sending)
        if sending.state is State.SENT and all(leg.committed for leg in legs):
            sending.advance(SendingEvent.COMMITTED)
            self.finish(sending)

    def note_returned(self, sending: LiveSend, *, wake: bool = True) -> None:
        """Tell the worker which pages are its own again, while the send goes on."""
        if sending.error is not None or not sending.matched:
            return
        legs = list(sending.legs.values())
        if sending.returning.advance(sending.layout, sending.chunks, legs):
            back = sending.returning
            self.effects.append(
                ShowReturned(sending.worker, sending.slot, back.tokens, back.chunks, wake)
            )

    def fail(
        self,
        sending: LiveSend,
        error: PdxferError,
        *,
        aborted: tuple[bytes, int] | None = None,
    ) -> None:
        """End a send: drop what is not posted, wait for the rest; tell every receiver of it.

        Not told are `aborted`, the transfer whose own abort this is, and lives that are gone. The
        other source workers of this agent that serve one of these transfers end with it.
        """
        if sending.state in FINAL or sending.state is State.FENCING:
            return
        sending.error = error
        for leg in sending.legs.values():
            # What decode says of a leg (committed) says nothing of what the lane still reads.
            leg.drained = leg.sent or not (
                leg.posts_in_flight or leg.commit_asked or leg.batch_failed
            )
            if not leg.drained:
                self.effects.append(Cancel(leg.peer, leg.generation))
            if not leg.committed:
                self._end_leg(sending, leg, aborted)
        busy = any(not leg.drained for leg in sending.legs.values())
        sending.advance(SendingEvent.FAILED_BUSY if busy else SendingEvent.FAILED_IDLE)
        legs = list(sending.legs.values())
        if busy:
            self.show(sending)
        else:
            self.finish(sending)
        for leg in legs:
            # One transfer fails as a whole: the other source workers of this agent stop too.
            for other, _ in list(self.legs(self.peers.get(leg.peer), leg.generation)):
                if other is not sending and not leg.committed:
                    self.fail(other, error, aborted=aborted)

    def give_up(self, sending: LiveSend, error: PdxferError) -> None:
        """End a send for a reason of this side; receivers that have not come hear it then."""
        if sending.error is None and len(sending.legs) < max(1, sending.receiver_count):
            told = {leg.receive.receiver_index for leg in sending.legs.values()}
            self.failed.pop((sending.worker, sending.room), None)
            if len(self.failed) >= limits.FAILED_SENDS_MAX:
                del self.failed[next(iter(self.failed))]
            self.failed[sending.worker, sending.room] = FailedSend(error, told)
        self.fail(sending, error)

    def _end_leg(self, sending: LiveSend, leg: SendLeg, aborted: tuple[bytes, int] | None) -> None:
        """End a leg: no send joins this transfer any more, and its receiver hears of the end."""
        peer = self.peers.get(leg.peer)
        if peer is None or sending.error is None:
            return
        peer.bury(leg.generation)
        if leg.key != aborted and not peer.gone:
            self.tell_failed(leg.peer, leg.generation, sending.worker, sending.error)

    def commits(self, peer_id: bytes, generation: int, worker: int) -> bool:
        """Whether a commit that was asked for may leave: every write of the leg could be posted."""
        return any(
            sending.worker == worker and sending.error is None and not leg.batch_failed
            for sending, leg in self.legs(self.peers.get(peer_id), generation)
        )

    def finish(self, sending: LiveSend) -> None:
        """The send is final: its pages are the worker's."""
        self.show(sending)
        self.live.pop((sending.worker, sending.room), None)
        self.by_slot.pop((sending.worker, sending.slot), None)
        self.given.give_back(sending.worker, sending.given_bytes)
        for leg in sending.legs.values():
            self.effects.append(ForgetLeg(leg.peer, leg.generation, sending.worker))
            peer = self.peers.get(leg.peer)
            if peer is not None:
                peer.legs_bytes -= leg.pages_bytes
                peer.forget(leg.generation, (sending.worker, sending.room))
                self.answer_drained(peer, leg.generation)
        self.free_departed(sending.worker)

    def answer_drained(self, peer: DecodePeer, generation: int) -> None:
        """Say `Drained` where decode has asked, once nothing of the generation is alive here."""
        if generation in peer.asked and generation not in peer.legs.keys() | peer.unproven:
            peer.asked.discard(generation)
            self.effects.append(Tell(peer.peer_id, Drained(generation=generation)))

    def why_failed(self, receive: Receive) -> PdxferError | None:
        """Why the send of a room failed before this receiver came; said once to each."""
        failed = self.failed.get((receive.source_worker, receive.room))
        if failed is None or receive.receiver_index in failed.told:
            return None
        failed.told.add(receive.receiver_index)
        return failed.error

    def forget_failed(self, now: float) -> None:
        """Drop what no receiver has come for in time."""
        for key, failed in list(self.failed.items()):
            if failed.forget_at is None:
                failed.forget_at = now + limits.UNMATCHED_DEADLINE_S
            elif now >= failed.forget_at:
                del self.failed[key]

    def free_departed(self, worker_id: int) -> None:
        """Give up the memory of a departed worker after its last send."""
        if worker_id not in self.departing:
            return
        if not any(sending.worker == worker_id for sending in self.live.values()):
            self.departing.discard(worker_id)
            self.effects.append(Free(worker_id))

    def tell_failed(self, peer: bytes, generation: int, worker: int, error: PdxferError) -> None:
        """Tell decode the reason of a failure here."""
        told = error.to_wire()
        self.effects.append(
            Tell(
                peer,
                Failed(
                    generation=generation,
                    source_worker=worker,
                    code=told["code"],
                    text=told["text"],
                    retryable=told["retryable"],
                    fields=told["fields"],
                ),
            )
        )

    def take_progress(self, peer: DecodePeer | None) -> list[Progress]:
        """How far each transfer with a decode life is that has moved since the last call."""
        progress: list[Progress] = []
        while peer is not None and peer.moved:
            if len(progress) == limits.PROGRESS_PER_HEARTBEAT_MAX:
                break
            generation = next(iter(peer.moved))
            del peer.moved[generation]
            done = sum(leg.bytes_placed for _, leg in self.legs(peer, generation))
            if done:
                progress.append(Progress(generation=generation, bytes_done=done))
        return progress

    def legs(self, peer: DecodePeer | None, generation: int) -> Iterator[tuple[LiveSend, SendLeg]]:
        """The live legs of one transfer at this agent, with their sends."""
        if peer is None:
            return
        for key in list(peer.legs.get(generation, ())):
            sending = self.live.get(key)
            if sending is not None and (peer.peer_id, generation) in sending.legs:
                yield sending, sending.legs[peer.peer_id, generation]

    def of_peer(self, peer_id: bytes) -> list[LiveSend]:
        """Sends that still owe something to a decode life."""
        peer, found = self.peers.get(peer_id), dict[SendKey, LiveSend]()
        for generation in peer.legs if peer is not None else ():
            for sending, leg in self.legs(peer, generation):
                if not leg.committed:
                    found[sending.worker, sending.room] = sending
        return list(found.values())

    def show(self, sending: LiveSend) -> None:
        """Tell the worker where its send is."""
        places = [leg.place.prefix_tokens for leg in sending.legs.values() if leg.place is not None]
        known = sending.state is not State.WAITING and bool(places)
        lanes = {
            self.peers[leg.peer].lane for leg in sending.legs.values() if leg.peer in self.peers
        }
        self.effects.append(
            Show(
                worker=sending.worker,
                slot=sending.slot,
                state=sending.state,
                error=sending.error,
                prefix_tokens=min(places) if known else None,
                length_bytes=sum(leg.bytes_placed for leg in sending.legs.values()),
                runs=sum(leg.runs for leg in sending.legs.values()),
                lane=",".join(sorted(lanes)),
                generation=min((leg.generation for leg in sending.legs.values()), default=0),
                peers=tuple(sorted({leg.peer for leg in sending.legs.values()})),
                detail={"room": sending.room, "receivers": sending.receiver_count},
            )
        )


def _receivers(legs: list[SendLeg]) -> str:
    """The indices of some receivers, in words."""
    indices = sorted(leg.receive.receiver_index for leg in legs)
    if not indices:
        return "none"
    return f"receiver{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"

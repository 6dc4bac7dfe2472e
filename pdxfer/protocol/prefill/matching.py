"""Where a receive meets its send: each is kept until the other comes, or refused. Pure."""

from __future__ import annotations

import msgspec

from pdxfer import limits
from pdxfer.errors import (
    LayoutMismatchError,
    LocalProtocolError,
    PdxferError,
    PeerError,
    RemoteProtocolError,
    ResourceError,
    TransferError,
)
from pdxfer.protocol.effects import Tell
from pdxfer.protocol.group_pages import unpack_group
from pdxfer.protocol.prefill.live_send import LiveSend, SendLeg
from pdxfer.protocol.prefill.peer import DecodePeer, failed_elsewhere
from pdxfer.protocol.prefill.sends import Sends
from pdxfer.protocol.prefill.waiting import ids_bytes
from pdxfer.protocol.state import State
from pdxfer.protocol.workers import Pair
from pdxfer.wire.messages import Matched, Place, Receive


class Matching:
    """Matches the receives of decode lives with the sends of one agent."""

    def __init__(self, sends: Sends) -> None:
        self.sends = sends

    def on_receive(self, peer: DecodePeer, message: Receive) -> None:
        """Bind a receive to its send, keep it until that comes, or say why not."""
        if message.generation <= peer.mark or message.generation in peer.tombstones:
            # Another source worker of this agent may still write for it: said only once none does.
            peer.asked.add(message.generation)
            self.sends.answer_drained(peer, message.generation)
            if message.generation in peer.tombstones:
                self._end_send(peer, message)
            return
        if peer.knows(message.generation, message.source_worker):
            raise RemoteProtocolError(
                f"room {message.room}: generation {message.generation} was received from prefill "
                f"worker {message.source_worker} already"
            )
        error = self._refusal(peer, message)
        sending = self.sends.live.get((message.source_worker, message.room))
        if error is not None:
            self._refuse(peer, message, error)
        elif sending is None and (why := self.sends.why_failed(message)) is not None:
            self._dismiss(peer, message, why)
        elif sending is None and message.must_exist:
            self._dismiss(peer, message, self._no_send(message))
        elif sending is None and (full := self._no_space(peer, message.room, message.place)):
            self._dismiss(peer, message, full)
        elif sending is None:
            peer.wait(message)
        else:
            self.bind(peer, message, sending)
            self.sends.pump(sending)

    def _refusal(self, peer: DecodePeer, message: Receive) -> PdxferError | None:
        verdict = peer.verdicts.get((message.source_worker, message.destination_worker))
        if verdict is None:
            return PeerError(
                f"room {message.room}: no plan between prefill worker {message.source_worker} and "
                f"decode worker {message.destination_worker}; one of them is not attached any more",
                retryable=True,
            )
        if verdict.error is None and len(peer.waiting) >= limits.UNMATCHED_PER_SESSION_MAX:
            return ResourceError(
                f"room {message.room}: {limits.UNMATCHED_PER_SESSION_MAX} receives of this decode "
                "agent wait for their sends already",
                retryable=True,
            )
        return verdict.error

    def _no_space(self, peer: DecodePeer, room: int, place: Place | None) -> PdxferError | None:
        """Why the page ids of a placement cannot be kept: one bound a decode life, one for all."""
        added = ids_bytes(place)
        if not added:
            return None
        bounds = [
            ("this decode agent", peer.ids_bytes, "PLACED_BYTES_PER_SESSION_MAX"),
            ("all", sum(each.ids_bytes for each in self.sends.peers.values()), "PLACED_BYTES_MAX"),
        ]
        for whose, held, name in bounds:
            allowed: int = getattr(limits, name)
            if held + added > allowed:
                return ResourceError(
                    f"room {room}: the page ids that receives of {whose} have placed here take "
                    f"{held} bytes, and {added} more are over the {allowed} allowed ({name}); "
                    "receive it again when others have ended",
                    retryable=True,
                    fields={"room": str(room), "held_bytes": str(held)},
                )
        return None

    def _no_send(self, message: Receive) -> PdxferError:
        """Why a receive that its send must wait for is not kept."""
        worker = self.sends.workers.get(message.source_worker)
        who = f"prefill worker {message.source_worker}"
        if worker is not None:
            who = f"rank {worker.rank.index} of prefill instance {worker.instance!r}"
        return PeerError(
            f"room {message.room}: {who} has no live send of it, and must_exist is set; send it "
            "first, or receive it again",
            retryable=True,
            fields={"room": str(message.room), "source_worker": str(message.source_worker)},
        )

    def _refuse(self, peer: DecodePeer, message: Receive, error: PdxferError) -> None:
        self._dismiss(peer, message, error)
        sending = self.sends.live.get((message.source_worker, message.room))
        if sending is not None and sending.state is State.WAITING:
            self.sends.fail(sending, error)
        elif not error.retryable:
            # The room's send, when it comes, fails with the same error.
            peer.keep_error(message.source_worker, message.room, error)

    def _dismiss(self, peer: DecodePeer, receive: Receive, error: PdxferError) -> None:
        """A receive is dead before it was matched; decode hears why."""
        peer.bury(receive.generation)
        self.sends.tell_failed(peer.peer_id, receive.generation, receive.source_worker, error)

    def _end_send(self, peer: DecodePeer, message: Receive) -> None:
        """The transfer has ended before this receive of it came: so does the room's send."""
        error = failed_elsewhere(message.room)
        sending = self.sends.live.get((message.source_worker, message.room))
        if sending is None:
            peer.keep_error(message.source_worker, message.room, error)
        elif sending.state is State.WAITING:
            self.sends.fail(sending, error)

    def bind(self, peer: DecodePeer, receive: Receive, sending: LiveSend) -> None:
        """Make a receive a leg of its send, or tell decode why it cannot be."""
        verdict: Pair | None = peer.verdicts.get(
            (receive.source_worker, receive.destination_worker)
        )
        taken = {leg.receive.receiver_index for leg in sending.legs.values()}
        error: PdxferError | None = sending.error
        if verdict is None or verdict.error is not None:
            error = (verdict.error if verdict else None) or PeerError(
                f"room {sending.room}: its pair of workers is not joined", retryable=True
            )
        elif sending.receiver_count not in (0, receive.receiver_count):
            error = RemoteProtocolError(
                f"room {sending.room}: receiver_count is {receive.receiver_count}, an earlier "
                f"receiver said {sending.receiver_count}"
            )
        elif peer.is_dead(receive.generation):
            error = error or failed_elsewhere(sending.room)
        elif receive.receiver_index in taken:
            error = LocalProtocolError(
                f"duplicate room {sending.room}: receiver {receive.receiver_index} of "
                f"{receive.receiver_count} is bound already"
            )
        if error is not None or verdict is None:
            self._dismiss(peer, receive, error or PeerError("no plan"))
            if isinstance(error, LayoutMismatchError | TransferError):
                self.sends.fail(sending, error)
            return
        place, receive = receive.place, msgspec.structs.replace(receive, place=None)
        leg = SendLeg(peer=peer.peer_id, receive=receive, plan=verdict.plan)
        leg.committed = receive.generation in peer.committed
        sending.receiver_count = receive.receiver_count
        sending.legs[leg.key] = leg
        sending.moved, sending.check_at = True, 0.0
        peer.legs.setdefault(leg.generation, []).append((sending.worker, sending.room))
        self.sends.effects.append(
            Tell(
                peer.peer_id,
                Matched(generation=leg.generation, source_worker=receive.source_worker),
            )
        )
        if place is not None:
            self._place(peer, sending, leg, place)

    def on_place(self, peer: DecodePeer, message: Place) -> None:
        """Note where the pages of a receive are, bound or not."""
        for sending, leg in self.sends.legs(peer, message.generation):
            if leg.receive.source_worker == message.source_worker:
                self._place(peer, sending, leg, message)
                self.sends.pump(sending)
                return
        for source_worker, room in peer.waiting.keys(message.generation):
            if source_worker != message.source_worker:
                continue
            error: PdxferError | None
            if peer.waiting.placed(message.generation, source_worker):
                error = _placed_twice(room)
            else:
                error = self._no_space(peer, room, message)
            if error is not None:
                peer.abort_waiting(message.generation, error)
                peer.bury(message.generation)
                self.sends.tell_failed(peer.peer_id, message.generation, source_worker, error)
                return
        peer.waiting.place(message)

    def _place(self, peer: DecodePeer, sending: LiveSend, leg: SendLeg, place: Place) -> None:
        if leg.place is not None:
            self.sends.fail(sending, _placed_twice(sending.room))
            return
        full = self._no_space(peer, sending.room, place)
        if full is not None:
            self.sends.fail(sending, full)
            return
        try:
            pages = {name: unpack_group(group) for name, group in place.groups.items()}
        except PdxferError as error:
            self.sends.fail(sending, error)
            return
        leg.place, leg.pages = msgspec.structs.replace(place, groups={}), pages
        peer.legs_bytes += leg.pages_bytes
        sending.moved = True


def _placed_twice(room: int) -> RemoteProtocolError:
    """The error of a receive that was placed twice: nobody can say which pages decode holds."""
    return RemoteProtocolError(f"room {room}: its pages were placed twice; Place is said once")

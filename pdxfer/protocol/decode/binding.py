"""From a receive to the source workers that owe it: whom it is bound to, and what they are told.

Pure. A receive is bound once every source worker of its instance is known and agreed on.
"""

from __future__ import annotations

from pdxfer.errors import LayoutMismatchError, PdxferError, PeerError
from pdxfer.protocol.decode.live_receive import LiveReceive, ReceiveLeg, SourceKey
from pdxfer.protocol.decode.placing import place_message
from pdxfer.protocol.decode.receives import Receives
from pdxfer.protocol.decode.sources import Instance, PrefillPeer, Sources
from pdxfer.protocol.effects import OpenGeneration, Tell
from pdxfer.protocol.naming import called, fields_of
from pdxfer.protocol.workers import Worker
from pdxfer.wire.address import split_instance
from pdxfer.wire.messages import Abort, Place, Receive


class Binding:
    """Binds the receives of one agent. Changes no state: `Receives` does."""

    def __init__(self, workers: dict[int, Worker], sources: Sources, receives: Receives) -> None:
        self.workers = workers
        self.sources = sources
        self.receives = receives
        self.let_go: dict[int, LiveReceive] = {}
        """Receives that were aborted before any prefill worker knew of them. When their source
        workers become known, each is told to end the room's send."""

    @property
    def named_links(self) -> set[str]:
        """Control addresses that the receives in `let_go` name."""
        let_go = self.let_go.values()
        return {split_instance(address)[0] for each in let_go for address in each.prefill}

    def bind(self, receiving: LiveReceive, now: float) -> None:
        """Tell every source worker of the room, once the instance is complete and agreed on."""
        worker = self.workers[receiving.worker]
        try:
            found = self.sources.agree(receiving.prefill, worker)
        except PdxferError as error:
            self.receives.fail(receiving, error, now)
            if isinstance(error, LayoutMismatchError):
                self._tell_refused(receiving, worker)
            return
        if isinstance(found, str):
            self.give_up_silent(receiving, now)
            return
        instance = self.sources.gather(receiving.prefill)
        for key, pair in found.items():
            index = instance.workers[key].rank.index
            receiving.legs[key] = ReceiveLeg(sender_index=index, plan=pair.plan)
            self.receives.note_bound(receiving, key[0])
            receiving.lanes.add(self.sources.peers[key[0]].lane)
        self._tell_receives(receiving, worker, list(found))

    def take_workers(
        self, receiving: LiveReceive, peer: PrefillPeer, known: dict[int, Worker], now: float
    ) -> None:
        """A prefill life has told its workers anew; `known` are those that it had before."""
        lost = [
            key for key in receiving.legs if key[0] == peer.peer_id and key[1] not in peer.workers
        ]
        if lost:
            worker = known[lost[0][1]]
            text = f"{called('prefill', worker)} at {peer.address} went away"
            fields = {"address": peer.address, **fields_of("prefill", worker)}
            self.receives.fail(receiving, PeerError(text, retryable=True, fields=fields), now)
        elif not receiving.legs:
            self.bind(receiving, now)

    def _tell_receives(self, receiving: LiveReceive, worker: Worker, keys: list[SourceKey]) -> None:
        for key in keys:
            place = None
            if receiving.pages is not None and key in receiving.legs:
                place = self._place(receiving, key)
            message = Receive(
                room=receiving.room,
                generation=receiving.generation,
                source_worker=key[1],
                destination_worker=receiving.worker,
                receiver_index=worker.rank.index,
                receiver_count=worker.rank.instance_size,
                place=place,
                must_exist=receiving.must_exist,
            )
            self.receives.effects.append(Tell(key[0], message))

    def give_up_silent(self, receiving: LiveReceive, now: float) -> None:
        """Fail a receive that is not bound where an address has not answered for too long."""
        if receiving.unreachable_s is None or receiving.legs or receiving.error is not None:
            return
        found = self.sources.silent(receiving.prefill, now)
        if found is None or found[1] < receiving.unreachable_s:
            return
        link, silent_s = found
        text = (
            f"room {receiving.room}: no answer from the prefill agent at {link.address} for "
            f"{silent_s:.1f} s, and unreachable_s={receiving.unreachable_s:g}"
        )
        if link.problem:
            text = f"{text}: {link.problem}"
        fields = {"address": link.address, "room": str(receiving.room)}
        self.receives.fail(receiving, PeerError(text, retryable=True, fields=fields), now)

    def forget_let_go(self, worker: int, room: int) -> None:
        """Forget a room that was let go: it is received anew, and its send may come for that."""
        for generation, receiving in list(self.let_go.items()):
            if (receiving.worker, receiving.room) == (worker, room):
                del self.let_go[generation]

    def expire_let_go(self, now: float) -> None:
        """Forget what no prefill worker has come for before its deadline."""
        for generation, receiving in list(self.let_go.items()):
            if now >= receiving.deadline:
                del self.let_go[generation]

    def tell_let_go(self) -> None:
        """Bind and abort what the worker gave up early, so that the room's send ends."""
        for generation, receiving in list(self.let_go.items()):
            worker = self.workers.get(receiving.worker)
            if worker is None:
                del self.let_go[generation]
                continue
            try:
                instance = self.sources.gather(receiving.prefill)
            except PdxferError:
                del self.let_go[generation]
                continue
            if instance.pending:
                continue
            del self.let_go[generation]
            self._tell_and_abort(receiving, worker, instance)

    def _tell_refused(self, receiving: LiveReceive, worker: Worker) -> None:
        """Name the room to a refusing pair, so that its send fails with the same error."""
        instance = self.sources.gather(receiving.prefill)
        self._tell_and_abort(receiving, worker, instance)

    def _tell_and_abort(self, receiving: LiveReceive, worker: Worker, instance: Instance) -> None:
        self._tell_receives(receiving, worker, list(instance.workers))
        for peer_id in sorted({key[0] for key in instance.workers}):
            message = Abort(generation=receiving.generation, reason=str(receiving.error))
            self.receives.effects.append(Tell(peer_id, message))

    def tell_places(self, receiving: LiveReceive) -> None:
        """Tell every source worker of a bound receive where its pages are."""
        for key in receiving.legs:
            self.receives.effects.append(Tell(key[0], self._place(receiving, key)))

    def _place(self, receiving: LiveReceive, key: SourceKey) -> Place:
        """What one source worker is told of the pages; its bytes may be placed from now on."""
        leg = receiving.legs[key]
        if leg.plan is not None and receiving.pages is not None:
            self.receives.tell(receiving, key[0])
            self.receives.effects.append(
                OpenGeneration(
                    peer=key[0],
                    generation=receiving.generation,
                    source_worker=key[1],
                    destination_worker=receiving.worker,
                    plan=leg.plan,
                    pages=receiving.pages,
                )
            )
        return place_message(receiving, key)

    def why_waiting(self, receiving: LiveReceive) -> str:
        """What an unmatched receive has waited for, in words."""
        room = f"room {receiving.room}"
        if receiving.legs:
            matched = sum(leg.matched for leg in receiving.legs.values())
            if receiving.pages is None:
                return f"{room}: no pages were placed before its deadline"
            sent = f"{matched} of {len(receiving.legs)} prefill workers sent it"
            return f"{room}: {sent} before its deadline"
        try:
            found = self.sources.agree(receiving.prefill, self.workers[receiving.worker])
        except PdxferError as error:
            return f"{room}: {error}"
        return f"{room}: {found if isinstance(found, str) else 'not bound'} before its deadline"

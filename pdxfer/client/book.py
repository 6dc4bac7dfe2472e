"""Which transfers a client has, and which agent: what sync and async clients share, written once.

What may have to wait is a coroutine here; `Client` and `AsyncClient` are its two faces
(`pdxfer.client.waiting`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from pdxfer import limits
from pdxfer.client.arguments import (
    check_flag,
    check_patience,
)
from pdxfer.client.attachment import Attachment
from pdxfer.client.cache import release_cache
from pdxfer.client.line import Line, from_wire_refused
from pdxfer.client.record import TransferRecord
from pdxfer.client.resuming import Inherited, resume
from pdxfer.client.waiting import Bell
from pdxfer.errors import DaemonUnavailableError, PdxferError
from pdxfer.local import process
from pdxfer.local.board import ORPHANED
from pdxfer.local.messages import (
    AbortTransfer,
    FromAgent,
    OpenReceive,
    OpenSend,
    Outcome,
    Refused,
    ReleaseSlot,
)
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from collections.abc import Iterator

R = TypeVar("R", bound=TransferRecord)
Opening = OpenSend | OpenReceive
"""What asks for a transfer."""


class Book(Attachment, Generic[R]):
    """A worker's transfers, by what its agent and the status board say.

    Type argument: the kind of its transfers.

    Locks: `_lock` guards the transfers. It is held while a message is posted, never while anybody
        waits.
    """

    _kind: type[R]

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._inherited: list[Inherited] = []
        """What an older life of the agent left, and the present one holds."""
        self._changed = Bell()
        """Where those wait who wait for all transfers."""
        self._ended: deque[R] = deque(maxlen=limits.FINISHED_KEPT_MAX)

    def _begin_life(self, channel: Line) -> None:
        super()._begin_life(channel)
        self._live: dict[int, R] = {}
        """Transfers whose slots the agent has not got back, by slot."""
        self._by_request: dict[int, R] = {}

    # -- what an application calls -------------------------------------------------------------
    def finished(self) -> list[R]:
        """List the transfers whose pages came back, or that were quarantined, since the last call.

        Each is listed once when its pages are the worker's again: at prefill SENT (or COMMITTED or
        FAILED without it), at decode COMMITTED or FAILED. One that FAILS after SENT is listed again
        with `returned_before`: its pages were told back then. A quarantined one is listed, and
        again when it becomes FAILED; so is one whose agent has died.

        Take pages back from those whose `returned_now` is true: each transfer has it in one list
        only. `pages_returned` tells how things are when it is asked, so that a quarantined one may
        have become FAILED since it was listed; it is listed again for that.

        Reads the board only: no system call while nothing has changed on it, so that it can be
        called each step. It sees the agent's death there too.

        Cost: one memory read per live transfer. At most `limits.FINISHED_KEPT_MAX` are kept.
        """
        self.channel.check_home()
        if not self.channel.all_sent():
            self.channel.push()
        self._settle_changed()
        if not self._ended:
            return []
        with self._lock:
            listed = list(self._ended)
            self._ended.clear()
            for transfer in listed:
                transfer.tell()
        return listed

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All calls inside travel as one message at its end, with what other threads ask meanwhile.

        `open`, `send` and `receive` of this thread (or task, and tasks made inside) do not wait
        inside, whatever their `wait`: each returns its transfer at once, and a refusal is that
        transfer's error. What was asked for travels also when the block raises. Whoever waits
        meanwhile, on any thread, has what was asked for so far travel at once.
        """
        self.channel.check()
        with self.channel.together():
            yield

    @property
    def given_up(self) -> frozenset[int]:
        """Rooms whose opening was given up while their pages were the agent's already.

        An `open`, `send` or `receive` that ends before the agent has answered (its `timeout_s` is
        over, the agent died, its task was cancelled) leaves nobody with a transfer to ask. It is
        aborted then. Pages given with it are the worker's again when its room is not here any more;
        when the agent is gone, as those of any live transfer.
        """
        self._settle_changed()
        with self._lock:
            live = self._live.values()
            return frozenset(each.room for each in live if each.unwanted and each.holds_pages)

    def check_agent(self) -> None:
        """Look whether the agent is alive, without waiting.

        Raises: DaemonUnavailableError when it is gone.
        """
        self.channel.collect()
        self.channel.check()

    def close(self) -> None:
        """Detach. Live transfers are aborted by the agent; their last states stay readable.

        Idempotent; never blocks. Whoever waits gets a `DaemonUnavailableError`.
        """
        if self.channel.home != process.current():
            self.channel.close()  # a fork: the client goes on in its parent
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._settle_changed()
        with self._lock:  # other threads may still be giving slots back
            idle = not any(each.holds_pages for each in self._live.values())
        self.channel.close()
        if idle:
            self._proofs.close()
        if idle and self._agent is not None:
            release_cache(self._agent, self)

    # -- what transfers call -------------------------------------------------------------------
    def settle(self, transfer: TransferRecord) -> None:
        """List the transfer if it has ended, give its slot back, wake those who wait for it."""
        with self._lock:
            held = self._live.get(transfer.slot)
            if held is not None and held is transfer:
                self._settle(held)
        transfer.bell.ring()
        self._changed.ring()

    def is_silent(self, transfer: TransferRecord) -> bool:
        """Whether nothing touches a transfer's pages any more, after the agent has ended."""
        if self.channel.failure is None and not self._lock.locked():
            with contextlib.suppress(PdxferError):  # a fork, another loop
                self.channel.collect()
        if self.channel.failure is None:
            return False
        return self._proofs.are_complete(self.board, transfer.slot, transfer.sequence)

    def post_abort(self, transfer: TransferRecord, reason: str) -> None:
        """Tell the agent; silently nothing when it is gone.

        Raises: LocalProtocolError in a fork of the client's process, or on another event loop.
        """
        message = AbortTransfer(
            transfer=transfer.slot, sequence=transfer.sequence, reason=reason[:1024]
        )
        self._post_unless_gone(message)

    # -- for those who derive ------------------------------------------------------------------
    async def _resume(self) -> None:
        """Go on with the agent that came back at the same socket, with the same cache.

        Transfers of the life that ended stay the same objects. Those that were still in quarantine
        go on there, FENCING, QUARANTINED and FAILED, and the agent holds their pages until then: a
        new receive into them is refused. All others have ended before.

        One thread, or task, at a time; the client is not to be used by others meanwhile.

        Raises:
            LocalProtocolError: the agent has not ended, or the client is closed.
            DaemonUnavailableError: no agent is there, or the process of the old one has not ended.
            ConfigError, ResourceError: as when a client is made. The client is as it was before
                after every raise, and may resume again.
        """
        await resume(self)

    async def _open_transfer(self, message: Opening, tag: object, *, wait: bool) -> R:
        """Ask for a transfer, and with `wait` also wait until the agent has taken it.

        When cancelled, or too late, the transfer is aborted, and its slot given back when it has
        ended.
        """
        wait = check_flag("wait", wait)
        transfer = self._ask(message, tag)
        if not wait or self.channel.inside_together():
            return transfer
        in_time = False
        try:
            in_time = await self.channel.until(transfer.answered, self.timeout_s, transfer.bell)
        finally:
            if not in_time:
                self._give_up(transfer)
        if not in_time:
            raise self.channel.unanswered(message, self.timeout_s)
        if transfer.refusal is not None and not transfer.holds_pages:
            self._give_up(transfer)
            raise from_wire_refused(transfer.refusal)
        return transfer

    async def _drain(self, drain_s: float) -> bool:
        """Wait, at most for `drain_s`, until every live transfer is final; whether all are.

        An agent that is gone ends the wait: False, unless all were final before.
        """
        check_patience(drain_s, "drain_s")
        self._settle_changed()
        try:
            return await self.channel.until(self._all_final, drain_s, self._changed)
        except DaemonUnavailableError:
            return self._all_final()

    # -- inside --------------------------------------------------------------------------------
    def _all_final(self) -> bool:
        return all(each.poll() in FINAL for each in list(self._live.values()))

    def _ask(self, message: Opening, tag: object) -> R:
        self.channel.check()
        self.channel.gather()  # slots given back travel with it, in one write
        try:
            return self._ask_now(message, tag)
        finally:
            self.channel.let_go()

    def _ask_now(self, message: Opening, tag: object) -> R:
        self._settle_changed()
        with self._lock:
            slot, sequence = self._slots.take()
            message = msgspec.structs.replace(message, transfer=slot, sequence=sequence)
            transfer = self._kind(self, message, tag)
            self._live[slot] = transfer
            self._by_request[message.request] = transfer
            try:
                self.channel.post(message)
            except BaseException:  # closed, or too large to be sent: the agent has nothing
                del self._live[slot], self._by_request[message.request]
                self._slots.undo(slot)
                raise
        return transfer

    def _give_up(self, transfer: R) -> None:
        """Give up a transfer that was asked for and that nobody will use."""
        with self._lock:
            transfer.unwanted = True
            if transfer in self._ended:
                self._ended.remove(transfer)
        transfer.abort(_GIVEN_UP)

    def _on_message(self, message: FromAgent) -> None:
        """Whatever the agent says, where it is read."""
        if isinstance(message, Outcome):
            transfer = self._live.get(message.transfer)
            if transfer is not None and transfer.sequence == message.sequence:
                transfer.hear(message)
                self.settle(transfer)
        elif isinstance(message, Refused):
            transfer = self._by_request.get(message.request)
            if transfer is not None:
                if transfer.refuse(message):
                    transfer.abort(message.text)
                self.settle(transfer)

    def _settle_changed(self) -> None:
        if not self._live:
            return
        if self._inherited:
            self._watch_inherited()
        word, ended = self.word, self.board.ended
        with self._lock:
            live = self._live.values()
            changed = [each for each in live if ended or word(each.slot) != each.settled_word]
        if not changed:
            return
        self.channel.collect()
        for transfer in changed:
            self.settle(transfer)

    def _watch_inherited(self) -> None:
        """Tell the agent of writers whose end this worker has seen; system calls, but seldom."""
        for each in list(self._inherited):
            ended = each.writers_ended
            if ended and each.transfer.final is None and self.channel.failure is None:
                self.channel.post(each.ended_message())
            if ended or each.transfer.final is not None:
                self._inherited.remove(each)

    def _settle(self, transfer: R) -> None:
        """Settle one transfer; the caller holds `_lock`."""
        word = self.word(transfer.slot)
        if word == transfer.settled_word and not word & ORPHANED:
            return
        state = transfer.poll()
        told = transfer.explained(state) or self.channel.failure is not None
        if state in FINAL:
            if told:
                transfer.note_final(state)
                self._release(transfer)
                if state is State.FAILED or not transfer.told_back:
                    self._list(transfer)
        elif state is not State.QUARANTINED and state not in transfer.returned:
            transfer.settled_word = word
        elif told and word != transfer.settled_word and not self._closed:
            transfer.settled_word = word
            if state is State.QUARANTINED or not transfer.told_back:
                self._list(transfer)

    def _release(self, transfer: R) -> None:
        del self._live[transfer.slot]
        del self._by_request[transfer.request]
        self._post_unless_gone(ReleaseSlot(transfer=transfer.slot, sequence=transfer.sequence))
        self._slots.give_back(transfer.slot)

    def _post_unless_gone(self, message: AbortTransfer | ReleaseSlot) -> None:
        """Post; nothing when the agent is gone, also when another thread learns of it only now."""
        if self.channel.failure is None:
            with contextlib.suppress(DaemonUnavailableError):
                self.channel.post(message)

    def _list(self, transfer: R) -> None:
        if not transfer.unwanted and not transfer.to_be_told:
            transfer.to_be_told = True
            self._ended.append(transfer)

    def _wake_all(self) -> None:
        """The connection is unusable: nothing more will come for anybody."""
        for transfer in list(self._live.values()):
            transfer.bell.ring(everybody=True)
        self._changed.ring(everybody=True)


_GIVEN_UP: Final = "the worker stopped waiting for the answer"

"""Which transfers a client has, and which agent: what both clients keep, without any waiting."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from pdxfer import limits
from pdxfer.client.arguments import (
    check_cache,
    check_seconds,
    check_worker,
    socket_path_of,
)
from pdxfer.client.cache import Cache, EmbeddedAgent, describe_memory, hold_cache, release_cache
from pdxfer.client.line import Line
from pdxfer.client.record import TransferRecord
from pdxfer.client.requests import check_hello, rank_info
from pdxfer.errors import (
    LocalProtocolError,
    PdxferError,
    RemoteProtocolError,
    ResourceError,
)
from pdxfer.local.board import BoardReader
from pdxfer.local.messages import (
    AbortTransfer,
    AgentHello,
    AttachWorker,
    FromAgent,
    LocalMessage,
    Opened,
    OpenReceive,
    OpenSend,
    Outcome,
    Refused,
    ReleaseSlot,
)
from pdxfer.protocol.state import FINAL, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdxfer.layout import Rank

R = TypeVar("R", bound=TransferRecord)
L = TypeVar("L", bound=Line)


@dataclass(slots=True)
class Opening(Generic[R]):
    """A transfer that the agent has been asked for."""

    kind: type[R]
    room: int
    pages: bool
    """Whether pages go with it."""
    transfer: R | None = None
    """Set with the agent's answer. (By then others may have listed and released it.)"""


class Book(Generic[R, L]):
    """A worker's transfers, by what its agent and the status board say.

    Type arguments: the kind of its transfers, the kind of its connection.

    Locks: `_lock` guards the transfers. It is held while a message is posted, never while anybody
        waits.
    """

    role: ClassVar[str]
    """`prefill` or `decode`."""

    _kind: type[R]
    """Of a transfer that nobody waits for any more."""
    channel: L
    """To the agent."""
    board: BoardReader
    word: Callable[[int], int]
    """The board's word of a slot."""

    def __init__(
        self,
        agent: str | os.PathLike[str] | EmbeddedAgent,
        cache: Cache,
        *,
        rank: Rank,
        instance: str,
        relayout: str | None,
        ignore_parts: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Check the arguments; those of `Client`."""
        self._socket_path = socket_path_of(agent)
        check_worker(rank, instance, relayout, ignore_parts)
        check_cache(cache)
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.cache = cache
        self.layout = cache.layout
        self.instance = instance
        """Name of the model instance this worker is a rank of."""
        self._lock = threading.Lock()
        self._live: dict[int, R] = {}
        """By slot: transfers whose slot the agent has not got back."""
        self._by_request: dict[int, R] = {}
        self._opening: dict[int, Opening[R]] = {}
        """By request number: transfers asked for."""
        self._given_up: dict[int, int] = {}
        """By request number: rooms asked for with pages, whose answer nobody awaits any more."""
        self._ended: deque[R] = deque(maxlen=limits.FINISHED_KEPT_MAX)
        self._closed = False
        self._hello: AgentHello | None = None
        self._agent = None if isinstance(agent, (str, os.PathLike)) else agent
        memory, self._fds = describe_memory(cache, embedded=self._agent is not None)
        self._attach = AttachWorker(
            instance=instance,
            rank=rank_info(rank),
            layout=self.layout.to_wire(),
            relayout=relayout or self.layout.relayout,
            ignore_parts=list(ignore_parts),
            memory=memory,
        )

    # -- what an application calls -------------------------------------------------------------
    @property
    def hello(self) -> AgentHello:
        """What the agent said about itself.

        Raises: LocalProtocolError before the client is attached.
        """
        if self._hello is None:
            raise LocalProtocolError("this client is not attached to its agent yet")
        return self._hello

    def finished(self) -> list[R]:
        """Transfers that became final or quarantined since the last call, each once.

        A quarantined one is listed again when it becomes FAILED. Reads the board only: no system
        call while nothing has changed on it, so that it can be called each step. It does not see
        the agent's death; every other call does, and `check_agent`.

        Cost: one memory read per live transfer. At most `limits.FINISHED_KEPT_MAX` are kept.
        """
        self._settle_changed()
        if not self._ended:
            return []
        with self._lock:
            listed = list(self._ended)
            self._ended.clear()
        return listed

    @property
    def given_up(self) -> frozenset[int]:
        """Rooms whose opening was given up while their pages were the agent's already.

        An `open`, `send` or `receive` that ends before the agent has answered (its `timeout_s` is
        over, the agent died, its task was cancelled) leaves nobody with a transfer to ask. It is
        aborted once the answer comes. Pages given with it are the worker's again when its room is
        not here any more; when the agent is gone, as those of any live transfer.
        """
        self._settle_changed()
        with self._lock:
            return frozenset(self._given_up.values())

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
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._settle_changed()
        idle = not (self._live or self._opening or self._given_up)
        self.channel.close()
        if idle and self._agent is not None:
            release_cache(self._agent, self)

    # -- what transfers call -------------------------------------------------------------------
    def settle(self, transfer: TransferRecord) -> None:
        """List the transfer if it has ended, and give its slot back once its outcome is read."""
        with self._lock:
            held = self._live.get(transfer.slot)
            word = self.word(transfer.slot)
            if held is None or held is not transfer or word == held.settled_word:
                return
            state = held.poll()
            if state in FINAL:
                if held.explained(state) or self.channel.failure is not None:
                    held.final = state
                    self._release(held)
                    self._list(held)
            elif state is not State.QUARANTINED:
                held.settled_word = word
            elif held.explained(state) or self.channel.failure is not None:
                held.settled_word = word
                self._list(held)

    def post_abort(self, transfer: TransferRecord, reason: str) -> None:
        """Tell the agent; silently nothing when it is gone."""
        message = AbortTransfer(
            transfer=transfer.slot, sequence=transfer.sequence, reason=reason[:1024]
        )
        with contextlib.suppress(PdxferError):
            self.channel.post(message)

    # -- for those who derive ------------------------------------------------------------------
    def _greeted(self, answer: FromAgent, fds: list[int]) -> None:
        """The agent has said who it is: map its board. Takes the descriptors."""
        try:
            self._hello = check_hello(answer, fds, self.role, self._socket_path)
            self.board = BoardReader(fds[0], self._hello.board_slots)
            self.word = self.board.word
            self._watch_board(fds.pop())
        finally:
            for fd in fds:
                os.close(fd)

    def _hold_cache(self) -> None:
        """Keep an embedded client's memory mapped, before its agent hears of it."""
        if self._agent is not None:
            hold_cache(self._agent, self, self.cache)

    def _instance_addresses(self) -> tuple[str, ...]:
        """Control addresses of the agent, naming this worker's instance."""
        suffix = f"#{self.instance}" if self.instance else ""
        return tuple(address + suffix for address in self.hello.addresses)

    def _watch_board(self, eventfd: int) -> None:
        """Take over the eventfd that tells of changes on the board."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _opens(self, message: OpenSend | OpenReceive, kind: type[R]) -> Iterator[Opening[R]]:
        """Inside, the transfer is asked for. A raise there means that nobody will use it."""
        self._settle_changed()
        self.channel.check()
        pages = message.chunk if isinstance(message, OpenSend) else message.place
        opening = Opening(kind, message.room, pages is not None)
        with self._lock:
            self._opening[message.request] = opening
        try:
            yield opening
        except ResourceError:  # refused, or too large to be sent: the agent has nothing
            with self._lock:
                self._opening.pop(message.request, None)
            raise
        except BaseException:
            self._give_up(message.request, opening)
            raise
        with self._lock:
            self._opening.pop(message.request, None)

    def _give_up(self, request: int, opening: Opening[R]) -> None:
        with self._lock:
            awaited = self._opening.pop(request, None) is not None
            transfer = opening.transfer
            if transfer is None:
                if awaited and opening.pages:
                    self._given_up[request] = opening.room
                return
            # The answer came just before whoever asked stopped waiting.
            transfer.unwanted = True
            if transfer in self._ended:
                self._ended.remove(transfer)
            if opening.pages and transfer.final is None:
                self._given_up[request] = opening.room
        transfer.abort(_GIVEN_UP)

    def _on_message(self, message: FromAgent) -> None:
        """Whatever the agent says, where it is read."""
        if isinstance(message, Opened):
            self._on_opened(message)
        elif isinstance(message, Outcome):
            with self._lock:
                transfer = self._live.get(message.transfer)
            if transfer is not None and transfer.sequence == message.sequence:
                transfer.hear(message)
        elif isinstance(message, Refused):
            self._on_refused(message)

    def _on_refused(self, message: Refused) -> None:
        with self._lock:
            transfer = self._by_request.get(message.request)
            if transfer is None:
                self._opening.pop(message.request, None)
                self._given_up.pop(message.request, None)
                return
        transfer.refusal = message
        transfer.abort(message.text)

    def _on_opened(self, message: Opened) -> None:
        """Made here, not by whoever asked: its first outcome may follow at once."""
        with self._lock:
            opening = self._opening.pop(message.request, None)
            kind, room = (self._kind, 0) if opening is None else (opening.kind, opening.room)
            transfer = kind(self, room, message.transfer, message.sequence, message.request)
            if opening is not None:
                opening.transfer = transfer
            transfer.unwanted = opening is None
            self._live[message.transfer] = transfer
            self._by_request[message.request] = transfer
        if transfer.unwanted:
            transfer.abort(_GIVEN_UP)

    def _settle_changed(self) -> None:
        if self._opening or self._given_up:
            self.channel.collect()  # the answer of a request that nobody waits for any more
        if not self._live:
            return
        word = self.word
        with self._lock:
            changed = [each for each in self._live.values() if word(each.slot) != each.settled_word]
        if not changed:
            return
        self.channel.collect()
        for transfer in changed:
            self.settle(transfer)

    # -- inside --------------------------------------------------------------------------------
    def _release(self, transfer: R) -> None:
        del self._live[transfer.slot]
        del self._by_request[transfer.request]
        self._given_up.pop(transfer.request, None)
        with contextlib.suppress(PdxferError):
            self.channel.post(ReleaseSlot(transfer=transfer.slot, sequence=transfer.sequence))

    def _list(self, transfer: R) -> None:
        if not transfer.unwanted:
            self._ended.append(transfer)


_GIVEN_UP: Final = "the worker stopped waiting for the answer"


def unexpected(message: LocalMessage, answer: FromAgent) -> RemoteProtocolError:
    """The agent answered with something else."""
    return RemoteProtocolError(
        f"the agent answered {type(message).__name__} with {type(answer).__name__}"
    )

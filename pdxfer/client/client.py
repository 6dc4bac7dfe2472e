"""What both clients do: attach a cache to the agent beside this worker, follow transfers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

import pdxfer
from pdxfer import limits
from pdxfer.client.cache import Cache, EmbeddedAgent, describe_memory, hold_cache, release_cache
from pdxfer.client.channel import Channel
from pdxfer.client.pages import check_seconds
from pdxfer.client.transfer import Transfer
from pdxfer.errors import ConfigError, PdxferError, RemoteProtocolError
from pdxfer.layout import Rank
from pdxfer.local.board import BoardReader
from pdxfer.local.messages import (
    AbortTransfer,
    AgentHello,
    AttachWorker,
    FromAgent,
    Opened,
    OpenReceive,
    OpenSend,
    Outcome,
    Refused,
    ReleaseSlot,
    WorkerHello,
)
from pdxfer.protocol.state import FINAL, State
from pdxfer.wire.messages import RankInfo

if TYPE_CHECKING:
    from collections.abc import Sequence


_RELAYOUT = (None, "allow", "never")


@dataclass(slots=True)
class _Opening:
    """A transfer that the agent has been asked for."""

    kind: type[Transfer]
    room: int
    """0: whoever asked has given up."""
    transfer: Transfer | None = None
    """Set with the agent's answer. (By then others may have listed and released it.)"""


T = TypeVar("T", bound=Transfer)


class Client:
    """A worker's connection to its agent. Any thread may use it; it starts none.

    Ownership: the agent writes the cache's memory only inside transfers. Keep the cache until the
    client is closed and every transfer has given its pages back.
    """

    role: ClassVar[str]
    """`prefill` or `decode`."""

    def __init__(
        self,
        agent: str | os.PathLike[str] | EmbeddedAgent,
        cache: Cache,
        *,
        rank: Rank = Rank(),  # noqa: B008 frozen
        instance: str = "",
        relayout: str | None = None,
        ignore_parts: Sequence[str] = (),
        timeout_s: float = limits.LOCAL_REQUEST_TIMEOUT_S,
    ) -> None:
        """Connect to the agent and attach the cache.

        Args:
            agent: path of the daemon's socket, or an agent of `pdxfer.embedded`.
            cache: anything with `layout` and `memory`, a pool for example.
            rank: which rank of its instance this worker is.
            instance: name of the model instance its ranks share.
            relayout: `allow` or `never`; None: the layout's own default.
            ignore_parts: parts that may be missing on the other side.
            timeout_s: how long the agent may take to answer.

        Raises:
            ConfigError: a wrong argument, or memory that this agent cannot map.
            DaemonUnavailableError: no agent there, or it does not answer.
            ResourceError: the agent has too many workers.
            Nothing stays attached after a raise.
        """
        if relayout not in _RELAYOUT:
            raise ConfigError(f"relayout={relayout!r}: must be 'allow', 'never' or None")
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.cache = cache
        self.layout = cache.layout
        self._lock = threading.Lock()
        self._live: dict[int, Transfer] = {}
        """By slot: transfers whose slot the agent has not got back."""
        self._by_request: dict[int, Transfer] = {}
        self._opening: dict[int, _Opening] = {}
        """By request number: transfers asked for."""
        self._ended: deque[Transfer] = deque(maxlen=limits.FINISHED_KEPT_MAX)
        self._closed = False
        self.instance = instance
        """Name of the model instance this worker is a rank of."""
        path = os.fspath(agent) if isinstance(agent, (str, os.PathLike)) else agent.socket_path
        self._agent = None if isinstance(agent, (str, os.PathLike)) else agent
        memory, fds = describe_memory(cache, embedded=self._agent is not None)
        self.channel = Channel(path, self.timeout_s)
        try:
            self.hello = self._greet()
            self.channel.on_message = self._on_message
            attach = AttachWorker(
                request=self.channel.new_request(),
                instance=instance,
                rank=_rank_info(rank),
                layout=self.layout.to_wire(),
                relayout=relayout or self.layout.relayout,
                ignore_parts=list(ignore_parts),
                memory=memory,
            )
            if self._agent is not None:
                hold_cache(self._agent, self, cache)
            self.channel.request(attach, fds)
        except BaseException:
            self.close()
            raise

    # -- what an application calls -------------------------------------------------------------
    def finished(self) -> list[Transfer]:
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

    def check_agent(self) -> None:
        """Look whether the agent is alive, without waiting.

        Raises: DaemonUnavailableError when it is gone.
        """
        self.channel.collect()
        self.channel.check()

    def close(self) -> None:
        """Detach. Live transfers are aborted by the agent; their last states stay readable.

        Idempotent. Threads that wait get a `DaemonUnavailableError`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._settle_changed()
        idle = not self._live
        self.channel.close()
        if idle and self._agent is not None:
            release_cache(self._agent, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- what transfers call -------------------------------------------------------------------
    def settle(self, transfer: Transfer) -> None:
        """List the transfer if it has ended, and give its slot back once its outcome is read."""
        with self._lock:
            word = self.word(transfer.slot)
            if transfer.final is not None or word == transfer.settled_word:
                return
            state = transfer.poll()
            if state in FINAL:
                if transfer.explained(state) or self.channel.failure is not None:
                    transfer.final = state
                    self._release(transfer)
                    self._list(transfer)
            elif state is not State.QUARANTINED:
                transfer.settled_word = word
            elif transfer.explained(state) or self.channel.failure is not None:
                transfer.settled_word = word
                self._list(transfer)

    def post_abort(self, transfer: Transfer, reason: str) -> None:
        """Tell the agent; silently nothing when it is gone."""
        message = AbortTransfer(
            transfer=transfer.slot, sequence=transfer.sequence, reason=reason[:1024]
        )
        with contextlib.suppress(PdxferError):
            self.channel.post(message)

    # -- for the two roles ---------------------------------------------------------------------
    def open_transfer(self, message: OpenSend | OpenReceive, kind: type[T]) -> T:
        """Ask for a transfer, and wait for its slot."""
        self._settle_changed()
        opening = _Opening(kind, message.room)
        with self._lock:
            self._opening[message.request] = opening
        try:
            answer, _ = self.channel.request(message)
        finally:
            with self._lock:
                self._opening.pop(message.request, None)
        if not isinstance(opening.transfer, kind):
            raise RemoteProtocolError(
                f"the agent answered {type(message).__name__} with {type(answer).__name__}"
            )
        return opening.transfer

    # -- inside --------------------------------------------------------------------------------
    def _greet(self) -> AgentHello:
        """First exchange: who we are, which agent this is, its board."""
        hello = WorkerHello(
            request=self.channel.new_request(),
            version=pdxfer.__version__,
            role=self.role,
            pid=os.getpid(),
        )
        answer, fds = self.channel.request(hello)
        try:
            if not isinstance(answer, AgentHello) or len(fds) != 2:
                raise RemoteProtocolError(
                    f"the agent answered WorkerHello with {type(answer).__name__} and {len(fds)} "
                    "descriptors, not with AgentHello and 2"
                )
            if (answer.version, answer.role) != (pdxfer.__version__, self.role):
                raise ConfigError(
                    f"this worker is a {self.role} worker of pdxfer {pdxfer.__version__}, the "
                    f"agent at {self.channel.socket_path} a {answer.role} agent of "
                    f"{answer.version}: both must be the same"
                )
            self.board = BoardReader(fds[0], answer.board_slots)
            self.word = self.board.word
            self.channel.watch(fds.pop())
        finally:
            for fd in fds:
                os.close(fd)
        return answer

    def _on_message(self, message: FromAgent) -> None:
        """Whatever the agent says, on the thread that reads."""
        if isinstance(message, Opened):
            self._on_opened(message)
        elif isinstance(message, Outcome):
            with self._lock:
                transfer = self._live.get(message.transfer)
            if transfer is not None and transfer.sequence == message.sequence:
                transfer.hear(message)
        elif isinstance(message, Refused):
            transfer = self._by_request.get(message.request)
            if transfer is not None:
                transfer.refusal = message
                transfer.abort(message.text)

    def _on_opened(self, message: Opened) -> None:
        """Made here, not by the thread that asked: its first outcome may follow at once."""
        with self._lock:
            opening = self._opening.pop(message.request, None) or _Opening(Transfer, 0)
            opening.transfer = transfer = opening.kind(
                self, opening.room, message.transfer, message.sequence, message.request
            )
            self._live[message.transfer] = transfer
            self._by_request[message.request] = transfer
        if not transfer.room:
            # Whoever asked has given up waiting: nobody will ever use this transfer.
            transfer.abort("the worker stopped waiting for the answer")

    def _settle_changed(self) -> None:
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

    def _release(self, transfer: Transfer) -> None:
        del self._live[transfer.slot]
        del self._by_request[transfer.request]
        with contextlib.suppress(PdxferError):
            self.channel.post(ReleaseSlot(transfer=transfer.slot, sequence=transfer.sequence))

    def _list(self, transfer: Transfer) -> None:
        if transfer.room:
            self._ended.append(transfer)


def _rank_info(rank: Rank) -> RankInfo:
    return RankInfo(
        tp=rank.tp,
        tp_size=rank.tp_size,
        pp=rank.pp,
        pp_size=rank.pp_size,
        cp=rank.cp,
        cp_size=rank.cp_size,
    )

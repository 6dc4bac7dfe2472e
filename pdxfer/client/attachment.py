"""A worker's attachment to its agent: what is handed over, and how."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import msgspec

from pdxfer import limits
from pdxfer.client.arguments import check_cache, check_seconds, check_worker, socket_path_of
from pdxfer.client.cache import Cache, EmbeddedAgent, describe_memory, hold_cache
from pdxfer.client.line import Line
from pdxfer.client.proofs import Proofs
from pdxfer.client.requests import check_hello, hello_message
from pdxfer.client.slots import Slots
from pdxfer.errors import LocalProtocolError
from pdxfer.layout import Rank
from pdxfer.local.board import BoardReader
from pdxfer.local.messages import AgentHello, AttachWorker, FromAgent, HeldTransfer
from pdxfer.protocol.workers import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Attachment:
    """Which agent a client has, and its life: connection, status board, proofs."""

    role: ClassVar[str]
    """`prefill` or `decode`."""

    board: BoardReader
    word: Callable[[int], int]
    """Reads the board's word of a slot."""

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

        An async client only checks its arguments here, and raises nothing but `ConfigError`; it
        attaches by `await create(...)`, which takes the same arguments, or by `async with`.

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
        self._socket_path = socket_path_of(agent)
        check_worker(rank, instance, relayout, ignore_parts)
        check_cache(cache)
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.cache = cache
        self.layout = cache.layout
        self.rank = rank
        """Rank of this worker in its instance."""
        self.instance = instance
        """Name of the model instance this worker is a rank of."""
        self._prepare()
        self._begin_life(self._make_channel(self._socket_path))
        self._closed = False
        self._hello: AgentHello | None = None
        self._agent = None if isinstance(agent, (str, os.PathLike)) else agent
        self.agent_is_embedded = self._agent is not None
        """Whether the agent is in this process."""
        memory, self._fds = describe_memory(cache, embedded=self.agent_is_embedded)
        self._attach = AttachWorker(
            instance=instance,
            rank=rank_info(rank),
            layout=self.layout.to_wire(),
            relayout=relayout or self.layout.relayout,
            ignore_parts=list(ignore_parts),
            memory=memory,
        )
        self._begin()

    @property
    def hello(self) -> AgentHello:
        """What the agent said about itself.

        Raises: LocalProtocolError before the client is attached.
        """
        if self._hello is None:
            raise LocalProtocolError("this client is not attached to its agent yet")
        return self._hello

    def close(self) -> None:
        """Detach."""
        raise NotImplementedError

    # -- for those who derive ------------------------------------------------------------------
    def _prepare(self) -> None:
        """Make what a client needs before its first life of an agent."""

    def _begin(self) -> None:
        """Take over the arguments, which were checked."""

    def _make_channel(self, socket_path: str) -> Line:
        """Make the object of the connection, unconnected."""
        raise NotImplementedError

    def _begin_life(self, channel: Line) -> None:
        """Make what the client has for one life of its agent: connection, board, proofs."""
        self.channel = channel
        """The connection to the agent."""
        self._proofs = Proofs(self.role)
        channel.on_message = self._on_message
        channel.on_board = self._settle_changed
        channel.on_failure = self._wake_all
        channel.on_writer = self._proofs.hear

    async def _attach_to_agent(self) -> None:
        """Connect, and hand the cache over. Nothing stays attached after a raise."""
        try:
            await self._connect_and_attach(lambda: self._attach.held)
        except BaseException:
            self.close()
            raise

    async def _connect_and_attach(self, held: Callable[[], list[HeldTransfer]]) -> None:
        channel = self.channel
        await channel.connect(self.timeout_s)
        self._proofs.process = channel.agent_process(self._agent)
        hello = hello_message(channel.new_request(), self.role)
        self._greeted(*await channel.request(hello, timeout_s=self.timeout_s))
        if self._agent is not None:
            # The memory stays mapped from before the agent hears of it.
            hold_cache(self._agent, self, self.cache)
        attach = msgspec.structs.replace(self._attach, request=channel.new_request(), held=held())
        await channel.request(attach, self._fds, timeout_s=self.timeout_s)

    def _greeted(self, answer: FromAgent, fds: list[int]) -> None:
        """The agent has said who it is: map its board. Takes the descriptors."""
        try:
            self._hello = check_hello(answer, fds, self.role, self._socket_path)
            self.board = BoardReader(fds[0], self._hello.board_slots)
            self.word = self.board.word
            self._slots = Slots(self.board.slots)
            self.channel.watch(fds.pop())
        finally:
            for fd in fds:
                os.close(fd)

    def _instance_addresses(self) -> tuple[str, ...]:
        """Control addresses of the agent, naming this worker's instance."""
        suffix = f"#{self.instance}" if self.instance else ""
        return tuple(address + suffix for address in self.hello.addresses)

    def _on_message(self, message: FromAgent) -> None:
        """Whatever the agent says, where it is read."""
        raise NotImplementedError

    def _settle_changed(self) -> None:
        """Look at what has changed on the board."""
        raise NotImplementedError

    def _wake_all(self) -> None:
        """The connection is unusable: nothing more will come for anybody."""
        raise NotImplementedError

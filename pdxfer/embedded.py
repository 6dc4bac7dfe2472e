"""Agents inside the worker process, on a thread of their own, behind the same clients.

A client attaches through the same Unix socket and the same messages as to a daemon; memory goes as
an address of this process, so any tensor will do.

An agent never keeps its process: it ends when the interpreter does, however that came about, and in
a child of `multiprocessing` when that child's work is done. Its sockets lie in a folder of their
own, which goes with it. A process that ends without Python's doing (`os._exit`, a signal that is
not handled) leaves the folder until an embedded agent of the same user starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from pathlib import Path

import uvloop

from pdxfer import limits
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.run import run_agent
from pdxfer.errors import ConfigError, DaemonUnavailableError
from pdxfer.local import process
from pdxfer.local.folder import OwnFolder

__all__ = [
    "AgentConfig",
    "BothAgents",
    "EmbeddedAgent",
    "both_agents",
    "decode_agent",
    "prefill_agent",
]

_AT_EXIT_PRIORITY = 100
"""Priority among the finalizers of a process that ends: agents end before whatever has no
priority."""


class EmbeddedAgent:
    """A running agent. Pass it as `agent` to a client; close it after its clients.

    Made by `prefill_agent`, `decode_agent` and `both_agents`.

    Threads:  `close` from any; the agent runs on a thread that only embedded agents use.
    Forks:  a forked child has no such thread; `close` there touches nothing of the parent's.
    """

    addresses: tuple[str, ...] = ()
    """Addresses of a prefill agent, which decode workers pass as `prefill`; empty at decode."""

    def __init__(self, config: AgentConfig) -> None:
        self._home = process.current()
        self.closed = False
        """Whether it has ended with its lanes closed: it reads and writes no page any more."""
        self._folder = None if config.socket_path else OwnFolder()
        if self._folder is not None:
            config = dataclasses.replace(config, socket_path=str(Path(self._folder.path) / "agent"))
        self.config = config
        self.socket_path = config.socket_path
        self._started: Future[dict[str, object]] = Future()
        self._ended = threading.Event()
        self._ended.set()  # it has not begun
        self._thread: threading.Thread | None = None
        self._on_thread: Sequence[EmbeddedAgent] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._at_exit = Finalize(None, self._abandon, exitpriority=_AT_EXIT_PRIORITY)

    async def serve(self) -> None:
        """Be the agent until it is told to stop. On the thread of `start`; raises nothing."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._task = asyncio.current_task()
        try:
            with contextlib.suppress(asyncio.CancelledError):  # told to end without draining
                await run_agent(self.config, ready=self._started.set_result, stop=self._stop)
            self.closed = True
        except Exception as error:  # noqa: BLE001 whoever starts it gets it
            self.over(error)
        finally:
            self.over(DaemonUnavailableError("the embedded agent ended before it was ready"))

    @property
    def ended(self) -> bool:
        """Whether it does not run: it has ended, or has not begun."""
        return self._ended.is_set()

    def over(self, error: Exception) -> None:
        """Note that it has ended; whoever still waits for its start gets the error."""
        if not self._started.done():
            self._started.set_exception(error)
        self._ended.set()

    def begin(self, thread: threading.Thread, agents: Sequence[EmbeddedAgent]) -> None:
        """Note that it runs, with these agents on that thread; `close` waits for its end."""
        self._ended.clear()
        self._thread, self._on_thread = thread, agents

    def wait_ready(self) -> None:
        """Wait until workers can attach.

        Raises: what kept it from starting.
        """
        facts = self._started.result(limits.LOCAL_REQUEST_TIMEOUT_S + limits.CONNECT_TIMEOUT_S)
        addresses = facts["addresses"]
        self.addresses = tuple(addresses) if isinstance(addresses, list) else ()

    def close(self) -> None:
        """Drain with the deadline of the configuration, and end. Idempotent.

        In a fork of the process that started it, nothing happens: the agent goes on in its parent.

        Raises: DaemonUnavailableError: it did not end in time.
        """
        self._end(self.config.drain_deadline_s)

    def _abandon(self) -> None:
        """End at once: transfers that are live fail at both ends. The folder goes in any case."""
        try:
            self._end(0.0)
        finally:
            if self._folder is not None:
                self._folder.close()

    def _end(self, drain_s: float) -> None:
        if self._home != process.current():
            return
        if self._loop is not None and self._stop is not None and self._task is not None:
            how = self._stop.set if drain_s > 0 else self._task.cancel
            with contextlib.suppress(RuntimeError):  # the loop may have closed by itself
                self._loop.call_soon_threadsafe(how)
        patience_s = drain_s + 2 * limits.ENGINE_CLOSE_DEADLINE_S
        if not self._ended.wait(patience_s):
            raise DaemonUnavailableError(
                f"the embedded {self.config.role} agent did not stop within {patience_s} s"
            )
        if self._thread is not None and all(each.ended for each in self._on_thread):
            self._thread.join(limits.ENGINE_CLOSE_DEADLINE_S)
        if self._folder is not None:
            self._folder.close()
        self._at_exit.cancel()

    def __enter__(self) -> EmbeddedAgent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Close; where the block failed without draining, so that the error is not held up."""
        if kind is None:
            self.close()
        else:
            self._abandon()


class BothAgents:
    """A prefill and a decode agent of one process, on one thread and one loop.

    For a process whose workers do both. Pass `prefill` to a `PrefillClient`, `decode` to a
    `DecodeClient`.
    """

    def __init__(self, prefill: EmbeddedAgent, decode: EmbeddedAgent) -> None:
        self.prefill = prefill
        self.decode = decode

    def close(self) -> None:
        """Drain and end both, as `EmbeddedAgent.close`. Idempotent."""
        with contextlib.closing(self.prefill):
            self.decode.close()

    def __enter__(self) -> BothAgents:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Close both agents; at once where the block failed, so that its error is not held up."""
        try:
            self.decode.__exit__(kind, *exc)
        finally:
            self.prefill.__exit__(kind, *exc)


def _start(*agents: EmbeddedAgent) -> None:
    """Run agents on a new thread, which ends with the last of them.

    It is a daemon thread: what ends its agents at exit is their own doing, and the interpreter does
    not wait for it before that.

    Raises: what kept one of them from starting; all have ended then.
    """
    roles = "-".join(agent.config.role for agent in agents)
    thread = threading.Thread(target=_run, args=(agents,), name=f"pdxfer-{roles}", daemon=True)
    for agent in agents:
        agent.begin(thread, agents)
    thread.start()
    try:
        for agent in agents:
            agent.wait_ready()
    except BaseException:
        for agent in agents:
            agent.__exit__(BaseException)
        raise


def _run(agents: Sequence[EmbeddedAgent]) -> None:
    async def serve() -> None:
        await asyncio.gather(*(agent.serve() for agent in agents))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except Exception as error:  # noqa: BLE001 whoever starts them gets it
        for agent in agents:
            agent.over(error)


def prefill_agent(config: AgentConfig | None = None) -> EmbeddedAgent:
    """Run a prefill agent in this process; `config` None: loopback, a free port, all lanes.

    Raises: ConfigError: no configuration of a prefill agent, or a setting that is wrong.
    """
    agent = EmbeddedAgent(_of_role("prefill", config))
    _start(agent)
    return agent


def decode_agent(config: AgentConfig | None = None) -> EmbeddedAgent:
    """Run a decode agent in this process; `config` None: all lanes.

    Raises: ConfigError: no configuration of a decode agent, or a setting that is wrong.
    """
    agent = EmbeddedAgent(_of_role("decode", config))
    _start(agent)
    return agent


def both_agents(
    prefill: AgentConfig | None = None, decode: AgentConfig | None = None
) -> BothAgents:
    """Run a prefill and a decode agent in this process, on one thread and one loop.

    Raises: ConfigError, as `prefill_agent` and `decode_agent` do; neither runs then.
    """
    configs = _of_role("prefill", prefill), _of_role("decode", decode)
    agents = BothAgents(*(EmbeddedAgent(config) for config in configs))
    _start(agents.prefill, agents.decode)
    return agents


def _of_role(role: str, config: AgentConfig | None) -> AgentConfig:
    given: object = AgentConfig(role=role, socket_path="") if config is None else config
    if not isinstance(given, AgentConfig) or given.role != role:
        raise ConfigError(
            f"config={given!r}: must be an AgentConfig of pdxfer.embedded with role={role!r}, or "
            "None"
        )
    _check_types(given)
    return given


def _check_types(config: AgentConfig) -> None:
    """Refuses, by name, a setting of another type: no file and no flag has read these."""
    for field in dataclasses.fields(config):
        value: object = getattr(config, field.name)
        if field.name in ("lanes", "allowed_uids"):
            of, words = (str, "names") if field.name == "lanes" else (int, "numbers")
            fits = isinstance(value, (tuple, list)) and all(isinstance(each, of) for each in value)
            wanted = f"a tuple of {words}"
        elif field.name == "drain_deadline_s":
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
            wanted = "a number of seconds, 0 or more"
        elif field.name == "insecure":
            fits, wanted = isinstance(value, bool), "True or False"
        else:
            fits, wanted = isinstance(value, str), "a text"
        if not fits:
            raise ConfigError(f"{field.name}={value!r}: must be {wanted}")

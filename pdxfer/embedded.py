"""An agent inside the worker process, on a thread of its own, behind the same client.

The client attaches through the same Unix socket and the same messages as to a daemon; memory goes
as an address of this process, so any tensor will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import uvloop

from pdxfer import limits
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.run import run_agent
from pdxfer.errors import ConfigError, DaemonUnavailableError
from pdxfer.local import process

__all__ = ["AgentConfig", "EmbeddedAgent", "decode_agent", "prefill_agent"]


class EmbeddedAgent:
    """A running agent. Pass it as `agent` to a client; close it after its clients.

    Threads:  `close` from any; the agent runs on one thread of its own, joined by `close`.
    Forks:  a forked child has no such thread; `close` there touches nothing of the parent's.
    """

    _remove_folder: Callable[[], object] | None = None

    def __init__(self, config: AgentConfig) -> None:
        self._home = process.current()
        self.closed = False
        """Whether it has ended with its lanes closed: it reads and writes no page any more."""
        if not config.socket_path:
            folder = tempfile.mkdtemp(prefix="pdxfer-")
            self._remove_folder = weakref.finalize(self, _remove, folder, self._home)
            config = dataclasses.replace(config, socket_path=str(Path(folder) / "agent"))
        self.config = config
        self.socket_path = config.socket_path
        self._started: Future[dict[str, object]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"pdxfer-{config.role}")
        self._thread.start()
        try:
            facts = self._started.result(limits.LOCAL_REQUEST_TIMEOUT_S + limits.CONNECT_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        addresses = facts["addresses"]
        self.addresses: tuple[str, ...] = tuple(addresses) if isinstance(addresses, list) else ()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
            self.closed = True
        except Exception as error:  # noqa: BLE001 the caller of the constructor gets it
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await run_agent(self.config, ready=self._started.set_result, stop=self._stop)

    def close(self) -> None:
        """Drain with the deadline of the configuration, close, join the thread. Idempotent.

        In a fork of the process that started it, nothing happens: the agent goes on in its parent.
        """
        if self._home != process.current():
            return
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may have closed by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        patience_s = self.config.drain_deadline_s + 2 * limits.ENGINE_CLOSE_DEADLINE_S
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise DaemonUnavailableError(
                f"the embedded {self.config.role} agent did not stop within {patience_s} s"
            )
        if self._remove_folder is not None:
            self._remove_folder()

    def __enter__(self) -> EmbeddedAgent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _remove(folder: str, home: int) -> None:
    """The agent's own folder; not in a fork, which has inherited this call."""
    if home == process.current():
        shutil.rmtree(folder, ignore_errors=True)


def prefill_agent(config: AgentConfig | None = None) -> EmbeddedAgent:
    """Run a prefill agent in this process; `config` None: loopback, a free port, all lanes.

    Raises: ConfigError: no configuration of a prefill agent, or a setting that is wrong.
    """
    return EmbeddedAgent(_of_role("prefill", config))


def decode_agent(config: AgentConfig | None = None) -> EmbeddedAgent:
    """Run a decode agent in this process; `config` None: all lanes.

    Raises: ConfigError: no configuration of a decode agent, or a setting that is wrong.
    """
    return EmbeddedAgent(_of_role("decode", config))


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

"""Running a daemon: settings, logs, the uvloop loop, signals, the ready line, the exit code.

Exit codes: 0 stopped in order; 1 failed while serving; 2 bad configuration; 3 cannot bind, or a
lane asked for is missing; 4 stopped, and transfers were still running at the drain deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvloop

from pdxfer import __version__, limits
from pdxfer.daemon import config as configuration
from pdxfer.daemon import log
from pdxfer.daemon.descriptors import raise_limit, watch_descriptors
from pdxfer.errors import ConfigError, PdxferError
from pdxfer.fabric.ucx_listener import listener_warning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdxfer.agent.config import AgentConfig
    from pdxfer.daemon.config import DaemonConfig


_logger = logging.getLogger("pdxfer.daemon")


class RunAgent(Protocol):
    """`pdxfer.agent.run.run_agent`: serves until `stop`, then drains."""

    async def __call__(
        self,
        config: AgentConfig,
        *,
        ready: Callable[[dict[str, object]], None],
        stop: asyncio.Event,
    ) -> int:
        """Returns how many transfers were still running at the drain deadline."""
        ...


class ExitCode(IntEnum):
    """What a supervisor can tell from the end of a daemon."""

    STOPPED = 0
    FAILED = 1
    BAD_CONFIGURATION = 2
    CANNOT_SERVE = 3
    NOT_DRAINED = 4


def parser(role: str) -> argparse.ArgumentParser:
    """The command line of `pdxfer-prefill` or `pdxfer-decode`, made from the settings table."""
    command = argparse.ArgumentParser(
        prog=f"pdxfer-{role}",
        description=f"The {role} daemon. A flag beats the environment, which beats the file.",
        epilog="Exit codes: 0 stopped, 1 failed while serving, 2 bad configuration, "
        "3 cannot bind or lane missing, 4 transfers still ran at the drain deadline.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command.add_argument("--version", action="version", version=__version__)
    command.add_argument("--config", metavar="FILE", type=Path, help="TOML file of settings")
    for row in configuration.settings_of(role):
        shown = ",".join(map(str, row.default)) if isinstance(row.default, tuple) else row.default
        text = f"{row.help} [{row.variable}; default: {shown if shown != '' else 'none'}]"
        if isinstance(row.default, bool):
            command.add_argument(
                row.flag, dest=row.name, action="store_const", const="true", help=text
            )
        else:
            command.add_argument(row.flag, dest=row.name, metavar="VALUE", help=text)
    return command


def main(role: str, arguments: Sequence[str] | None = None) -> int:
    """Run the daemon of this role until SIGTERM or SIGINT; returns its exit code."""
    flags = vars(parser(role).parse_args(arguments))
    file = flags.pop("config", None)
    try:
        settings = configuration.resolve(role, flags, configuration.current_environment(), file)
        log.configure(settings.log_level, settings.log_format)
        from pdxfer.agent.run import run_agent

        agent = configuration.agent_config(role, settings)
    except ConfigError as error:
        sys.stderr.write(f"pdxfer-{role}: {error}\n")
        return ExitCode.BAD_CONFIGURATION
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(role, settings, agent, run_agent).run())


class Daemon:
    """One life of a daemon.

    Threads:  the main thread's loop only.
    """

    def __init__(
        self, role: str, settings: DaemonConfig, agent: AgentConfig, run_agent: RunAgent
    ) -> None:
        self._run_agent = run_agent
        self._role = role
        self._settings = settings
        self._agent = agent
        self._stop = asyncio.Event()
        self._ready = False

    async def run(self) -> ExitCode:
        """Serve until told to stop, then drain; the exit code says how it ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            code = await self._serve()
        except ConfigError as error:
            code = self._failed(error, ExitCode.BAD_CONFIGURATION)
        except (PdxferError, OSError) as error:
            code = self._failed(error, ExitCode.FAILED if self._ready else ExitCode.CANNOT_SERVE)
        finally:
            self._remove_ready_file()
        _logger.info("stopped", extra={"fields": {"exit_code": int(code), "reason": code.name}})
        return code

    async def _serve(self) -> ExitCode:
        warning = listener_warning(self._settings.lanes)
        if warning:
            _logger.warning("ucx_listener", extra={"fields": {"text": warning}})
        watching = asyncio.ensure_future(watch_descriptors(raise_limit()))
        try:
            return await self._serve_watched()
        finally:
            watching.cancel()

    async def _serve_watched(self) -> ExitCode:
        serving = asyncio.ensure_future(
            self._run_agent(self._agent, ready=self._on_ready, stop=self._stop)
        )
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        # The agent keeps the drain deadline itself; this one only bounds an agent that cannot.
        patience_s = self._settings.drain_deadline_s + limits.DAEMON_CLOSE_SLACK_S
        try:
            left_running = await asyncio.wait_for(serving, patience_s)
        except TimeoutError:
            _logger.exception("close_deadline_passed", extra={"fields": {"after_s": patience_s}})
            return ExitCode.NOT_DRAINED
        return ExitCode.NOT_DRAINED if left_running else ExitCode.STOPPED

    def _on_signal(self, number: signal.Signals) -> None:
        fields = {"signal": number.name, "drain_deadline_s": self._settings.drain_deadline_s}
        _logger.info("stopping", extra={"fields": fields})
        self._stop.set()

    def _on_ready(self, facts: dict[str, object]) -> None:
        self._ready = True
        ready = {"role": self._role, "pid": os.getpid(), "version": __version__, **facts}
        _logger.info("ready", extra={"fields": ready})
        if self._settings.ready_file:
            write_ready_file(Path(self._settings.ready_file), ready)

    def _remove_ready_file(self) -> None:
        if self._settings.ready_file:
            Path(self._settings.ready_file).unlink(missing_ok=True)

    def _failed(self, error: Exception, code: ExitCode) -> ExitCode:
        fields = {"error": type(error).__name__, "text": str(error)}
        _logger.error("failed", extra={"fields": fields})
        return code


def write_ready_file(path: Path, facts: dict[str, object]) -> None:
    """Write `facts` as JSON so that a reader sees all of the file or none."""
    plain = {
        name: value.hex() if isinstance(value, bytes) else value for name, value in facts.items()
    }
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(plain) + "\n", encoding="utf-8")
    draft.replace(path)

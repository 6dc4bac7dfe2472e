"""A pair of daemons on this machine, on free ports, for as long as a `with` block."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.launch.child import ChildFailedError

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from types import TracebackType

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What a daemon wrote when it was ready."""

    pid: int
    socket: str
    addresses: tuple[str, ...]


class DaemonProcess:
    """One daemon. Use it as a context manager: leaving sends SIGTERM and waits.

    Threads:  one at a time.
    """

    def __init__(self, role: str, folder: Path, settings: Sequence[str] = ()) -> None:
        """Start `pdxfer-<role>` with its socket, ready file and log in `folder`."""
        self.role = role
        self._ready_file = folder / f"{role}.ready"
        self.log_file = folder / f"{role}.log"
        command = [sys.executable, "-m", "pdxfer.daemon", role]
        command += ["--socket-path", str(folder / f"{role}.sock")]
        command += ["--ready-file", str(self._ready_file)]
        if role == "prefill":
            command += ["--bind", "tcp://127.0.0.1:0"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_ready(self, timeout_s: float = limits.DAEMON_READY_TIMEOUT_S) -> DaemonFacts:
        """Wait for the ready file.

        Raises:   ChildFailedError with the end of the daemon's log.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ChildFailedError(
                    f"pdxfer-{self.role} is not ready (exit code {self._process.poll()}):\n"
                    + self.log_tail()
                )
            time.sleep(_POLL_S)
        facts = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return DaemonFacts(facts["pid"], facts["socket"], tuple(facts["addresses"]))

    def log_tail(self, lines: int = 15) -> str:
        """The last lines it logged."""
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    @property
    def running(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, wait, kill when it does not end; returns its exit code. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(limits.DAEMON_DRAIN_DEADLINE_S + limits.DAEMON_CLOSE_SLACK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class DaemonPair:
    """`pdxfer-prefill` and `pdxfer-decode` over one lane, in a folder of their own."""

    def __init__(self, lane: str) -> None:
        self._lane = lane

    def __enter__(self) -> DaemonPair:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdxfer-")))
            settings = ["--lanes", self._lane]
            self._daemons = [
                stack.enter_context(DaemonProcess(role, folder, settings))
                for role in ("prefill", "decode")
            ]
            self.prefill, self.decode = (daemon.wait_ready() for daemon in self._daemons)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for daemon in self._daemons:
                sys.stderr.write(f"--- log of pdxfer-{daemon.role}\n{daemon.log_tail()}\n")
        self._stack.close()

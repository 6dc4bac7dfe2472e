"""A worker process: started with a channel, watched, and ended whatever happens."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.launch.channel import Channel, ChannelClosedError, Event

if TYPE_CHECKING:
    from types import TracebackType

Program = Callable[[Channel, Event], None]
"""What a child runs: its channel, and the first event as its options."""


class ChildFailedError(RuntimeError):
    """A process ended, went silent or reported an error; the text names it and says which."""


class Child:
    """The parent's handle. Use it as a context manager: leaving ends the process.

    Threads:  one at a time.
    """

    def __init__(
        self, name: str, module: str, *, pass_fds: Sequence[int] = (), **options: object
    ) -> None:
        """Start `python -m module` and send it `options`; it inherits `pass_fds`."""
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        self._channel = Channel(ours)
        self._channel.send(**options)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, **event: object) -> None:
        """Tell the child something."""
        try:
            self._channel.send(**event)
        except ChannelClosedError as error:
            raise ChildFailedError(self._epitaph()) from error

    def receive(self, expected: str, timeout_s: float = limits.CHILD_STEP_TIMEOUT_S) -> Event:
        """The next event, which has to be `expected`.

        Raises:   ChildFailedError naming this child: it ended, failed, or was silent for too long.
        """
        try:
            event = self._channel.receive(timeout_s)
        except TimeoutError as error:
            raise ChildFailedError(
                f"the {self.name} process did not say {expected!r} within {timeout_s:g} s"
            ) from error
        except ChannelClosedError as error:
            raise ChildFailedError(self._epitaph()) from error
        if event.get("event") == "error":
            raise ChildFailedError(f"the {self.name} process failed: {event.get('text')}")
        if event.get("event") != expected:
            raise ChildFailedError(
                f"the {self.name} process said {event.get('event')!r}, expected {expected!r}"
            )
        return event

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._process.kill()

    def close(self) -> None:
        """Close the channel, which asks the child to end; kill it when it does not. Idempotent."""
        self._channel.close()
        try:
            self._process.wait(limits.CHILD_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.terminate()
        self.close()

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(limits.CHILD_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"the {self.name} process closed its channel"
        return f"the {self.name} process ended with exit code {code}"


def child_main(program: Program) -> None:
    """What a worker module calls under `if __name__ == "__main__"`. Ends with its parent.

    An exception is told to the parent as an `error` event, with its traceback on stderr.
    """
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        program(channel, channel.receive(limits.CHILD_STEP_TIMEOUT_S))
    except ChannelClosedError:
        return
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001 whatever it is, the parent has to hear of it
        traceback.print_exc()
        try:
            channel.send(event="error", text=f"{type(error).__name__}: {error}")
        except ChannelClosedError:
            sys.exit(1)
        sys.exit(1)

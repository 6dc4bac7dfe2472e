"""GPU events that an embedded agent waits for, on a thread of their own and never on its loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from pdxfer.local.events import Queried

_POLL_S: Final = 0.0001
"""An event has nothing that could be waited for, so it is asked; a layer takes longer than this."""


Then = Callable[[Exception | None], None]


class EventWatch:
    """Asks events until they are done. The thread lives while there is something to ask.

    Args:  done: called on that thread with what was given to `add`, and with the error of an event
           that could not be asked, else None.
    """

    def __init__(self, done: Callable[[Then, Exception | None], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._waiting: list[tuple[Queried, Then]] = []
        self._running = False
        self._closed = False

    def add(self, event: Queried, then: Then) -> None:
        """Have `then` called by `done` once the event is done. Any thread may call it."""
        with self._lock:
            self._waiting.append((event, then))
            if not self._running and not self._closed:
                self._running = True
                threading.Thread(target=self._run, name="pdxfer-events", daemon=True).start()

    def close(self) -> None:
        """Ask nothing any more; what waits is dropped."""
        with self._lock:
            self._closed = True
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                asked = list(self._waiting)
                if not asked:
                    self._running = False
                    return
            for each in asked:
                event, then = each
                try:
                    if not event.query():
                        continue
                    error = None
                except Exception as raised:  # noqa: BLE001 - whatever it is, its transfer hears it
                    error = raised
                with self._lock:
                    if self._closed:
                        return
                    self._waiting.remove(each)
                self._done(then, error)
            time.sleep(_POLL_S)

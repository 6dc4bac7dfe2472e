"""Which CURVE key each decode agent came with, and whether that key may still talk here.

libzmq asks once, when a connection is made. A key that is taken off the allow-list later must stop
talking too, on a connection that lives: that is decided here, for every frame and by a timer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdxfer.errors import ConfigError
from pdxfer.limits import CONTROL_BOUND_KEYS_MAX, CONTROL_KEYS_UNREADABLE_S

if TYPE_CHECKING:
    from collections.abc import Container

    from pdxfer.control.keys import AllowList

log = logging.getLogger(__name__)


class Admission:
    """Holds the frames of decode agents against the allow-list. No sockets.

    Args:  allowed: the keys that may connect. live: incarnations with a session, whose keys are
           never forgotten.
    Threads:  one.
    """

    def __init__(self, allowed: AllowList, live: Container[bytes]) -> None:
        self._allowed = allowed
        self._live = live
        self._key_of: dict[bytes, bytes] = {}
        """The key that each incarnation first came with."""
        self._unreadable_since: float | None = None

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, source: bytes) -> bool:
        return source in self._key_of

    def is_its_key(self, source: bytes, key: bytes) -> bool:
        """Whether `key`, 40 bytes of Z85, is the one that this incarnation first came with."""
        bound = self._key_of.get(source)
        if bound is None:
            if len(self._key_of) >= CONTROL_BOUND_KEYS_MAX:
                idle = next(known for known in self._key_of if known not in self._live)
                del self._key_of[idle]
            self._key_of[source] = bound = key
        if bound != key:
            log.warning(
                "frame_refused",
                extra={
                    "peer": source.hex(),
                    "reason": "another key uses the routing id of a known agent",
                    "key": key.decode(errors="replace"),
                    "bound": bound.decode(errors="replace"),
                },
            )
        return bound == key

    def refresh(self, now: float) -> None:
        """Read the allow-list again if it has changed; `now`: seconds of a monotonic clock.

        A list that cannot be read lets nobody in at once. Who talks already goes on for
        `CONTROL_KEYS_UNREADABLE_S`, so that a file that is being copied ends no transfer.
        """
        try:
            self._allowed.refresh()
        except ConfigError as error:
            if self._unreadable_since is None:
                self._unreadable_since = now
                reason = f"sessions end in {CONTROL_KEYS_UNREADABLE_S:g} s: {error}"
                log.error("allow_list_unreadable", extra={"reason": reason})  # noqa: TRY400 the text says it all
        else:
            self._unreadable_since = None

    def check(self, source: bytes, now: float) -> None:
        """Refuse an agent whose key is not in the allow-list any more.

        Raises:  ConfigError naming the key and what to do.
        """
        key = self._key_of.get(source, b"")
        since = self._unreadable_since
        is_stale = since is not None and now - since >= CONTROL_KEYS_UNREADABLE_S
        if key in self._allowed and not is_stale:
            return
        why = "cannot be read" if is_stale else "does not have it any more"
        raise ConfigError(
            f"this agent's public key {key.decode()} may not talk to this prefill agent: its "
            f"allow-list {why}; add the .pub file of the key there",
            fields={"key": key.decode()},
        )

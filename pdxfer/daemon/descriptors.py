"""File descriptors of a daemon: as many as the system allows, and a word when they run out.

Every connection holds one, also one that a stranger opens to a UCX port and leaves idle: UCX takes
it and never gives it up by itself. When none is left, UCX closes that listener; peers that come to
it are refused and get a new one once descriptors are free again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import Final

from pdxfer import limits

_logger = logging.getLogger("pdxfer.daemon")
_ENOUGH: Final = 1 << 20
"""Descriptors that a daemon asks for at most, also where the hard limit allows more: more are of no
use, and some kernels refuse them."""


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard one, at most 1,048,576.

    Returns: the soft limit that then holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


class DescriptorWatch:
    """Says once when descriptors become few, and once when they are enough again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._few = False

    def look(self, used: int) -> None:
        """Log what has changed, `used` descriptors being open."""
        few = used >= self._limit * limits.DESCRIPTORS_FEW_SHARE
        if few == self._few:
            return
        self._few = few
        fields = {"open": used, "limit": self._limit}
        if few:
            text = (
                "when none is left, UCX closes its listeners and workers and peers are refused: "
                "look who is connected (ss -tnp), close the UCX ports to strangers, or raise "
                "LimitNOFILE"
            )
            _logger.warning("descriptors_few", extra={"fields": {**fields, "text": text}})
        else:
            _logger.info("descriptors_enough", extra={"fields": fields})


async def watch_descriptors(limit: int) -> None:
    """Look every `DESCRIPTORS_CHECK_S`, until cancelled."""
    watch = DescriptorWatch(limit)
    while True:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # not even one is left to look with
            used = limit
        watch.look(used)
        await asyncio.sleep(limits.DESCRIPTORS_CHECK_S)

"""Which process this is, for objects that a fork must not share: known without a system call."""

from __future__ import annotations

import os
from typing import Final

from pdxfer.errors import LocalProtocolError

_HERE: Final = [os.getpid()]


def current() -> int:
    """The id of this process."""
    return _HERE[0]


def inherited(what: str, made_in: int) -> LocalProtocolError:
    """The error of using, in a forked child, what belongs to its parent."""
    return LocalProtocolError(
        f"this {what} belongs to process {made_in}, and this is process {current()}, a fork of "
        f"it: make another {what} in this process. close() here touches nothing of the parent's"
    )


def _in_child() -> None:
    _HERE[0] = os.getpid()


os.register_at_fork(after_in_child=_in_child)

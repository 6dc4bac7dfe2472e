"""A folder for the sockets of an agent that nobody gave a path: gone with its process.

Whoever ends in order removes its own. Whoever is killed, or leaves by `os._exit`, cannot: the next
one made by the same user in the same place removes it. The lock that its owner held on it is the
kernel's and has ended with the process, so nothing that lives is ever taken for dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from pdxfer.local import process

PREFIX: Final = "pdxfer-embedded-"


class OwnFolder:
    """A new folder in the place for temporary files, for this user alone."""

    def __init__(self) -> None:
        remove_left()
        self._home = process.current()
        self.path, self._lock = _locked_folder()

    def close(self) -> None:
        """Remove it with all that is in it. Idempotent; in a fork of its process: nothing."""
        if self._home != process.current() or self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def remove_left() -> None:
    """Remove what processes of this user that have ended left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one may be at it too
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _locked_folder() -> tuple[str, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(folder, fcntl.LOCK_EX)
        if os.path.exists(path):
            return path, folder
        os.close(folder)  # another one took it for left behind, before it was locked

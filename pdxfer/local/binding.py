"""The file of the agent's Unix socket: made with its mode, replaced only when its agent is dead."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from pdxfer import limits
from pdxfer.errors import ConfigError, ResourceError

_PATH_BYTES_MAX: Final = 107


def bind(path: str, *, private: bool) -> socket.socket:
    """A listening socket at `path`, put in place whole: bound and with its mode beside it first.

    Args:
        path: of the file; a socket that nobody listens on is replaced.
        private: mode 0600, else 0666.

    Raises: ConfigError when the path is too long or is no socket; ResourceError when it cannot be
        bound, or another agent listens there.
    """
    if len(os.fsencode(path)) + len(".new") > _PATH_BYTES_MAX:
        raise ConfigError(
            f"socket_path={path}: longer than the {_PATH_BYTES_MAX - len('.new')} bytes a Unix "
            "socket's path may have; choose a shorter one"
        )
    _check_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    beside = path + ".new"
    try:
        if os.path.lexists(beside):
            os.unlink(beside)
        listener.bind(beside)
        os.chmod(beside, 0o600 if private else 0o666)
        listener.listen(limits.WORKERS_PER_AGENT_MAX)
        os.rename(beside, path)
    except OSError as error:
        listener.close()
        raise ResourceError(f"socket_path={path}: cannot listen: {_why(path, error)}") from error
    return listener


def _check_stale(path: str) -> None:
    """Refuse to replace what is not a dead agent's socket."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"socket_path={path}: {_why(path, error)}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(
            f"socket_path={path}: exists and is no socket; remove it or choose another"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        outcome = probe.connect_ex(path)
    if outcome != errno.ECONNREFUSED:
        known = outcome in (0, errno.EAGAIN)  # connected, or its backlog is full
        why = "" if known else f" ({os.strerror(outcome)})"
        raise ResourceError(
            f"socket_path={path}: another agent listens there{why}; stop it or choose another path"
        )


def _why(path: str, error: OSError) -> str:
    """What the system says, and what to do about the folder if that is the trouble."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return f"there is no folder {folder}; make it or choose another path"
    if isinstance(error, PermissionError):
        return f"{error.strerror} in folder {folder}; give this user the right to write there"
    return f"{error.strerror}; choose another path"

"""CURVE keys: files, their checks, and who may connect.

A key file is one line. `NAME.key` (mode 0600) holds the secret key, `NAME.pub` the public one:

    pdxfer-curve-secret <40 characters of Z85>
    pdxfer-curve-public <40 characters of Z85> NAME

An allow-list is a directory of `.pub` files, or one file of such public lines. Lines that start
with `# ` are comments.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from pdxfer.errors import ConfigError

log = logging.getLogger(__name__)

SECRET_TAG: Final = "pdxfer-curve-secret"
PUBLIC_TAG: Final = "pdxfer-curve-public"
_Z85_LENGTH: Final = 40
_KEY_FILE_BYTES_MAX: Final = 1 << 20
_CLOCK_STEP_NS: Final = 2_000_000_000
"""A file that changed this shortly before it was read may change again under the same time stamp
(2 s is the step of the coarsest file systems): it is read again."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both as 40 bytes of Z85."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a prefill agent needs: its own pair, and which clients may connect."""

    pair: KeyPair
    allowed: AllowList


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a decode agent needs: its own pair, and the public key of the prefill agents."""

    pair: KeyPair
    server_public: bytes


@dataclass(frozen=True, slots=True)
class _Setting:
    """Where a key was asked from, for texts."""

    name: str
    value: str
    remedy: str

    @property
    def path(self) -> Path:
        """The file or folder."""
        return Path(self.value)

    def wrong(self, what: str, *, file: Path | None = None, remedy: str = "") -> ConfigError:
        """The error of this setting: its value, what is wrong, and what to do.

        Args:    file: of a folder. remedy: instead of the usual one.
        """
        inside = f"{file.name}: " if file is not None and file != self.path else ""
        return ConfigError(
            f"{self.name} = {self.value!r}: {inside}{what}; {remedy or self.remedy}",
            fields={self.name: self.value},
        )

    def unreadable(self, error: OSError, *, file: Path | None = None) -> ConfigError:
        """The error for a file that cannot be read, with the system's reason."""
        denied = isinstance(error, PermissionError)
        return self.wrong(
            error.strerror or str(error),
            file=file,
            remedy="let the user of this daemon read it" if denied else "",
        )


def _secret_setting(file: str | os.PathLike[str]) -> _Setting:
    return _Setting(
        "key_file", os.fspath(file), "name the .key file of this daemon; `pdxfer keygen` makes one"
    )


class AllowList:
    """Public keys of the clients that may connect; read again when the file or directory changes.

    Args:  path: a directory of `.pub` files, or a file of public lines.
    Raises:  ConfigError when it is missing or a line is wrong.
    Threads:  one at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._setting = _Setting(
            "client_keys",
            os.fspath(path),
            "make the folder and copy the .pub file of each decode daemon into it",
        )
        self._names: dict[bytes, str] = {}
        self._seen: tuple[tuple[str, int, int, int, int, int], ...] = ()
        """What was seen of each file when it was last read: name, device, inode, times of content
        and of any change, size."""
        self._is_settled = False
        """Whether any later change must show in `_seen`."""
        self.refresh()

    def name_of(self, public: bytes) -> str | None:
        """The client's name, or None where it may not connect.

        A list that cannot be read any more lets nobody in, and says so in the log.
        """
        try:
            self.refresh()
        except ConfigError as error:
            reason = f"nobody may connect: {error}"
            log.error("allow_list_unreadable", extra={"reason": reason})  # noqa: TRY400 the text says it all
            return None
        return self._names.get(public)

    def __contains__(self, public: bytes) -> bool:
        """Whether the key was in the list when it was last read."""
        return public in self._names

    def __len__(self) -> int:
        return len(self._names)

    def refresh(self) -> None:
        """Read the list again if it has changed.

        Raises:  ConfigError when it cannot be read, or a line is wrong; the keys that were read
                 before are kept.
        """
        read_at_ns = time.time_ns()
        try:
            files = self._files()
            stats = [(file, file.stat()) for file in files]
        except OSError as error:
            raise self._setting.unreadable(error) from error
        seen = tuple(
            (str(f), s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for f, s in stats
        )
        if seen == self._seen and self._is_settled:
            return
        names: dict[bytes, str] = {}
        for file in files:
            for number, line in enumerate(_lines(self._setting, file), 1):
                key, name = _parse(line, PUBLIC_TAG, self._setting, file, number)
                names[key] = name or file.stem
        changed_at_ns = max((info.st_ctime_ns for _, info in stats), default=read_at_ns)
        self._names, self._seen = names, seen
        self._is_settled = changed_at_ns + _CLOCK_STEP_NS < read_at_ns

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(self.path.glob("*.pub"))
        return [self.path]


def generate(directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Make a key pair; returns the paths of `NAME.key` (mode 0600) and `NAME.pub`.

    Raises:  ConfigError when a file exists already (it is never overwritten), the name is not a
             plain file name, or libzmq was built without CURVE.
    """
    check_curve()
    if not name or name != Path(name).name or name.startswith(".") or len(name.split()) != 1:
        raise ConfigError(f"key name {name!r}: expected a plain file name without spaces")
    base = Path(directory)
    secret_file, public_file = base / f"{name}.key", base / f"{name}.pub"
    public, secret = zmq.curve_keypair()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(secret_file, f"{SECRET_TAG} {secret.decode()}\n", 0o600)
        try:
            _create(public_file, f"{PUBLIC_TAG} {public.decode()} {name}\n", 0o644)
        except OSError:
            secret_file.unlink()
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"key file {error.filename} exists; it is not overwritten: choose another name, or "
            "remove it and hand out the new public key"
        ) from error
    except OSError as error:
        raise ConfigError(f"key file {error.filename}: {error.strerror}") from error
    return secret_file, public_file


def load_server_keys(
    secret_file: str | os.PathLike[str], allowed: str | os.PathLike[str]
) -> ServerKeys:
    """The keys of a prefill agent.

    Raises:  ConfigError naming the setting, its value and what to do.
    """
    check_curve()
    if not os.fspath(allowed):
        raise ConfigError(
            f"key_file is {os.fspath(secret_file)!r} and client_keys is not set, so nobody would "
            "be let in: set client_keys to a folder with the .pub file of each decode daemon",
            fields={"key_file": os.fspath(secret_file), "client_keys": ""},
        )
    return ServerKeys(load_pair(secret_file), AllowList(allowed))


def load_client_keys(
    secret_file: str | os.PathLike[str], server_public_file: str | os.PathLike[str]
) -> ClientKeys:
    """The keys of a decode agent.

    Raises:  ConfigError naming the setting, its value and what to do.
    """
    check_curve()
    if not os.fspath(server_public_file):
        raise ConfigError(
            f"key_file is {os.fspath(secret_file)!r} and server_key is not set, so no prefill "
            "daemon would be known: set server_key to the .pub file of the prefill daemons",
            fields={"key_file": os.fspath(secret_file), "server_key": ""},
        )
    setting = _Setting(
        "server_key",
        os.fspath(server_public_file),
        "copy the .pub file of the prefill daemon's pair there",
    )
    line = _only_line(setting)
    return ClientKeys(load_pair(secret_file), _parse(line, PUBLIC_TAG, setting, setting.path, 1)[0])


def load_pair(secret_file: str | os.PathLike[str]) -> KeyPair:
    """The pair of a secret key file; the public key is computed from the secret one.

    Raises:  ConfigError when others may read the file, or its content is no secret key.
    """
    setting = _secret_setting(secret_file)
    secret, _ = _parse(_only_line(setting), SECRET_TAG, setting, setting.path, 1)
    mode = stat.S_IMODE(setting.path.stat().st_mode)
    if mode & 0o077:
        raise setting.wrong(
            f"mode {mode:04o} lets others read it", remedy=f"chmod 600 {setting.value}"
        )
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def check_curve() -> None:
    """Refuse to go on where libzmq has no CURVE.

    Raises:  ConfigError.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} was built without CURVE; install pyzmq from its wheel"
        )


def _only_line(setting: _Setting) -> str:
    lines = _lines(setting, setting.path)
    if len(lines) != 1:
        raise setting.wrong(f"{len(lines)} keys, expected 1")
    return lines[0]


def _lines(setting: _Setting, file: Path) -> list[str]:
    try:
        if file.stat().st_size > _KEY_FILE_BYTES_MAX:
            raise setting.wrong(f"larger than {_KEY_FILE_BYTES_MAX} bytes", file=file)
        text = file.read_text(encoding="ascii")
    except OSError as error:
        raise setting.unreadable(error, file=file) from error
    except ValueError as error:
        raise setting.wrong("not a text file of keys", file=file) from error
    return [line for line in text.splitlines() if line.strip() and not line.startswith("# ")]


def _parse(line: str, tag: str, setting: _Setting, file: Path, number: int) -> tuple[bytes, str]:
    """(Z85 key, name) of one line."""
    words = line.split()
    if words[0] != tag:
        other = SECRET_TAG if tag == PUBLIC_TAG else PUBLIC_TAG
        hint = " (this is the other file of the pair)" if words[0] == other else ""
        raise setting.wrong(f"key {number} does not start with {tag!r}{hint}", file=file)
    key = words[1].encode("ascii") if len(words) > 1 else b""
    try:
        valid = len(key) == _Z85_LENGTH and len(z85.decode(key)) == _Z85_LENGTH * 4 // 5
    except (KeyError, ValueError):
        valid = False
    if not valid:
        raise setting.wrong(f"key {number} is not {_Z85_LENGTH} characters of Z85", file=file)
    return key, words[2] if len(words) > 2 else ""


def _create(file: Path, text: str, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())

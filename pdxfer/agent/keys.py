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


class AllowList:
    """Public keys of the clients that may connect; read again when the file or directory changes.

    Args:  path: a directory of `.pub` files, or a file of public lines.
    Raises:  ConfigError when it is missing or a line is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._names: dict[bytes, str] = {}
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._reload()

    def name_of(self, public: bytes) -> str | None:
        """The client's name, or None where it may not connect.

        A list that cannot be read any more lets nobody in, and says so in the log.
        """
        try:
            self._reload()
        except ConfigError as error:
            log.error("allow-list unreadable, nobody may connect", extra={"reason": str(error)})  # noqa: TRY400 the text says it all
            return None
        return self._names.get(public)

    def __len__(self) -> int:
        return len(self._names)

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(self.path.glob("*.pub"))
        return [self.path]

    def _reload(self) -> None:
        try:
            files = self._files()
            stats = [(file, file.stat()) for file in files]
        except OSError as error:
            raise _unreadable("allow-list", self.path, error) from error
        seen = tuple((str(file), info.st_mtime_ns, info.st_size) for file, info in stats)
        if seen == self._seen and self._names:
            return
        names: dict[bytes, str] = {}
        for file in files:
            for number, line in enumerate(_lines(file, "allow-list"), 1):
                key, name = _parse(line, PUBLIC_TAG, file, number)
                names[key] = name or file.stem
        self._names, self._seen = names, seen


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

    Raises:  ConfigError naming the file and what is wrong with it.
    """
    check_curve()
    return ServerKeys(load_pair(secret_file), AllowList(allowed))


def load_client_keys(
    secret_file: str | os.PathLike[str], server_public_file: str | os.PathLike[str]
) -> ClientKeys:
    """The keys of a decode agent.

    Raises:  ConfigError naming the file and what is wrong with it.
    """
    check_curve()
    file = Path(server_public_file)
    lines = _lines(file, "server public key")
    if len(lines) != 1:
        raise ConfigError(f"server public key {file}: {len(lines)} keys, expected 1")
    return ClientKeys(load_pair(secret_file), _parse(lines[0], PUBLIC_TAG, file, 1)[0])


def load_pair(secret_file: str | os.PathLike[str]) -> KeyPair:
    """The pair of a secret key file; the public key is computed from the secret one.

    Raises:  ConfigError when others may read the file, or its content is no secret key.
    """
    file = Path(secret_file)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise _unreadable("secret key", file, error) from error
    if mode & 0o077:
        raise ConfigError(
            f"secret key {file}: mode {mode:04o} lets others read it; chmod 600 {file}"
        )
    lines = _lines(file, "secret key")
    if len(lines) != 1:
        raise ConfigError(f"secret key {file}: {len(lines)} keys, expected 1")
    secret, _ = _parse(lines[0], SECRET_TAG, file, 1)
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def check_curve() -> None:
    """Refuse to go on where libzmq has no CURVE.

    Raises:  ConfigError.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} was built without CURVE; install pyzmq from its wheel"
        )


def _lines(file: Path, what: str) -> list[str]:
    try:
        if file.stat().st_size > _KEY_FILE_BYTES_MAX:
            raise ConfigError(f"{what} {file}: larger than {_KEY_FILE_BYTES_MAX} bytes")
        text = file.read_text(encoding="ascii")
    except OSError as error:
        raise _unreadable(what, file, error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {file}: not a text file of keys") from error
    return [line for line in text.splitlines() if line.strip() and not line.startswith("# ")]


def _parse(line: str, tag: str, file: Path, number: int) -> tuple[bytes, str]:
    """(Z85 key, name) of one line."""
    words = line.split()
    if words[0] != tag:
        other = SECRET_TAG if tag == PUBLIC_TAG else PUBLIC_TAG
        hint = " (this is the other file of the pair)" if words[0] == other else ""
        raise ConfigError(f"{file}: key {number} does not start with {tag!r}{hint}")
    key = words[1].encode("ascii") if len(words) > 1 else b""
    try:
        valid = len(key) == _Z85_LENGTH and len(z85.decode(key)) == _Z85_LENGTH * 4 // 5
    except (KeyError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(f"{file}: key {number} is not {_Z85_LENGTH} characters of Z85")
    return key, words[2] if len(words) > 2 else ""


def _create(file: Path, text: str, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _unreadable(what: str, file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{what} {file}: {error.strerror}; `pdxfer keygen` makes one")

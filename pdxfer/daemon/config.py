"""Every setting of the daemons, in one table, and where its value comes from.

A value is looked for in the TOML file, then in the environment (`PDXFER_<NAME>`), then in the flags
(`--<name>`); the later one wins. `DaemonConfig` is the table: its fields are the keys of the file.
This is the only file of the daemons that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, get_args

import msgspec

from pdxfer import limits
from pdxfer.agent.config import AgentConfig
from pdxfer.daemon import toml_text
from pdxfer.errors import ConfigError
from pdxfer.fabric.lanes import offered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_BIND: Final = "tcp://127.0.0.1:7411"
ENVIRONMENT_PREFIX: Final = "PDXFER_"
FILE_VARIABLE: Final = "PDXFER_CONFIG"
_PREFILL: Final = {"role": "prefill"}
_DECODE: Final = {"role": "decode"}
_Meta = msgspec.Meta


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one daemon."""

    socket_path: Annotated[
        str,
        _Meta(description="Unix socket for the workers; default: one per user and role in TMPDIR"),
    ] = ""
    bind: Annotated[
        str,
        _Meta(
            description="control address to listen on, port 0 takes a free one; its network device "
            "carries the lanes"
        ),
    ] = DEFAULT_BIND
    advertise: Annotated[
        str,
        _Meta(
            description="host name or address told to decode, where `bind` is every address",
            extra=_PREFILL,
        ),
    ] = ""
    lanes: Annotated[
        tuple[str, ...],
        _Meta(description=f"lanes offered, best first, of: {', '.join(offered())}", min_length=1),
    ] = offered()
    ucx: Annotated[
        str, _Meta(description="which UCX library: auto, wheel, system or a directory")
    ] = "auto"
    net_device: Annotated[
        str, _Meta(description="network device of the UCX lanes; default: that of the bind address")
    ] = ""
    key_file: Annotated[
        str, _Meta(description="secret CURVE key of this daemon, made by `pdxfer keygen`")
    ] = ""
    client_keys: Annotated[
        str,
        _Meta(
            description="folder with the .pub files of the decode daemons that may connect, or one "
            "file of their lines",
            extra=_PREFILL,
        ),
    ] = ""
    server_key: Annotated[
        str, _Meta(description=".pub file of the prefill daemons' key", extra=_DECODE)
    ] = ""
    insecure: Annotated[
        bool, _Meta(description="allow an address that is not loopback without keys")
    ] = False
    allowed_uids: Annotated[
        tuple[int, ...], _Meta(description="users whose workers may attach; default: this user")
    ] = ()
    drain_deadline_s: Annotated[
        float, _Meta(description="seconds that a stopping daemon waits for running transfers", ge=0)
    ] = limits.DAEMON_DRAIN_DEADLINE_S
    ready_file: Annotated[
        str,
        _Meta(
            description="file written once workers can attach: addresses, socket, incarnation, pid"
        ),
    ] = ""
    log_level: Annotated[
        str,
        _Meta(description="debug, info, warning or error", pattern="^(debug|info|warning|error)$"),
    ] = "info"
    log_format: Annotated[
        str, _Meta(description="text (key=value) or json", pattern="^(text|json)$")
    ] = "text"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: object
    """The annotated type a value has to have."""
    default: object
    help: str
    role: str
    """The only daemon that knows it; empty: both."""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def is_list(self) -> bool:
        """True where a string holds several values, separated by commas."""
        return isinstance(self.default, tuple)

    def convert(self, value: object, origin: str) -> object:
        """`value` as this setting's type.

        Raises:  ConfigError naming the setting, where the value came from, and what is expected.
        """
        if self.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        try:
            converted: object = msgspec.convert(value, self.kind, strict=False)
        except msgspec.ValidationError as error:
            raise self._wrong(value, origin, str(error)) from error
        wrong = _CHECKS[self.name](converted) if self.name in _CHECKS else ""
        if wrong:
            raise self._wrong(value, origin, wrong)
        return converted

    def _wrong(self, value: object, origin: str, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name} = {value!r} ({origin}): {what}. It is: {self.help}",
            fields={self.name: repr(value)},
        )


def _address(value: object) -> str:
    from pdxfer.control.socket import host_and_port  # with ZeroMQ

    try:
        host_and_port(str(value), "bind")
    except ConfigError:
        return f"expected tcp://HOST:PORT, such as {DEFAULT_BIND}"
    return ""


def _host(value: object) -> str:
    if "/" in str(value):
        return "expected a host alone; the port is that of bind"
    return ""


def _lane_names(value: object) -> str:
    assert isinstance(value, tuple)
    unknown = [repr(lane) for lane in value if lane not in offered()]
    if unknown:
        return f"no lane {', '.join(unknown)} in this build, take {' or '.join(offered())}"
    return ""


_CHECKS: Final[Mapping[str, Callable[[object], str]]] = {
    "bind": _address,
    "advertise": _host,
    "lanes": _lane_names,
}
"""Checks of a value of the right type. Each says what is wrong with it; an empty text: nothing."""


def _settings() -> dict[str, Setting]:
    table: dict[str, Setting] = {}
    for field in msgspec.structs.fields(DaemonConfig):
        meta = next(part for part in get_args(field.type) if isinstance(part, msgspec.Meta))
        role = (meta.extra or {}).get("role", "")
        table[field.name] = Setting(
            field.name, field.type, field.default, meta.description or "", role
        )
    return table


SETTINGS: Final = _settings()
_OF_DECODE: Final = {
    "bind": replace(
        SETTINGS["bind"],
        default="tcp://127.0.0.1:0",
        help="an address of this machine: its network device carries the lanes; no socket is "
        "opened on it",
    )
}
"""Rows whose text at decode is another one."""


def settings_of(role: str) -> list[Setting]:
    """The rows that a daemon of this role knows, in the order of the table."""
    own = {**SETTINGS, **_OF_DECODE} if role == "decode" else SETTINGS
    return [row for row in own.values() if row.role in {"", role}]


def resolve(
    role: str,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> DaemonConfig:
    """Put file, environment and flags together.

    Args:     flags: setting name to text, only those given. file: None looks at `PDXFER_CONFIG`.
    Raises:   ConfigError naming the key or value, where it stands and the nearest known key.
    """
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    rows = {row.name: row for row in settings_of(role)}
    values = {row.name: row.default for row in rows.values()}
    if file is not None:
        values.update(_from_file(role, file))
    values.update(_from_environment(role, environment))
    for name, text in flags.items():
        values[name] = rows[name].convert(text, rows[name].flag)
    config = msgspec.convert(values, DaemonConfig)
    _check_keys(role, config)
    if not config.socket_path:
        config = msgspec.structs.replace(config, socket_path=default_socket_path(role))
    return config


def _check_keys(role: str, config: DaemonConfig) -> None:
    """Refuse keys of peers without a key of its own: they would not be looked at."""
    name = "client_keys" if role == "prefill" else "server_key"
    value = getattr(config, name)
    if value and not config.key_file:
        raise ConfigError(
            f"{name} is {value!r} and key_file is not set, so it would mean nothing: set key_file "
            f"to the .key file of this daemon (`pdxfer keygen` makes one), or leave {name} out",
            fields={name: value, "key_file": ""},
        )


def agent_config(role: str, settings: DaemonConfig) -> AgentConfig:
    """The configuration of this daemon's agent."""
    own = {"ready_file", "log_level", "log_format"}
    values = {
        name: value for name, value in msgspec.structs.asdict(settings).items() if name not in own
    }
    return AgentConfig(role=role, **values)


def current_environment() -> dict[str, str]:
    """The `PDXFER_*` variables of this process."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)
    }


def default_socket_path(role: str) -> str:
    """The socket path of a daemon that was given none."""
    return str(Path(tempfile.gettempdir()) / f"pdxfer-{os.getuid()}-{role}.sock")


def _from_file(role: str, file: Path) -> dict[str, object]:
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the configuration file {file}: {toml_text.why(error, text)}"
        ) from error
    rows = {row.name: row for row in settings_of(role)}
    values = {}
    for name, value in content.items():
        other = SETTINGS.get(name)
        if name not in rows and other is not None:
            raise ConfigError(
                f"key {name!r} in {file} is a setting of pdxfer-{other.role}, not of pdxfer-{role}",
                fields={"key": name},
            )
        if name not in rows:
            raise _unknown(f"key {name!r} in {file}", name, [*rows])
        values[name] = rows[name].convert(value, str(file))
    return values


def _from_environment(role: str, environment: Mapping[str, str]) -> dict[str, object]:
    rows = {row.variable: row for row in settings_of(role)}
    others = {row.variable for row in SETTINGS.values()}  # both daemons may share one environment
    values = {}
    for variable, text in environment.items():
        if variable == FILE_VARIABLE or not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable in rows:
            values[rows[variable].name] = rows[variable].convert(text, variable)
        elif variable not in others:
            raise _unknown(f"environment variable {variable}", variable, [*rows, FILE_VARIABLE])
    return values


def _unknown(what: str, name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}"
    return ConfigError(f"unknown {what}; {hint}", fields={"key": name})

"""Entry points. Each command lives in a file of its own, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdxfer import __version__
from pdxfer.errors import ConfigError, PdxferError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(Protocol):
    """What a command's module holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its flags."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    help: str


COMMANDS: Final = (
    _Entry("demo", "a real model's KV cache crosses, and the tokens are compared"),
    _Entry("bench", "how fast, beside memcpy, process_vm_writev and a raw TCP stream"),
    _Entry("doctor", "what works on this machine, and why the rest does not"),
    _Entry("plan", "how one layout is written into another, or why it is refused"),
    _Entry("status", "what a running daemon is doing"),
    _Entry("keygen", "make a pair of CURVE keys"),
)


def _module(name: str) -> Command:
    command: Command = importlib.import_module(f"pdxfer.cli.{name}")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """`pdxfer`: run one command; 0 on success, 1 on a failed check, 2 on a usage error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="pdxfer", description="Moves KV cache from prefill to decode.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"pdxfer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in words if not word.startswith("-")), "")
    for entry in COMMANDS:
        command = commands.add_parser(
            entry.name, help=entry.help, description=entry.help, allow_abbrev=False
        )
        if entry.name == asked:
            _module(entry.name).add_arguments(command)
    options = parser.parse_args(words)
    try:
        return _module(options.command).run(options)
    except PdxferError as error:
        sys.stderr.write(f"pdxfer {options.command}: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def prefill() -> int:
    """`pdxfer-prefill`."""
    from pdxfer.daemon.run import main as daemon

    return daemon("prefill")


def decode() -> int:
    """`pdxfer-decode`."""
    from pdxfer.daemon.run import main as daemon

    return daemon("decode")

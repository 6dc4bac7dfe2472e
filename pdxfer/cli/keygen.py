"""`pdxfer keygen`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.control import keys

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("name", help="name of the pair: makes NAME.key (secret) and NAME.pub")
    parser.add_argument("--directory", default=".", help="folder for both files; made if missing")


def run(options: argparse.Namespace) -> int:
    """Make the pair and say what goes where."""
    secret, public = keys.generate(options.directory, options.name)
    print(f"{secret}  secret, mode 0600: key_file of this daemon only")
    print(f"{public}  public: client_keys of pdxfer-prefill, or server_key of pdxfer-decode")
    return 0

"""The version of the protocol between agents, and the rule when two sides differ.

`proto/SPEC.md` says what a version fixes. Version 0 ends with the first public release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdxfer.errors import PeerError

if TYPE_CHECKING:
    from pdxfer.wire.messages import Hello

PROTOCOL_VERSION: Final = 0
"""Version of the protocol that this code speaks."""
RELEASED_VERSIONS: Final[frozenset[int]] = frozenset()
"""Versions of public releases: their golden vectors are never edited."""
SUPPORTED_VERSIONS: Final = frozenset({PROTOCOL_VERSION})
"""What this code can speak with a peer."""


def check_version(hello: Hello) -> None:
    """Refuse a peer whose version this code does not speak.

    Raises:  PeerError naming both versions; the session does not come to be.
    """
    if hello.version not in SUPPORTED_VERSIONS:
        raise PeerError(
            f"protocol version: this agent speaks {PROTOCOL_VERSION}, the {hello.role} agent "
            f"speaks {hello.version}; run the same pdxfer release on both sides",
            fields={"version": f"here={PROTOCOL_VERSION}, peer={hello.version}"},
        )

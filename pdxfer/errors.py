"""Every error that pdxfer raises, with the code it has on the wire.

Tree:

    PdxferError
    ├── ConfigError                bad setting or argument, found here
    ├── LayoutMismatchError        the two sides do not mean the same bytes (also a RuntimeError)
    ├── ProtocolError
    │   ├── LocalProtocolError     we were asked for something the state does not allow
    │   └── RemoteProtocolError    the peer sent something it may not send
    ├── PeerError                  the peer is away, late or new; often worth a retry
    ├── TransferError              one transfer ended without its bytes; names the proof of silence
    ├── DaemonUnavailableError     the agent behind the local socket is gone or refuses
    └── ResourceError              a limit was reached

An error keeps its text and fields when it crosses a socket: `to_wire` and `from_wire` are inverse.
"""

from __future__ import annotations

from typing import ClassVar, TypedDict


class WireError(TypedDict):
    """An error as it travels: its stable code, its whole text, the fields that differ."""

    code: str
    text: str
    retryable: bool
    fields: dict[str, str]


class PdxferError(Exception):
    """The root of all errors of pdxfer; never raised itself."""

    code: ClassVar[str] = "error"
    """Name of the class on the wire; it never changes."""

    def __init__(
        self, text: str, *, retryable: bool = False, fields: dict[str, str] | None = None
    ) -> None:
        super().__init__(text)
        self.retryable = retryable
        """Whether the same call may succeed later without any change."""
        self.fields = fields or {}
        """What is wrong, by field name: its value, or both values where two sides differ."""

    def to_wire(self) -> WireError:
        """This error as plain values."""
        return WireError(
            code=self.code, text=str(self), retryable=self.retryable, fields=self.fields
        )


class ConfigError(PdxferError):
    """A setting or an argument is wrong; nothing was changed."""

    code = "config"


class LayoutMismatchError(PdxferError, RuntimeError):
    """The layouts of the two sides cannot be transferred into each other; no byte has moved."""

    code = "layout_mismatch"


class ProtocolError(PdxferError):
    """Base of `LocalProtocolError` and `RemoteProtocolError`."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """A call is not allowed in the present state, or in this process, thread or event loop."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes or an event that the protocol does not allow."""

    code = "remote_protocol"


class PeerError(PdxferError):
    """The peer cannot be reached, went away, restarted or did not answer in time."""

    code = "peer"


class TransferError(PdxferError):
    """A transfer failed or was aborted.

    `fence` names the proof that none of its writes can land any more: `drained`, `revoked` or
    `dead`; `quarantined` while there is none.
    """

    code = "transfer"

    def __init__(
        self,
        text: str,
        *,
        fence: str = "drained",
        retryable: bool = False,
        fields: dict[str, str] | None = None,
    ) -> None:
        super().__init__(text, retryable=retryable, fields={"fence": fence, **(fields or {})})

    @property
    def fence(self) -> str:
        """The proof: `drained`, `revoked` or `dead`; `quarantined` while there is none."""
        return self.fields["fence"]


class DaemonUnavailableError(PdxferError):
    """The local agent cannot be reached, or it went away."""

    code = "daemon_unavailable"


class ResourceError(PdxferError):
    """A limit of this agent was reached; see `pdxfer.limits`."""

    code = "resource"


_BY_CODE: dict[str, type[PdxferError]] = {
    kind.code: kind
    for kind in (
        ConfigError,
        LayoutMismatchError,
        LocalProtocolError,
        RemoteProtocolError,
        PeerError,
        TransferError,
        DaemonUnavailableError,
        ResourceError,
    )
}


def from_wire(error: WireError) -> PdxferError:
    """The error a peer sent, as the same class with the same text.

    An unknown code (a newer peer) becomes a `PeerError`: never taken for success.
    """
    kind = _BY_CODE.get(error["code"], PeerError)
    return kind(error["text"], retryable=error["retryable"], fields=dict(error["fields"]))


def repr_of(value: object) -> str:
    """`repr`, also of a value that has none: for the text of an error about it."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        # An int of over 4300 digits, or a nest too deep to be walked.
        return f"a value of type {type(value).__name__} too long to be shown"

"""How each prefill life reaches a decode agent: the lanes to try, and the receive side made."""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer.agent.lanes import Lanes
from pdxfer.errors import PdxferError, PeerError
from pdxfer.fabric.base import Fabric
from pdxfer.wire.messages import Hello


@dataclass(slots=True)
class ReceiveSide:
    """Of one prefill life."""

    candidates: list[str]
    """Lanes left to try, best first."""
    opened: bool = False
    """The first candidate has worked since it was last attached."""
    made_for: str = ""
    """Lane of the receive side; empty: there is none."""
    address: bytes = b""
    since: int = 0
    """Revision of the first `Attach` that named it."""

    @property
    def serves(self) -> bool:
        """There is a lane, and the peer has opened its path over it."""
        return bool(self.made_for) and self.opened


def silence_of(fabric: Fabric) -> str:
    """What the end of a receive side proves on this lane."""
    return "revoked" if fabric.capabilities.handler_proves_silence else ""


class ReceiveSides:
    """The receive sides of one agent, by prefill life. Loop thread only."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._sides: dict[bytes, ReceiveSide] = {}

    def get(self, peer: bytes) -> ReceiveSide | None:
        """Of a life that has a session."""
        return self._sides.get(peer)

    def join(self, peer: bytes, hello: Hello, ucx_version: str, apart: str) -> list[str]:
        """A session begins; the lanes that both sides can use.

        Args:
            peer: the life it is with.
            hello: what that says of itself.
            ucx_version: of the library here.
            apart: why that life is not proven to be on this host; empty: it is.

        Raises:
            PeerError: there is none.
        """
        usable = [
            lane
            for lane in self._lanes.names
            if _usable(lane, hello, ucx_version) and not (apart and lane == "cma")
        ]
        self._sides[peer] = ReceiveSide(usable)
        if not usable:
            raise _none_in_common(self._lanes.names, hello, ucx_version, apart)
        return usable

    def reach(self, peer: bytes) -> list[str]:
        """The lanes that a life may come to use in this session, the present one first."""
        side = self._sides.get(peer)
        return [] if side is None else side.candidates

    def open(self, peer: bytes, revision: int) -> ReceiveSide | None:
        """The receive side to name in an `Attach`, made if there is none; None without a session.

        Raises:
            PeerError: no lane is left, with what the last one suffered.
        """
        side = self._sides.get(peer)
        if side is None or not side.candidates:
            return None
        while side.made_for != side.candidates[0]:
            lane = side.candidates[0]
            try:
                side.address = self._lanes.fabric(lane).open_receiver(peer)
            except PdxferError as error:
                side.candidates.pop(0)
                if not side.candidates:
                    raise none_left(lane, str(error)) from error
            else:
                side.made_for, side.since = lane, revision
        return side

    def works(self, peer: bytes) -> None:
        """Prefill has opened its path."""
        if peer in self._sides:
            self._sides[peer].opened = True

    def is_current(self, peer: bytes, revision: int) -> bool:
        """Whether what happened to the lane of an `Attach` concerns the side that is there now."""
        side = self._sides.get(peer)
        return side is not None and bool(side.candidates) and revision >= side.since

    def give_way(self, peer: bytes, text: str) -> None:
        """The lane failed: the same one next where it has worked before, else the one behind it.

        Raises:
            PeerError: no lane is left.
        """
        side = self._sides[peer]
        lane = side.candidates[0]
        if not side.opened:
            side.candidates.pop(0)
        side.opened = False
        if not side.candidates:
            raise none_left(lane, text)

    def close(self, peer: bytes) -> str | None:
        """End a receive side; what that proves. None: there was none."""
        side = self._sides.get(peer)
        if side is None or not side.made_for:
            return None
        fabric = self._lanes.fabric(side.made_for)
        fabric.close_receiver(peer)
        side.made_for = ""
        return silence_of(fabric)

    def destroyed(self, peer: bytes) -> None:
        """The lane has ended a receive side by itself."""
        if peer in self._sides:
            self._sides[peer].made_for = ""

    def leave(self, peer: bytes) -> None:
        """The session is over; `close` comes before."""
        self._sides.pop(peer, None)


def none_left(lane: str, text: str) -> PeerError:
    """Every lane has failed; another session tries all of them again."""
    return PeerError(
        f"no lane left to the prefill agent: {lane}: {text}", retryable=True, fields={"lane": lane}
    )


def _usable(lane: str, hello: Hello, ucx_version: str) -> bool:
    if lane not in hello.lanes:
        return False
    ours, theirs = ucx_version, hello.ucx_version
    return not (ours and theirs) or ours.split(".")[:2] == theirs.split(".")[:2]


def _none_in_common(
    names: tuple[str, ...], hello: Hello, ucx_version: str, apart: str
) -> PeerError:
    ours = f"{','.join(names)} (UCX {ucx_version or 'none'})"
    theirs = f"{','.join(hello.lanes)} (UCX {hello.ucx_version or 'none'})"
    return PeerError(
        f"no lane in common: prefill offers {theirs}, decode offers {ours}; cma needs one host, "
        "user and pid namespace and a way from decode to the folder of prefill's socket"
        f"{apart and f' ({apart})'}, UCX lanes the same major.minor version",
        fields={"lanes": f"prefill={theirs}, decode={ours}"},
    )

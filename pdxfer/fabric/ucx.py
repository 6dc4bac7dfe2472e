"""The UCX lanes `tcp` and `cma`: `pdxfer.fabric.base` over the native engine.

One `UcxFabric` is one engine: one UCX context, one progress thread. Nothing here runs per run of a
post; an event costs one tuple. What an event means is decided by the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import limits
from pdxfer.errors import ConfigError, LocalProtocolError
from pdxfer.fabric.base import (
    BatchEnded,
    Cancelled,
    CommitArrived,
    CommitSent,
    FabricEvent,
    LocalRegion,
    PathClosed,
    PathOpened,
    RemoteRegion,
    SenderLost,
    SenderPlaces,
    SenderPlacesFabric,
)
from pdxfer.fabric.lanes import LANES, LaneSettings, library_lanes
from pdxfer.fabric.ucx_loader import UcxRuntime, load_ucx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer._ucx import Engine

# event, id, generation, ticket, length_bytes, runs, drained, data, error
Completion = tuple[int, int, int, int, int, int, bool, bytes, str]

# pdx::ucx::Event
_PATH_OPENED, _BATCH_ENDED, _COMMIT_SENT, _CANCELLED = 1, 2, 3, 4
_PATH_CLOSED, _COMMIT_ARRIVED, _SENDER_LOST, _REGION_RELEASED = 5, 6, 7, 8


class UcxPath(SenderPlaces):
    """A path of `UcxFabric`; see `pdxfer.fabric.base.Path`.

    Threads: any, though an agent uses its loop thread. Every method queues and returns.
    """

    def __init__(self, engine: Engine, path_id: int, peer: bytes) -> None:
        self.peer = peer
        self._engine = engine
        self._id = path_id

    def post_runs(
        self,
        generation: int,
        runs: NDArray[np.int64],
        splits: NDArray[np.int64],
        source: Sequence[LocalRegion],
        destination: Sequence[RemoteRegion],
    ) -> list[int]:
        """Queue writes; one ticket per batch.

        The runs are copied. Source memory must stay as it is until the batch's `BatchEnded`.

        Shapes: runs int64 [n, 5], splits int64 [batches + 1]; see `fabric.base.SenderPlaces`.
        Raises: LocalProtocolError when a run leaves its region on either side, a source region is
            not registered, a remote key is none of this lane or the path is closed; nothing of
            this post was sent.
        Cost: one call, one pass over the runs without the GIL.
        """
        first = self._engine.post(
            self._id,
            generation,
            np.ascontiguousarray(runs, dtype=np.int64),
            np.ascontiguousarray(splits, dtype=np.int64),
            [region.region_id for region in source],
            [(region.address, region.length_bytes, region.rkey) for region in destination],
        )
        return list(range(first, first + len(splits) - 1))

    def commit(self, generation: int, payload: bytes) -> int:
        """Send `payload` behind every batch of `generation`; see `pdxfer.fabric.base.Path`.

        Raises: LocalProtocolError when the path is closed or the payload exceeds
            `limits.COMMIT_BYTES_MAX`; no `CommitSent` follows.
        """
        return self._engine.commit(self._id, generation, payload)

    def cancel(self, generation: int, deadline_s: float = limits.FENCE_DEADLINE_S) -> None:
        """Drop what is not posted, wait for the rest, then `Cancelled`.

        What has not drained after `deadline_s` (0: no deadline) ends the whole path at once:
        `PathClosed` comes in place of `Cancelled`. So it does where the path ends for another
        reason.
        """
        self._engine.cancel(self._id, generation, deadline_s)

    def close(self) -> None:
        """Drop what is not posted; what is in flight has 0.5 s to land, then the path is forced.

        Every outstanding ticket ends, then `PathClosed`. Idempotent.
        """
        self._engine.close_path(self._id)


class UcxFabric(SenderPlacesFabric):
    """One UCX lane of one agent; see `pdxfer.fabric.base.Fabric`.

    Settings: a `UCX_*` variable of the environment wins over what is set here, except for the three
        that give addresses their form (`UCX_ADDRESS_VERSION`, `UCX_ADDRESS_DEBUG_INFO` and
        `UCX_UNIFIED_MODE`): addresses from outside are read before UCX is given them.
    Threads: any. `register`, `open_receiver`, `close_receiver` and `close` wait for the progress
        thread (tcp: well under 5 ms each), bounded by 10 s; everything else queues and returns.
    Fork: a forked child must not use it; every call raises LocalProtocolError there.
    """

    def __init__(  # noqa: PLR0913 - one argument a setting, all by name
        self,
        lane: str,
        *,
        ucx: str | None = None,
        net_device: str = "",
        address_family: str = "",
        tcp_port_range: str = "",
        tcp_user_timeout_s: float = 5.0,
        window_bytes: int = limits.WINDOW_BYTES,
        window_descriptors_min: int = limits.WINDOW_DESCRIPTORS_MIN,
        spin_us: float = limits.SPIN_US,
    ) -> None:
        """Load UCX and start the lane.

        Args:
            lane: `tcp` or `cma`.
            ucx: As `PDXFER_UCX`; None: that variable, else `auto`.
            net_device: Network devices, written as in `UCX_NET_DEVICES`; empty: all.
            address_family: `inet` or `inet6`: of a device, UCX listens on the first address of this
                family, and reaches peers of this family only; empty: IPv4 where a device has it.
            tcp_port_range: `first-last`, where UCX listens, one port for each path and each
                receiver; empty: any port.
            tcp_user_timeout_s: Sent bytes not acknowledged for so long end the connection. Above
                the longest pause of a healthy peer.
            window_bytes: In flight per endpoint.
            window_descriptors_min: Small writes that may be in flight above `window_bytes`.
            spin_us: How long the progress thread spins after its last event before it sleeps.

        Raises:
            ConfigError: a setting is wrong. ResourceError: UCX cannot be loaded or started.
        """
        known = library_lanes("ucx")
        if lane not in known:
            raise ConfigError(f"lane: {lane!r} is not a UCX lane; use one of {', '.join(known)}")
        self.lane = lane
        self.capabilities = LANES[lane].capabilities
        self.runtime: UcxRuntime = load_ucx(ucx)
        self.version = self.runtime.version
        self._engine: Engine = self.runtime.module.Engine(
            lane=lane,
            net_devices=net_device,
            address_family=address_family,
            tcp_port_range=tcp_port_range,
            tcp_user_timeout_s=tcp_user_timeout_s,
            window_bytes=window_bytes,
            window_descriptors_min=window_descriptors_min,
            spin_us=spin_us,
            commit_bytes_max=limits.COMMIT_BYTES_MAX,
            watch_timeout_s=limits.PATH_OPEN_TIMEOUT_S,
        )
        self._owners: dict[int, object] = {}
        self._path_peers: dict[int, bytes] = {}
        self._opened: set[int] = set()
        self._receiver_peers: dict[int, bytes] = {}
        self._receivers: dict[bytes, int] = {}

    # -- events ------------------------------------------------------------------------------
    def fileno(self) -> int:
        """An eventfd, readable when `take_events` has something; valid as long as this object."""
        return self._engine.fileno()

    def take_events(self) -> list[FabricEvent]:
        """Everything that happened since the last call, in order per path. Also after `close`."""
        events = [self._event(completion) for completion in self._engine.drain()]
        return [event for event in events if event is not None]

    def wait(self, timeout_s: float) -> bool:
        """True when `take_events` has something within `timeout_s`; for callers without a loop."""
        return self._engine.wait(timeout_s)

    def _event(self, completion: Completion) -> FabricEvent | None:
        kind, number, generation, ticket, length_bytes, runs, drained, data, error = completion
        if kind == _BATCH_ENDED:
            return BatchEnded(
                self._path_peers[number], generation, ticket, length_bytes, runs, error
            )
        if kind == _COMMIT_SENT:
            return CommitSent(self._path_peers[number], generation, ticket, error)
        if kind == _CANCELLED:
            return Cancelled(self._path_peers[number], generation)
        if kind == _PATH_OPENED:
            if not error:
                self._opened.add(number)
            return PathOpened(self._path_peers[number], data.decode(), error)
        if kind == _PATH_CLOSED:
            return self._path_closed(number, error, drained)
        return self._receive_event(kind, number, data, error)

    def _path_closed(self, number: int, error: str, drained: bool) -> PathClosed | None:
        peer = self._path_peers.pop(number)
        if number not in self._opened:
            return None
        self._opened.remove(number)
        return PathClosed(peer, error, drained)

    def _receive_event(self, kind: int, number: int, data: bytes, error: str) -> FabricEvent | None:
        if kind == _REGION_RELEASED:
            del self._owners[number]
            return None
        peer = self._receiver_peers.get(number)
        if peer is None:
            # Of a receiver that its owner has closed since.
            return None
        if kind == _COMMIT_ARRIVED:
            return CommitArrived(peer, data)
        assert kind == _SENDER_LOST, kind
        del self._receiver_peers[number]
        del self._receivers[peer]
        return SenderLost(peer, error)

    # -- memory ------------------------------------------------------------------------------
    def register(self, address: int, length_bytes: int, owner: object) -> LocalRegion:
        """Register a range of host memory; `owner` is kept alive until it is out of use.

        Raises: LocalProtocolError for an empty range or one that ends above 2^63; ResourceError
            when UCX refuses it.
        """
        region_id, rkey = self._engine.register(address, length_bytes)
        self._owners[region_id] = owner
        return LocalRegion(region_id, address, length_bytes, rkey)

    def deregister(self, region: LocalRegion) -> None:
        """Forget a range; its owner is let go when no batch reads from it any more.

        The caller has proof that no peer's write can reach it.
        """
        self._engine.deregister(region.region_id)

    # -- prefill -----------------------------------------------------------------------------
    def send_address(self) -> bytes:
        """What this sender calls itself; decode's receive worker takes its path and no other's."""
        return self._engine.send_address()

    def connect(self, peer: bytes, address: bytes, timeout_s: float) -> UcxPath:
        """Open a path to a receiver; `PathOpened` follows within `timeout_s`, also when it failed.

        The first write is made to a probe at the receiver, so an open path is one over which
        writes are allowed, on the lane that was asked for. `PathOpened(error=...)` is the
        end of one that did not open; no `PathClosed` follows.

        The path has a UCX worker of its own: only its end stops the writes of one path safely.
        What UCX is to connect to is checked byte by byte before: a forged address is an error of
        `PathOpened`.

        Raises: LocalProtocolError when `address` is no lane address, or was cut off or changed.
        """
        path_id = self._engine.connect(address, timeout_s)
        self._path_peers[path_id] = peer
        return UcxPath(self._engine, path_id, peer)

    # -- decode ------------------------------------------------------------------------------
    def open_receiver(self, peer: bytes) -> bytes:
        """Make the receive worker for one sender incarnation; returns its address.

        Raises: LocalProtocolError when it has one; after `SenderLost` or `close_receiver` a new
            one may be made.
        """
        if peer in self._receivers:
            raise LocalProtocolError(f"sender {peer.hex()} has a receive worker already")
        receiver, address = self._engine.open_receiver()
        self._receivers[peer] = receiver
        self._receiver_peers[receiver] = peer
        return address

    def watch_sender(self, peer: bytes, address: bytes) -> None:
        """Say which sender has to connect: `SenderLost` when another one does, or none in time.

        The endpoint itself is opened by the engine when the sender's hello comes, before its
        `PathOpened` and so before any write: from then on `SenderLost` tells its end, with or
        without this call. (UCX 1.22 crashes when such an endpoint is made while a write of that
        peer comes in.) A sender that closes its path is lost, also when it lives on, and so is one
        that opens a second: a new path needs a new receiver.

        Raises: LocalProtocolError when the sender has no receive worker (it was lost or closed),
            or `address` is no lane address.
        """
        receiver = self._receivers.get(peer)
        if receiver is None:
            raise LocalProtocolError(f"sender {peer.hex()} has no receive worker to watch it")
        self._engine.watch_sender(receiver, address)

    def close_receiver(self, peer: bytes) -> None:
        """Destroy the receive worker of one sender. Idempotent.

        On return it is gone: on tcp nothing more of that sender lands. No event follows.
        """
        receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            del self._receiver_peers[receiver]
            self._engine.close_receiver(receiver)

    def close(self, deadline_s: float = limits.ENGINE_CLOSE_DEADLINE_S) -> None:
        """Drain for half of `deadline_s`, then force; releases every resource. Idempotent.

        Raises: ResourceError when the progress thread did not end in time; it then keeps what it
            uses, and so does this object.
        """
        self._engine.close(deadline_s)


def make(lane: str, settings: LaneSettings) -> UcxFabric:
    """A UCX lane as an agent's configuration asks for it; raises what `UcxFabric` raises."""
    return UcxFabric(
        lane,
        ucx=settings.ucx,
        net_device=settings.net_device,
        address_family=settings.address_family,
    )

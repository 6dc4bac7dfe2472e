"""The UCX data plane of pdxfer."""

import numpy
import numpy.typing

def runtime() -> tuple[str, str]:
    """Version and file of the UCX that is loaded."""

class Engine:
    """The data plane of one agent and lane; see pdx/ucx/engine.h."""

    def __init__(
        self,
        *,
        lane: str,
        net_devices: str,
        address_family: str,
        tcp_port_range: str,
        tcp_user_timeout_s: float,
        window_bytes: int,
        window_descriptors_min: int,
        spin_us: float,
        commit_bytes_max: int,
        watch_timeout_s: float,
    ) -> None: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[int, int, int, int, int, int, bool, bytes, str]]:
        """
        Event, id, generation, ticket, length_bytes, runs, drained, data, error of each.
        """

    def wait(self, timeout_s: float) -> bool:
        """True when drain has something within timeout_s."""

    def register(self, address: int, length_bytes: int) -> tuple[int, bytes]:
        """Region id and remote key."""

    def deregister(self, region: int) -> None: ...
    def send_address(self) -> bytes: ...
    def connect(self, address: bytes, timeout_s: float) -> int:
        """Path id."""

    def post(
        self,
        path: int,
        generation: int,
        runs: numpy.typing.NDArray[numpy.int64],
        splits: numpy.typing.NDArray[numpy.int64],
        source: list[int],
        destination: list[tuple[int, int, bytes]],
    ) -> int:
        """Ticket of the first batch; the others count up from it."""

    def commit(self, path: int, generation: int, payload: bytes) -> int:
        """Ticket."""

    def cancel(self, path: int, generation: int, deadline_s: float) -> None: ...
    def close_path(self, path: int) -> None: ...
    def open_receiver(self) -> tuple[int, bytes]:
        """Receiver id and address."""

    def watch_sender(self, receiver: int, address: bytes) -> None: ...
    def close_receiver(self, receiver: int) -> None:
        """The worker is destroyed on return."""

    def close(self, deadline_s: float) -> None: ...

"""`pdxfer status`: ask a running daemon over its local socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from pdxfer import limits
from pdxfer.client.channel import Channel
from pdxfer.daemon.config import default_socket_path
from pdxfer.errors import RemoteProtocolError
from pdxfer.local.messages import AgentStatus, AskStatus

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("role", choices=["prefill", "decode"], help="which daemon")
    parser.add_argument("--socket-path", default="", help="its socket; default: this user's")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--timeout-s", type=float, default=limits.LOCAL_REQUEST_TIMEOUT_S)


def run(options: argparse.Namespace) -> int:
    """Print what the daemon says; 0 when it answered."""
    status = ask(options.socket_path or default_socket_path(options.role), options.timeout_s)
    print(json.dumps(plain(status), indent=1) if options.json else text(status))
    return 0


def ask(socket_path: str, timeout_s: float) -> AgentStatus:
    """One question, one answer.

    Raises:  DaemonUnavailableError when nobody answers there.
    """
    channel = Channel(socket_path, timeout_s)
    try:
        answer, _ = channel.request(AskStatus(request=channel.new_request()))
    finally:
        channel.close()
    if not isinstance(answer, AgentStatus):
        raise RemoteProtocolError(f"the agent answered AskStatus with {type(answer).__name__}")
    return answer


def plain(status: AgentStatus) -> dict[str, object]:
    """As JSON values."""
    values: dict[str, object] = msgspec.to_builtins(status)
    values["incarnation"] = status.incarnation.hex()
    for inside in ("t", "request"):
        values.pop(inside, None)
    return values


def text(status: AgentStatus) -> str:
    """As lines."""
    state = "stopping" if status.stopping else "serving"
    used = ", ".join(status.lanes_in_use) or "none"
    lines = [
        f"pdxfer-{status.role} {status.version}, pid {status.pid}, {state}",
        f"incarnation  {status.incarnation.hex()}",
        f"addresses    {', '.join(status.addresses) or 'none: decode connects to prefill'}",
        f"lanes        {', '.join(status.lanes)}; in use: {used}",
        f"UCX          {status.ucx_version or 'not loaded'}",
        f"transfers    {status.live_transfers} live",
        f"workers      {len(status.workers)}",
    ]
    lines += [
        f"  {worker.worker_id}: pid {worker.pid}, instance {worker.instance!r}, "
        f"rank {worker.rank}, {worker.length_bytes:,} bytes, {worker.transfers} transfers"
        for worker in status.workers
    ]
    for transfer in status.transfers:
        peers = ",".join(transfer.peers) or "none"
        lines.append(
            f"  room {transfer.room} generation {transfer.generation} worker {transfer.worker_id} "
            f"{transfer.state} peers {peers} {transfer.reason}".rstrip()
        )
    return "\n".join(lines)

"""`pdxfer status`: ask a running daemon over its local socket."""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdxfer import limits
from pdxfer.client.channel import Channel
from pdxfer.client.waiting import run as run_blocking
from pdxfer.daemon.config import default_socket_path
from pdxfer.daemon.log import in_red
from pdxfer.errors import ConfigError, DaemonUnavailableError, RemoteProtocolError
from pdxfer.fabric.ucx_listener import listener_warning
from pdxfer.local.messages import AgentStatus, AskStatus

if TYPE_CHECKING:
    import argparse

_UCRED: Final = struct.Struct("3i")
"""Form of what SO_PEERCRED gives: pid, uid and gid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("role", choices=["prefill", "decode"], help="role of the daemon")
    parser.add_argument("--socket-path", default="", help="its socket; default: this user's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--timeout-s", type=float, default=limits.LOCAL_REQUEST_TIMEOUT_S)


def run(options: argparse.Namespace) -> int:
    """Print what the daemon says; 0 when it answered."""
    socket_path = options.socket_path or default_socket_path(options.role)
    status = ask(socket_path, options.timeout_s)
    if status.role != options.role:
        raise ConfigError(
            f"asked for the {options.role} daemon, and at {socket_path} a {status.role} daemon "
            f"answers: run `pdxfer status {status.role}`, or give --socket-path of the "
            f"{options.role} daemon",
            fields={"role": f"asked={options.role}, answered={status.role}"},
        )
    if options.json:
        print(json.dumps(plain(status), indent=1))
        return 0
    print(text(status))
    if warning := listener_warning(status.lanes):
        print(in_red(warning, terminal=sys.stdout.isatty()))
    return 0


def ask(socket_path: str, timeout_s: float) -> AgentStatus:
    """Ask the agent at a socket for its status, and return its answer.

    Raises: DaemonUnavailableError when nobody answers there; its text names a process that listens
    and is silent.
    """
    try:
        channel = Channel(socket_path)
        try:
            run_blocking(channel.connect(timeout_s))
            question = AskStatus(request=channel.new_request())
            answer, _ = run_blocking(channel.request(question, timeout_s=timeout_s))
        finally:
            channel.close()
    except DaemonUnavailableError as error:
        raise DaemonUnavailableError(f"{error}{silent(socket_path)}", retryable=True) from error
    if not isinstance(answer, AgentStatus):
        raise RemoteProtocolError(f"the agent answered AskStatus with {type(answer).__name__}")
    return answer


def silent(socket_path: str) -> str:
    """What may keep a daemon that listens from answering, and what to do; empty: none listens."""
    longer = "give a longer --timeout-s, and look at its log and its CPU time"
    try:
        pid = _listener(socket_path)
    except BlockingIOError:
        pid = 0  # more are waiting than it lets
    except OSError:
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return f". Its process is stopped (then kill -CONT it), or busy: {longer}"
    # The state stands behind the name in parentheses, which may hold anything.
    if state.rpartition(") ")[2][:1] in {"T", "t"}:
        return f". Its process {pid} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}"
    return f". Its process {pid} is not stopped, but busy with something else: {longer}"


def _listener(socket_path: str) -> int:
    """The id of the process that listens there; 0 where this process cannot see it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        probe.connect(socket_path)
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid: int = _UCRED.unpack(credentials)[0]
    return pid


def plain(status: AgentStatus) -> dict[str, object]:
    """The status as JSON values."""
    values: dict[str, object] = msgspec.to_builtins(status)
    values["incarnation"] = status.incarnation.hex()
    for inside in ("t", "request"):
        values.pop(inside, None)
    values["warning"] = listener_warning(status.lanes)
    return values


def text(status: AgentStatus) -> str:
    """The status as lines of text."""
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

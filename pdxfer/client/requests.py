"""What a client asks of its agent: arguments checked, messages built. No I/O."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pdxfer
from pdxfer import limits
from pdxfer.client.arguments import (
    check_addresses,
    check_aux,
    check_count,
    check_flag,
    check_room,
    check_seconds,
)
from pdxfer.client.pages import (
    check_layers,
    end_token,
    normalise,
    pack,
    token_groups,
)
from pdxfer.errors import ConfigError, RemoteProtocolError
from pdxfer.local.messages import (
    AgentHello,
    ChunkTerms,
    ConnectPeer,
    FromAgent,
    OpenReceive,
    OpenSend,
    PlaceTerms,
    WorkerHello,
)
from pdxfer.protocol.decode.placing import check_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.protocol.prefill.extent import ChunkExtent, Extent


def hello_message(request: int, role: str) -> WorkerHello:
    """The first message of a worker: its version and role."""
    return WorkerHello(request=request, version=pdxfer.__version__, role=role, pid=os.getpid())


def check_hello(answer: FromAgent, fds: Sequence[int], role: str, socket_path: str) -> AgentHello:
    """Check the agent's first message. The descriptors stay the caller's.

    Raises: ConfigError unless it is of our version and role; RemoteProtocolError.
    """
    if not isinstance(answer, AgentHello) or len(fds) != 2:
        raise RemoteProtocolError(
            f"the agent answered WorkerHello with {type(answer).__name__} and {len(fds)} "
            "descriptors, not with AgentHello and 2"
        )
    if (answer.version, answer.role) != (pdxfer.__version__, role):
        raise ConfigError(
            f"this worker is a {role} worker of pdxfer {pdxfer.__version__}, the agent at "
            f"{socket_path} a {answer.role} agent of {answer.version}: both must be the same"
        )
    return answer


def open_message(
    request: int, room: int, deadline_s: float | None, lease_s: float, chunk: ChunkTerms | None
) -> OpenSend:
    """Without its board slot, which is chosen last.

    Raises: ConfigError naming the argument that is wrong.
    """
    return OpenSend(
        request=request,
        transfer=-1,
        sequence=0,
        room=check_room(room),
        deadline_s=_deadline(deadline_s),
        lease_s=check_seconds("lease_s", lease_s),
        chunk=chunk,
    )


def chunk_of(  # noqa: PLR0913 the surface of `send`
    layout: KVLayout,
    extent: Extent,
    pages: object,
    *,
    tokens: int | None,
    layers: Iterable[int] | None,
    last: bool,
    aux: bytes,
    trim: bool,
    null_page: int | None,
) -> tuple[ChunkTerms, ChunkExtent]:
    """Check and pack what a chunk is, behind the earlier ones of its send; `extent` stays as it is.

    Raises: ConfigError naming the argument that is wrong.
    """
    carried = check_aux(aux, last=check_flag("last", last))
    if tokens is not None:
        tokens = check_count("tokens", tokens, 0)
    chosen = None if layers is None else check_layers(layout, layers)
    groups = normalise(layout, pages, {}, null_page=null_page)
    trim = check_flag("trim", trim)
    covered = extent.check(groups, tokens, chosen, last=last, trim=trim)
    chunk = ChunkTerms(
        groups=pack(covered.pages), tokens=tokens, layers=chosen, last=last, aux=carried
    )
    return chunk, covered


def connect_message(request: int, prefill: str | Sequence[str], timeout_s: float) -> ConnectPeer:
    """Raises: ConfigError naming the argument that is wrong."""
    timeout_s = check_seconds("timeout_s", timeout_s)
    return ConnectPeer(request=request, prefill=check_addresses(prefill), timeout_s=timeout_s)


def receive_message(  # noqa: PLR0913 the surface of `receive`
    request: int,
    layout: KVLayout,
    room: int,
    prefill: str | Sequence[str],
    pages: object,
    *,
    tokens: int | None,
    prefix_tokens: int,
    deadline_s: float | None,
    unreachable_s: float | None,
    must_exist: bool,
    trim: bool,
    null_page: int | None,
) -> OpenReceive:
    """Without its board slot, which is chosen last.

    Raises: ConfigError naming the argument that is wrong.
    """
    room = check_room(room)
    place = None
    if pages is not None:
        place = places_of(
            layout, room, pages, tokens, prefix_tokens, trim=trim, null_page=null_page
        )
    elif tokens is not None or prefix_tokens or trim:
        raise ConfigError("tokens, prefix_tokens and trim go with the pages: give them to place()")
    return OpenReceive(
        request=request,
        transfer=-1,
        sequence=0,
        room=room,
        prefill=check_addresses(prefill),
        deadline_s=_deadline(deadline_s),
        unreachable_s=None
        if unreachable_s is None
        else check_seconds("unreachable_s", unreachable_s),
        must_exist=check_flag("must_exist", must_exist),
        place=place,
    )


def places_of(
    layout: KVLayout,
    room: int,
    pages: object,
    tokens: int | None,
    prefix_tokens: int,
    *,
    trim: bool,
    null_page: int | None,
) -> PlaceTerms:
    """Check and pack where a request goes.

    Raises: ConfigError naming the argument, its value and what it may be.
    """
    if tokens is not None:
        tokens = check_count("tokens", tokens, 0)
    prefix_tokens = check_count("prefix_tokens", prefix_tokens, 0)
    trim = check_flag("trim", trim)
    starts = {
        group.name: prefix_tokens // group.page_size * group.page_size
        for group in token_groups(layout)
    }
    groups = normalise(layout, pages, starts, unique=True, null_page=null_page)
    if tokens is None:
        tokens = end_token(layout, groups)
        if not tokens:
            raise ConfigError(
                f"tokens={tokens}: the pages hold no tokens to count; give the number, or tokens=0 "
                "for a request that moves nothing"
            )
    placed = check_places(layout, room, groups, tokens, prefix_tokens, trim=trim)
    return PlaceTerms(tokens=tokens, prefix_tokens=prefix_tokens, groups=pack(placed))


def _deadline(deadline_s: float | None) -> float:
    return check_seconds(
        "deadline_s", limits.UNMATCHED_DEADLINE_S if deadline_s is None else deadline_s
    )

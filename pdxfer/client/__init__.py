"""What a serving worker imports: the client of the agent beside it. No torch, ZeroMQ or UCX.

The async clients are loaded, and asyncio with them, when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdxfer.client.cache import Cache, EmbeddedAgent
from pdxfer.client.client import Client
from pdxfer.client.decode import Connecting, DecodeClient, Receiving
from pdxfer.client.prefill import PrefillClient, Sending
from pdxfer.client.record import Commit
from pdxfer.client.transfer import Transfer
from pdxfer.layout import Pages, PlanSummary, Rank
from pdxfer.protocol.state import State

if TYPE_CHECKING:
    from pdxfer.client.async_client import AsyncClient
    from pdxfer.client.async_decode import AsyncConnecting, AsyncDecodeClient, AsyncReceiving
    from pdxfer.client.async_prefill import AsyncPrefillClient, AsyncSending
    from pdxfer.client.async_transfer import AsyncTransfer

__all__ = [
    "AsyncClient",
    "AsyncConnecting",
    "AsyncDecodeClient",
    "AsyncPrefillClient",
    "AsyncReceiving",
    "AsyncSending",
    "AsyncTransfer",
    "Cache",
    "Client",
    "Commit",
    "Connecting",
    "DecodeClient",
    "EmbeddedAgent",
    "Pages",
    "PlanSummary",
    "PrefillClient",
    "Rank",
    "Receiving",
    "Sending",
    "State",
    "Transfer",
]

_ASYNC = {
    "AsyncClient": "async_client",
    "AsyncConnecting": "async_decode",
    "AsyncDecodeClient": "async_decode",
    "AsyncPrefillClient": "async_prefill",
    "AsyncReceiving": "async_decode",
    "AsyncSending": "async_prefill",
    "AsyncTransfer": "async_transfer",
}


def __getattr__(name: str) -> object:
    """Loads an async name when it is first asked for."""
    if name not in _ASYNC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded: object = getattr(importlib.import_module(f"{__name__}.{_ASYNC[name]}"), name)
    globals()[name] = loaded
    return loaded

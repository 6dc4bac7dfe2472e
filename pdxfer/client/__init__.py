"""What a serving worker imports: the client of the agent beside it. No torch, ZeroMQ or UCX."""

from pdxfer.client.cache import Cache, EmbeddedAgent
from pdxfer.client.client import Client
from pdxfer.client.decode import DecodeClient, Receiving
from pdxfer.client.prefill import PrefillClient, Sending
from pdxfer.client.record import Commit
from pdxfer.client.transfer import Transfer
from pdxfer.layout import Pages, PlanSummary, Rank
from pdxfer.protocol.state import State

__all__ = [
    "Cache",
    "Client",
    "Commit",
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

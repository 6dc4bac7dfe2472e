"""Board slots at a real agent: the worker chooses them, and the agent holds it to that."""

import pytest

from pdxfer import embedded
from pdxfer.client import PrefillClient, State
from pdxfer.client.requests import open_message
from pdxfer.client.waiting import run
from pdxfer.errors import LocalProtocolError, TransferError
from pdxfer.local.messages import ChunkTerms, PlacePages, PlaceTerms, ReleaseSlot, SendChunk
from tests.unit.client.conftest import SmallCache

WAIT_S = 20


@pytest.fixture
def client():
    with embedded.prefill_agent() as agent, PrefillClient(agent, SmallCache()) as made:
        yield made


def ask(client, message):
    """What the agent answers to a message made by hand."""
    return run(client.channel.request(message, timeout_s=WAIT_S))


def reused(client):
    """A transfer that has ended, and the one that has its slot now."""
    first = client.open(1)
    first.abort()
    with pytest.raises(TransferError):
        first.wait(WAIT_S)
    client._slots._free.remove(first.slot)
    client._slots._free.appendleft(first.slot)
    second = client.open(2)
    assert (second.slot, second.sequence) == (first.slot, first.sequence + 1)
    return first, second


@pytest.mark.parametrize("kind", [SendChunk, ReleaseSlot])
def test_a_late_message_for_a_reused_slot_is_refused(client, kind):
    first, second = reused(client)
    chunk = ChunkTerms(groups={}, tokens=None, layers=None, last=True, aux=b"")
    late = {SendChunk: {"chunk": chunk}, ReleaseSlot: {}}[kind]
    message = kind(
        request=client.channel.new_request(),
        transfer=first.slot,
        sequence=first.sequence,
        **late,
    )
    with pytest.raises(LocalProtocolError, match=f"this slot is in use {second.sequence}"):
        ask(client, message)
    assert second.poll() is State.WAITING
    second.send([2])  # its first chunk: none came before


@pytest.mark.parametrize(("slot", "ahead"), [("taken", 0), ("taken", 1), ("free", 2)])
def test_an_opening_in_a_slot_that_is_not_to_be_used_is_refused(client, slot, ahead):
    live = client.open(1)
    number = live.slot if slot == "taken" else live.slot + 1
    opening = open_message(client.channel.new_request(), 2, None, 30.0, None)
    fields = {"transfer": number, "sequence": (live.sequence if slot == "taken" else 0) + ahead}
    message = type(opening)(
        **{name: getattr(opening, name) for name in opening.__struct_fields__} | fields
    )
    with pytest.raises(LocalProtocolError, match=f"transfer={number}"):
        ask(client, message)
    assert live.poll() is State.WAITING
    assert client.open(3).poll() is State.WAITING


def test_an_opening_refused_by_the_agent_gives_its_slot_back(client):
    client.open(1)
    for _ in range(3):
        with pytest.raises(LocalProtocolError, match="duplicate room 1"):
            client.open(1)
    assert client.finished() == []
    assert list(client._live) == [0]


def test_pages_of_the_other_role_end_their_transfer(client):
    sending = client.open(1)
    place = PlaceTerms(tokens=1, prefix_tokens=0, groups={})
    client.channel.post(
        PlacePages(
            request=sending.request,
            transfer=sending.slot,
            sequence=sending.sequence,
            place=place,
        )
    )
    with pytest.raises(LocalProtocolError, match="takes no PlacePages"):
        sending.wait(WAIT_S)
    assert sending.pages_returned

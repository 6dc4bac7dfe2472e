"""The requests of workers as the machines take them: page ids unpacked, nothing else changed."""

from __future__ import annotations

from pdxfer.layout import Pages
from pdxfer.local.messages import ChunkTerms, HeldTransfer, PlaceTerms
from pdxfer.protocol.decode.inherited import Inheritance
from pdxfer.protocol.given import GivenChunk, GivenPlaces
from pdxfer.protocol.group_pages import unpack_group
from pdxfer.wire.messages import GroupPages


def given_chunk(chunk: ChunkTerms) -> GivenChunk:
    """The chunk of a local message as the prefill machine takes it.

    Raises:
        RemoteProtocolError: an encoding of page ids is malformed or over its limit.
    """
    return GivenChunk(
        _pages(chunk.groups), chunk.tokens, chunk.layers, last=chunk.last, aux=chunk.aux
    )


def given_places(places: PlaceTerms) -> GivenPlaces:
    """The places of a local message as the decode machine takes them.

    Raises:
        RemoteProtocolError: an encoding of page ids is malformed or over its limit.
    """
    return GivenPlaces(_pages(places.groups), places.tokens, places.prefix_tokens)


def inheritance(worker: int, held: HeldTransfer, prefill: tuple[str, ...]) -> Inheritance:
    """What an agent that died has left, as the decode machine takes it.

    Raises:
        RemoteProtocolError: an encoding of page ids is malformed or over its limit.
    """
    return Inheritance(
        worker=worker,
        room=held.room,
        slot=held.transfer,
        life=held.life,
        prefill=prefill,
        pages=_pages(held.groups),
        writers=tuple(held.writers),
    )


def _pages(groups: dict[str, GroupPages]) -> dict[str, Pages]:
    return {name: unpack_group(group) for name, group in groups.items()}

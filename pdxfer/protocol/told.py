"""What a peer has told of its workers, and the verdicts on them, so that nothing is done twice.

Checking a layout and planning a pair cost some tens of microseconds a plane, on the loop that also
moves bytes. Agents tell all their workers whenever one changes: only that one is to cost anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from pdxfer import limits
from pdxfer.errors import RemoteProtocolError
from pdxfer.protocol.workers import Pair, Worker, from_info, judge
from pdxfer.wire.messages import WorkerInfo

Key = TypeVar("Key", bound=Hashable)


class ToldWorkers:
    """The workers of one peer, by what was told of them last."""

    def __init__(self) -> None:
        self._known: dict[bytes, Worker] = {}

    def take(self, *told: Sequence[WorkerInfo]) -> list[list[Worker]]:
        """The workers of each list; those told in the same words before are the same objects.

        Raises:
            RemoteProtocolError: a worker is malformed, or all have too many planes together;
                nothing has changed.
        """
        planes = sum(_planes(info) for infos in told for info in infos)
        if planes > limits.TOLD_PLANES_MAX:
            raise RemoteProtocolError(
                f"the workers of one message have {planes} planes together, at most "
                f"{limits.TOLD_PLANES_MAX} (TOLD_PLANES_MAX)"
            )
        known: dict[bytes, Worker] = {}
        taken: list[list[Worker]] = []
        for infos in told:
            workers: list[Worker] = []
            for info in infos:
                digest = blake2b(msgspec.msgpack.encode(info), digest_size=16).digest()
                worker = known.get(digest) or self._known.get(digest) or from_info(info)
                known[digest] = worker
                workers.append(worker)
            taken.append(workers)
        self._known = known
        return taken


class Verdicts(Generic[Key]):
    """The verdicts of `judge`, kept while every worker of an instance is the same object."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[dict[Key, Worker], Worker, dict[Key, Pair]]] = {}
        """The verdicts in the order of their last use."""

    def judge(
        self, name: Hashable, sources: Mapping[Key, Worker], destination: Worker
    ) -> dict[Key, Pair]:
        """The verdicts of `judge`, kept for `name`: a source instance and a destination worker."""
        known = self._kept.pop(name, None)
        if known is None or known[1] is not destination or not _same(known[0], sources):
            known = (dict(sources), destination, judge(sources, destination))
        if len(self._kept) >= limits.VERDICTS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = known
        return known[2]


def _same(before: Mapping[Key, Worker], now: Mapping[Key, Worker]) -> bool:
    return before.keys() == now.keys() and all(before[key] is now[key] for key in now)


def _planes(info: WorkerInfo) -> int:
    planes = info.layout.get("planes")
    return len(planes) if isinstance(planes, list) else 0

"""Workers of either side as the machines know them, and the verdict on pairs of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pdxfer.errors import ConfigError, LayoutMismatchError, PdxferError, RemoteProtocolError
from pdxfer.layout import KVLayout, Plan, Rank, Side, check_pair, cover, plan
from pdxfer.wire.messages import RankInfo, RegionInfo, WorkerInfo

Key = TypeVar("Key", bound=Hashable)
"""How a caller names its source workers."""


def rank_info(rank: Rank) -> RankInfo:
    """A rank as it travels."""
    return RankInfo(**dataclasses.asdict(rank))


def rank_of(info: RankInfo) -> Rank:
    """A rank that has travelled.

    Raises:
        ConfigError: numbers that are no rank's.
    """
    return Rank(**msgspec.structs.asdict(info))


@dataclass(frozen=True, slots=True)
class Worker:
    """One attached worker: rank, layout, and what it asks of a pair."""

    worker_id: int
    instance: str
    rank: Rank
    layout: KVLayout
    relayout: str
    ignore_parts: tuple[str, ...]
    regions: tuple[RegionInfo, ...] = ()
    """The worker's memory as its agent has mapped it. Remote keys are added for the peer that may
    write it."""

    @property
    def side(self) -> Side:
        """This worker in a comparison."""
        return Side(
            layout=self.layout,
            attention_tp=self.rank.tp_size,
            relayout=self.relayout,
            ignore_parts=self.ignore_parts,
            all_layers=self.rank.pp_size == 1,
        )

    def info(self) -> WorkerInfo:
        """The worker as a peer is told of it."""
        rank, layout = self.rank, self.layout
        return WorkerInfo(
            worker_id=self.worker_id,
            instance=self.instance,
            rank=rank_info(rank),
            layout=layout.to_wire(),
            regions=list(self.regions),
            item_lens=list(layout.item_lens),
            page_size=layout.groups[0].page_size,
            attention_tp=rank.tp_size,
            unified_memory=layout.unified_memory,
            relayout=self.relayout,
            model=layout.model,
            ignore_parts=list(self.ignore_parts),
        )


def from_info(info: WorkerInfo) -> Worker:
    """A peer's worker, with every claim of the message held against its layout.

    Raises:
        RemoteProtocolError: a field is malformed, or contradicts the layout beside it.
    """
    layout = KVLayout.from_wire(info.layout)
    try:
        rank = rank_of(info.rank)
    except PdxferError as error:
        raise RemoteProtocolError(f"worker {info.worker_id}: {error}") from error
    claims: list[tuple[str, object, object]] = [
        ("item_lens", list(info.item_lens), list(layout.item_lens)),
        ("page_size", info.page_size, layout.groups[0].page_size),
        ("attention_tp", info.attention_tp, rank.tp_size),
        ("unified_memory", info.unified_memory, layout.unified_memory),
        ("model", info.model, layout.model),
        ("relayout", info.relayout in ("allow", "never"), True),
    ]
    for name, claimed, found in claims:
        if claimed != found:
            raise RemoteProtocolError(
                f"worker {info.worker_id}: {name} says {claimed}, its layout says {found}"
            )
    return Worker(
        worker_id=info.worker_id,
        instance=info.instance,
        rank=rank,
        layout=layout,
        relayout=info.relayout,
        ignore_parts=tuple(info.ignore_parts),
        regions=tuple(info.regions),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """The verdict on one (source worker, destination worker): a plan, or the refusal."""

    plan: Plan | None
    error: LayoutMismatchError | None
    owes: bool
    """Whether the source worker has any cell that the destination needs from it."""

    @property
    def digest(self) -> bytes:
        """Digest of the plan, which both sides compare."""
        return self.plan.digest if self.plan is not None else b"\0" * 16


def missing_ranks(workers: Iterable[Worker]) -> tuple[int, int]:
    """(attached, expected) ranks of one instance; expected is 0 when none is attached."""
    found = list(workers)
    if not found:
        return (0, 0)
    return (len({worker.rank.index for worker in found}), found[0].rank.instance_size)


def judge(sources: Mapping[Key, Worker], destination: Worker) -> dict[Key, Pair]:
    """The verdict on every source worker of one complete instance towards one destination worker.

    Pure and the same on both sides. A refusal of one pair refuses them all: a transfer needs every
    source worker that owes it something.

    Returns: one `Pair` for each key of `sources`.
    """
    ordered = sorted(sources.items(), key=lambda item: item[1].rank.index)
    try:
        for _, source in ordered:
            check_pair(source.side, destination.side)
        ignore = {
            part for worker in (*sources.values(), destination) for part in worker.ignore_parts
        }
        owned = cover(
            [(source.rank, source.layout) for _, source in ordered],
            (destination.rank, destination.layout),
            ignore_parts=ignore,
        )
        verdicts: dict[Key, Pair] = {}
        for (key, source), part in zip(ordered, owned, strict=True):
            if part.empty:
                verdicts[key] = Pair(plan=None, error=None, owes=False)
                continue
            made = plan(
                source.layout, destination.layout, owned=part, ignore_parts=tuple(sorted(ignore))
            )
            verdicts[key] = Pair(plan=made, error=None, owes=True)
    except LayoutMismatchError as error:
        return {key: Pair(plan=None, error=error, owes=False) for key, _ in ordered}
    except ConfigError as error:
        # Ranks that contradict each other: of different sizes, or one twice.
        refusal = LayoutMismatchError(str(error), fields=error.fields)
        return {key: Pair(plan=None, error=refusal, owes=False) for key, _ in ordered}
    return verdicts

"""What is moved: three shapes of a real cache (32 layers, 8 KV heads of 128, bfloat16).

Pages are shuffled on both sides, so that no two runs of a case touch: what a page costs is what a
run costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer.layout import Pages, Plan, page_major, plan, token_major

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pdxfer.layout import Batches, KVLayout

_SEEDS: Final = 64
QUICK_FACTOR: Final = 32


@dataclass(frozen=True)
class Case:
    """Pages of one layout, from one pool into another of the same layout."""

    name: str
    layout: KVLayout
    pages: int
    """Pages that move; the layout has one more, which is reserved."""
    runs_expected: int

    @cached_property
    def plan(self) -> Plan:
        """The plan from the layout into itself."""
        return plan(self.layout, self.layout)

    @cached_property
    def page_lists(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and destination ids, the same in every process, none next to the one before."""
        for seed in range(_SEEDS):
            generator = np.random.default_rng([seed, self.pages])
            lists = (1 + generator.permutation(self.pages), 1 + generator.permutation(self.pages))
            if len(self.plan.runs(*lists)) == self.runs_expected:
                return lists
        raise RuntimeError(f"{self.name}: no page order without runs that merge")

    @cached_property
    def batches(self) -> Batches:
        """The runs, as an agent posts them."""
        group = self.layout.groups[0]
        source, destination = self.page_lists
        return self.plan.batches(
            {group.name: Pages(source)},
            {group.name: Pages(destination)},
            {group.name: (0, self.pages * group.page_size)},
        )

    @property
    def length_bytes(self) -> int:
        """Pages that move."""
        return self.batches.length_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of one pool."""
        return sum(region.length_bytes for region in self.layout.regions)

    def bases(self, address: int) -> NDArray[np.uint64]:
        """Where each region begins in a buffer at `address`."""
        lengths = [region.length_bytes for region in self.layout.regions]
        return (address + np.concatenate([[0], np.cumsum(lengths)[:-1]])).astype(np.uint64)

    def gaps(self) -> list[tuple[int, int]]:
        """`[first, end)` of the pool that no run writes, in bytes of the whole buffer."""
        starts = self.bases(0).astype(np.int64)
        runs = self.batches.runs
        first = starts[runs[:, 2]] + runs[:, 3]
        order = np.argsort(first)
        begins = np.append(first[order], self.memory_bytes)
        ends = np.concatenate([[0], (first + runs[:, 4])[order]])
        return [
            (int(end), int(begin)) for end, begin in zip(ends, begins, strict=True) if end < begin
        ]


def all_cases(*, quick: bool) -> list[Case]:
    """2 MiB x 256, 32 KiB x 16,384 in 64 regions, 2 KiB x 131,072; `quick`: a part of each."""
    factor = QUICK_FACTOR if quick else 1
    whole, paged, slotted = 256 // factor, 256 // factor, 2048 // factor
    return [
        Case(f"2 MiB x {whole}", _layout(page_major, 16, whole), whole, whole),
        Case(f"32 KiB x {64 * paged:,}", _layout(token_major, 16, paged), paged, 64 * paged),
        Case(f"2 KiB x {64 * slotted:,}", _layout(token_major, 1, slotted), slotted, 64 * slotted),
    ]


def _layout(build: Callable[..., KVLayout], page_size: int, pages: int) -> KVLayout:
    return build(
        layers=range(32),
        kv_heads=8,
        head_dim=128,
        page_size=page_size,
        pages=pages + 1,
        dtype="bfloat16",
    )


def one_page() -> KVLayout:
    """Pages of 32 KiB, for latency."""
    return page_major(
        layers=range(1), kv_heads=4, head_dim=128, page_size=16, pages=65, dtype="bfloat16"
    )

"""What a plan costs, in figures that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdxfer.errors import RemoteProtocolError
from pdxfer.layout import records

LONG_RUN_BYTES: Final = 16 << 10
"""Runs of this size keep a lane near its limit."""
SHORT_RUN_BYTES: Final = 2 << 10
"""Below it the cost of a write is the count of runs, not their bytes."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group, for pages that do not lie next to each other; figures are per destination page."""

    group: str
    source_page_size: int
    destination_page_size: int
    runs_per_page: float
    """Not whole where one run serves several destination pages or a page only now and then."""
    bytes_per_page: int
    longest_run_bytes: int
    shortest_run_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in figures; groups that this pair owes nothing of are left out."""

    groups: tuple[GroupSummary, ...]
    lane_hint: str
    """What runs of this length mean for the lanes of this build."""

    @property
    def runs_per_page(self) -> float:
        """Runs of one destination page of every group."""
        return sum(group.runs_per_page for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one destination page of every group."""
        return sum(group.bytes_per_page for group in self.groups)

    @property
    def longest_run_bytes(self) -> int:
        """0 where nothing is owed."""
        return max((group.longest_run_bytes for group in self.groups), default=0)

    @property
    def shortest_run_bytes(self) -> int:
        """0 where nothing is owed."""
        return min((group.shortest_run_bytes for group in self.groups), default=0)

    def to_wire(self) -> dict[str, object]:
        """This summary as plain values; `from_wire` is the inverse."""
        return {
            "groups": [records.as_list(group) for group in self.groups],
            "lane_hint": self.lane_hint,
        }

    @staticmethod
    def from_wire(obj: object) -> PlanSummary:
        """A summary that an agent sent.

        Raises:  RemoteProtocolError: a field is missing or of another type.
        """
        groups = records.value_of(obj, "groups", "summary")
        if not isinstance(groups, list | tuple):
            raise RemoteProtocolError("summary.groups is no list")
        hint = records.value_of(obj, "lane_hint", "summary")
        return PlanSummary(
            groups=tuple(
                records.from_list(GroupSummary, item, f"summary.groups[{at}]")
                for at, item in enumerate(groups)
            ),
            lane_hint=records.checked(hint, str, "summary.lane_hint"),
        )


def lane_hint(runs: float, length_bytes: int) -> str:
    """What runs of this average length mean for the lanes of this build."""
    if runs == 0:
        return "nothing to move"
    average = int(length_bytes / runs)
    if average >= LONG_RUN_BYTES:
        return f"runs of {average} B on average: cma and tcp write near their limit"
    if average >= SHORT_RUN_BYTES:
        return f"runs of {average} B on average: cma and tcp pay for every write as for its bytes"
    return (
        f"runs of {average} B on average: cma and tcp are bound by the count of writes; runs "
        "are longest where layout, page size and TP of both sides are the same"
    )

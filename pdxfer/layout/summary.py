"""What a plan costs, in figures that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdxfer.errors import RemoteProtocolError
from pdxfer.layout import records

LONG_RUN_BYTES: Final = 16 << 10
"""Runs of this length or longer keep a lane near its limit."""
SHORT_RUN_BYTES: Final = 2 << 10
"""Runs shorter than this cost a lane by their number, not by their bytes."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What a destination page of one group takes, where no two pages lie next to each other."""

    group: str
    source_page_size: int
    destination_page_size: int
    runs_per_page: float
    """Runs of a page; no whole number where one run serves several pages, or only some of them."""
    bytes_per_page: int
    longest_run_bytes: int
    shortest_run_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan costs; groups of which this pair owes nothing are left out."""

    groups: tuple[GroupSummary, ...]
    lane_hint: str
    """What runs of this length mean for the lanes of this build, in words."""

    @property
    def runs_per_page(self) -> float:
        """How many runs one destination page of every group takes together."""
        return sum(group.runs_per_page for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """How many bytes one destination page of every group has together."""
        return sum(group.bytes_per_page for group in self.groups)

    @property
    def longest_run_bytes(self) -> int:
        """Bytes of the longest run; 0 where nothing is owed."""
        return max((group.longest_run_bytes for group in self.groups), default=0)

    @property
    def shortest_run_bytes(self) -> int:
        """Bytes of the shortest run; 0 where nothing is owed."""
        return min((group.shortest_run_bytes for group in self.groups), default=0)

    def to_wire(self) -> dict[str, object]:
        """This summary as a map of lists, strings and numbers; `from_wire` is the inverse."""
        return {
            "groups": [records.as_list(group) for group in self.groups],
            "lane_hint": self.lane_hint,
        }

    @staticmethod
    def from_wire(obj: object) -> PlanSummary:
        """The summary that an agent sent as plain values.

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
    """What runs of this average length mean for the lanes of this build, in words."""
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

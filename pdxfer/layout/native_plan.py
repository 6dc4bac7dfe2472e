"""The native core as plans use it: what goes in, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import _core, limits
from pdxfer.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planned_groups import PlanePair, PlannedGroup


def compile_plan(
    source: KVLayout,
    destination: KVLayout,
    groups: dict[str, PlannedGroup],
    pairs: list[PlanePair],
) -> _core.Plan:
    """The native plan of pairs of planes.

    Raises:  ConfigError: a plane that leaves its region, a sum that leaves 64 bits.
    """
    rows = [pair.row(groups[pair.destination.group].index) for pair in pairs]
    with native_errors():
        return _core.Plan(
            [
                (
                    name,
                    group.source.page_size,
                    group.source.pages,
                    group.source.reserved_pages,
                    group.destination.page_size,
                    group.destination.pages,
                    group.destination.reserved_pages,
                )
                for name, group in groups.items()
            ],
            np.array(rows, dtype=np.int64).reshape(-1, 16),
            [region.length_bytes for region in source.regions],
            [region.length_bytes for region in destination.regions],
            limits.RUNS_PER_PAGE_MAX,
            limits.RUNS_PER_REQUEST_MAX,
        )


@contextmanager
def native_errors() -> Iterator[None]:
    """Raise errors of the native core inside of this context as errors of this package."""
    try:
        yield
    except _core.LimitError as error:
        raise ResourceError(str(error)) from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(str(error)) from error

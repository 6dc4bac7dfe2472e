"""Page ids of a request, and whether they may travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdxfer import _core
from pdxfer.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The page ids of one group of a request, in the order of its tokens.

    Shapes:  ids: int64 [pages], read-only; any one-dimensional array of integers is taken, and one
             integer for one page.
    Units:   first_token: the token of the request that row 0 of the first page stands for.
    Raises:  ConfigError: ids that are no integers of 63 bits in one dimension, or a negative
             first_token.
    """

    ids: NDArray[np.int64]
    first_token: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _as_ids(self.ids))
        if isinstance(self.first_token, bool) or not isinstance(self.first_token, int):
            raise ConfigError(f"first_token is {self.first_token!r}; it must be an int")
        if not 0 <= self.first_token < 1 << 62:
            raise ConfigError(f"first_token is {self.first_token}; it must be 0 or more")

    def __len__(self) -> int:
        return len(self.ids)


def _as_ids(ids: object) -> NDArray[np.int64]:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"page ids are no array: {error}") from error
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros(0, np.int64)
    elif array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"page ids {repr(ids)[:80]} have dtype {array.dtype} and {array.ndim} dimensions; a "
            "one-dimensional array of integers is needed"
        )
    if array.dtype == np.uint64 and int(array.max(initial=0)) >= 1 << 63:
        raise ConfigError(f"page id {int(array.max())} is over 63 bits")
    result = np.array(array, dtype=np.int64, order="C")
    result.flags.writeable = False
    return result


def as_group_pages(layout: KVLayout, pages: object) -> dict[str, Pages]:
    """The pages of a request, as one `Pages` for each group.

    Args:    pages: ids (or `Pages`) of the layout's only group, or a mapping from the names of
             groups to either.
    Raises:  ConfigError: a group that the layout lacks, or bare ids where it has several groups.
    """
    if isinstance(pages, Mapping):
        unknown = [name for name in pages if name not in layout.group_by_name]
        if unknown:
            raise ConfigError(
                f"pages name group {unknown[0]!r}; the layout has {', '.join(layout.group_by_name)}"
            )
        return {name: _as_pages(value) for name, value in pages.items()}
    if len(layout.groups) != 1:
        raise ConfigError(
            f"the layout has {len(layout.groups)} groups ({', '.join(layout.group_by_name)}); "
            "pages must be a mapping from group to ids"
        )
    return {layout.groups[0].name: _as_pages(pages)}


def _as_pages(value: object) -> Pages:
    return value if isinstance(value, Pages) else Pages(_as_ids(value))


def check_page_ids(
    layout: KVLayout, group: str, ids: NDArray[np.int64], *, unique: bool = False
) -> None:
    """Refuse page ids that may not travel.

    Args:    unique: also refuse an id that appears twice, as destination pages of one request must
             not.
    Raises:  ConfigError: an id outside of `reserved_pages <= id < pages`, or one that appears
             twice; the text names the id, its position and the range.
    Cost:    one pass, of a few nanoseconds for each id.
    """
    spec = layout.group_by_name.get(group)
    if spec is None:
        raise ConfigError(f"no group {group!r}; the layout has {', '.join(layout.group_by_name)}")
    check_ids(spec, ids, unique=unique)


def check_ids(spec: Group, ids: NDArray[np.int64], *, unique: bool = False, side: str = "") -> None:
    """Do what `check_page_ids` does, for one group; `side` is how the text begins."""
    where = f"{side} page id" if side else "page id"
    at = _core.first_bad_id(ids, spec.reserved_pages, spec.pages)
    if at >= 0:
        raise ConfigError(
            f"{where} {int(ids[at])} of group {spec.name} at position {at} is outside "
            f"{spec.reserved_pages} <= id < {spec.pages} (reserved_pages, pages)",
            fields={"page_id": str(int(ids[at])), "position": str(at), "group": spec.name},
        )
    at = _core.first_repeated_id(ids, spec.pages) if unique else -1
    if at >= 0:
        raise ConfigError(
            f"{where} {int(ids[at])} of group {spec.name} at position {at} appeared before; "
            "each destination page may be named once",
            fields={"page_id": str(int(ids[at])), "position": str(at), "group": spec.name},
        )

"""Page ids as bytes: the shortest of four encodings.

`i4`, `i8`: little-endian signed ids, one after another. `r4`, `r8`: pairs (first, count), each a
run of consecutive ascending ids. Order is kept: ids pair by position with those of the other side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pdxfer.errors import ConfigError, RemoteProtocolError, ResourceError
from pdxfer.limits import PAGES_PER_MESSAGE_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
ENCODINGS: Final = ("i4", "r4", "i8", "r8")
"""The encodings of page ids; of two that are equally long the first is taken."""
_ITEM: Final[dict[str, np.dtype[np.signedinteger]]] = {"4": np.dtype("<i4"), "8": np.dtype("<i8")}


def pack_ids(ids: NDArray[np.integer]) -> tuple[str, bytes]:
    """`ids` as (encoding, bytes), at most 4 B an id where ids fit 32 bits, else 8 B.

    Shapes:  ids [n], any integer dtype, 0 <= id < 2**63.
    Raises:  ConfigError naming the first wrong id and its position; ResourceError above
             `PAGES_PER_MESSAGE_MAX` ids.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ConfigError(
            f"page ids: {array.ndim}-d {array.dtype} array, expected 1-d of an integer dtype"
        )
    if array.size > PAGES_PER_MESSAGE_MAX:
        raise ResourceError(
            f"page ids: {array.size} in one message, at most {PAGES_PER_MESSAGE_MAX} "
            "(PAGES_PER_MESSAGE_MAX); send in chunks"
        )
    if not array.size:
        return "i4", b""
    _check_range(array)
    wide = array.astype(np.int64, copy=False)
    size = "4" if int(wide.max()) <= INT32_MAX else "8"
    if wide.size < 3:  # no run is shorter than the ids themselves
        return f"i{size}", wide.astype(_ITEM[size]).tobytes()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(wide) != 1) + 1))
    if 2 * starts.size < wide.size:
        counts = np.diff(starts, append=wide.size)
        pairs = np.stack((wide[starts], counts), axis=1)
        return f"r{size}", pairs.astype(_ITEM[size]).tobytes()
    return f"i{size}", wide.astype(_ITEM[size]).tobytes()


def unpack_ids(encoding: str, data: bytes | memoryview) -> NDArray[np.int64]:
    """The ids in `data`, int64 [n], in order.

    Nothing is allocated for more than `PAGES_PER_MESSAGE_MAX` ids, whatever counts say.

    Raises:  RemoteProtocolError naming `encoding` or `ids` and the offending value.
    """
    if encoding not in ENCODINGS:
        raise RemoteProtocolError(
            f"field encoding: {encoding!r}, expected one of {', '.join(ENCODINGS)}"
        )
    dtype = _ITEM[encoding[1]]
    item_bytes = dtype.itemsize * (2 if encoding[0] == "r" else 1)
    if len(data) % item_bytes:
        raise RemoteProtocolError(
            f"field ids: {len(data)} bytes are no multiple of {item_bytes}, the item of {encoding}"
        )
    if len(data) // item_bytes > PAGES_PER_MESSAGE_MAX:
        raise RemoteProtocolError(
            f"field ids: {len(data) // item_bytes} items, at most {PAGES_PER_MESSAGE_MAX}"
        )
    values = np.frombuffer(data, dtype=dtype)
    if encoding[0] == "r":
        return _expand(values.reshape(-1, 2).astype(np.int64), int(np.iinfo(dtype).max))
    if values.size and int(values.min()) < 0:
        position = int(np.flatnonzero(values < 0)[0])
        raise RemoteProtocolError(f"field ids: page id {int(values[position])} at {position}")
    wide: NDArray[np.int64] = values.astype(np.int64)
    return wide


def _check_range(array: NDArray[np.integer]) -> None:
    """Refuse ids below 0 or above int64."""
    wrong = (array < 0) if array.dtype.kind == "i" else (array > np.uint64(INT64_MAX))
    if wrong.any():
        position = int(np.flatnonzero(wrong)[0])
        raise ConfigError(
            f"page ids: {int(array[position])} at position {position}, expected 0 <= id < 2**63"
        )


def _expand(pairs: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """(first, count) runs as ids; int64 [n, 2] to int64 [m]."""
    first, count = pairs[:, 0], pairs[:, 1]
    # first <= largest - (count - 1), written so that nothing can overflow
    wrong = (first < 0) | (count < 1) | (count > PAGES_PER_MESSAGE_MAX)
    wrong |= first > largest - (np.where(wrong, 1, count) - 1)
    if wrong.any():
        run = int(np.flatnonzero(wrong)[0])
        raise RemoteProtocolError(
            f"field ids: run {run} (first={int(first[run])}, count={int(count[run])}) is not "
            f"within 0..{largest} with 1 <= count <= {PAGES_PER_MESSAGE_MAX}"
        )
    total = int(count.sum())
    if total > PAGES_PER_MESSAGE_MAX:
        raise RemoteProtocolError(f"field ids: {total} page ids, at most {PAGES_PER_MESSAGE_MAX}")
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(total, dtype=np.int64)

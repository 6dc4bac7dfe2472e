"""Runs on a GPU: filled in from an outline, gathered into and scattered from a staging buffer.

Every function here takes a stream and only enqueues. What it was given (outline, runs, regions,
staging, pool) belongs to it until the stream has passed: order other streams by events
(`pdxfer.cuda.device`). A page id or a run that leaves its memory is never followed; its row is
noted, and `DeviceRuns.check` raises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from pdxfer.cuda.device import DeviceMemory
from pdxfer.cuda.library import CopiesStruct, OutlineStruct, load_cuda
from pdxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WORD: Final = 8
_RUN_BYTES: Final = 5 * _WORD
_NO_BAD_ROW: Final = (1 << 64) - 1


class OutlineArrays(Protocol):
    """What is needed of a `pdxfer.layout.Outline`."""

    @property
    def entries(self) -> NDArray[np.int64]:
        """[e, 8]."""

    @property
    def spans(self) -> NDArray[np.int64]:
        """[s, 12]."""

    @property
    def source_ids(self) -> NDArray[np.int64]:
        """Page ids of the source, of all groups."""

    @property
    def destination_ids(self) -> NDArray[np.int64]:
        """Page ids of the destination, of all groups."""

    @property
    def rows(self) -> int:
        """Runs."""

    @property
    def length_bytes(self) -> int:
        """Bytes of all runs together."""


@dataclass(frozen=True, slots=True)
class DeviceOutline:
    """An outline in device memory. Addresses are device addresses of int64 arrays."""

    device: int
    entries: int
    spans: int
    source_ids: int
    destination_ids: int
    """Ids may also be arrays of the caller: `dataclasses.replace(outline, source_ids=address)`."""
    spans_count: int
    rows: int
    length_bytes: int
    longest_bytes: int
    """Bytes of the longest run."""
    memory: DeviceMemory
    """Holds the arrays; the caller's to close once the stream has passed."""


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """Runs int64 [rows, 5] in device memory, where each lies in staging, and the first bad row."""

    device: int
    rows: int
    length_bytes: int
    """Bytes of all runs together."""
    longest_bytes: int
    """Bytes of the longest run, by which a run gets its number of warps. Any value gives the right
    bytes."""
    memory: DeviceMemory
    """Runs, then staging offsets int64 [rows], then the first bad row; the caller's to close."""

    @property
    def runs(self) -> int:
        """Device address of the runs."""
        return self.memory.address

    @property
    def staging_offsets(self) -> int:
        """Device address of each run's offset in a staging buffer of all runs."""
        return self.memory.address + self.rows * _RUN_BYTES

    @property
    def first_bad(self) -> int:
        """Device address of the first bad row, all ones while there is none."""
        return self.staging_offsets + self.rows * _WORD

    def download(self, *, stream: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Runs int64 [rows, 5] and staging offsets int64 [rows]; waits for the stream."""
        runs = np.empty((self.rows, 5), np.int64)
        offsets = np.empty(self.rows, np.int64)
        self.memory.download(runs, stream=stream)
        self.memory.download(offsets, offset_bytes=runs.nbytes, stream=stream)
        return runs, offsets

    def check(self, *, stream: int = 0) -> None:
        """Wait for the stream; raise where any row so far was bad.

        Raises: ConfigError: naming the first bad row, which was not copied; bytes of good rows
                were. CudaError: work on the stream failed.
        """
        word = np.empty(1, np.uint64)
        self.memory.download(word, offset_bytes=self.rows * (_RUN_BYTES + _WORD), stream=stream)
        if int(word[0]) != _NO_BAD_ROW:
            raise ConfigError(
                f"run {int(word[0])} of {self.rows} names a page id outside its pool, or leaves "
                "its region or the staging buffer; it was not copied",
                fields={"run": str(int(word[0]))},
            )


@dataclass(frozen=True, slots=True)
class DeviceRegions:
    """A pool's regions, for kernels to find."""

    device: int
    count: int
    memory: DeviceMemory
    """Addresses uint64 [count], then lengths int64 [count]; the caller's to close."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A contiguous buffer that holds bytes `[first_byte, first_byte + length_bytes)` of all runs.

    On the device, or pinned host memory.
    """

    address: int
    length_bytes: int
    first_byte: int = 0


def upload_outline(outline: OutlineArrays, *, device: int = 0, stream: int = 0) -> DeviceOutline:
    """Copy an outline and its page ids to a device.

    Raises: CudaError: no memory left, among others; nothing is kept.
    """
    parts = [outline.entries, outline.spans, outline.source_ids, outline.destination_ids]
    starts = np.cumsum([0, *(part.nbytes for part in parts)]).tolist()
    packed = np.concatenate([part.ravel() for part in parts])
    memory = _uploaded(packed, device, stream)
    entries, spans, source_ids, destination_ids = (memory.address + at for at in starts[:-1])
    return DeviceOutline(
        device=device,
        entries=entries,
        spans=spans,
        source_ids=source_ids,
        destination_ids=destination_ids,
        spans_count=len(outline.spans),
        rows=outline.rows,
        length_bytes=outline.length_bytes,
        longest_bytes=int(outline.entries[:, 2].max(initial=0)),
        memory=memory,
    )


def upload_runs(runs: NDArray[np.int64], *, device: int = 0, stream: int = 0) -> DeviceRuns:
    """Copy runs int64 [n, 5] of the host to a device; they lie in staging one after the other.

    Raises: ConfigError: another shape or dtype, a negative length, over 63 bits in all. CudaError.
    """
    if runs.ndim != 2 or runs.shape[1] != 5 or runs.dtype != np.int64:
        raise ConfigError(f"runs are {runs.dtype} {list(runs.shape)}; they must be int64 [n, 5]")
    lengths = runs[:, 4]
    total = sum(lengths.tolist())
    if int(lengths.min(initial=0)) < 0 or total >= 1 << 63:
        raise ConfigError("a run's length is negative, or all lengths together are over 63 bits")
    packed = np.concatenate([runs.ravel(), np.cumsum(lengths) - lengths, np.array([-1])])
    memory = _uploaded(packed.astype(np.int64, copy=False), device, stream)
    return DeviceRuns(device, len(runs), total, int(lengths.max(initial=0)), memory)


def upload_regions(
    regions: Sequence[tuple[int, int]], *, device: int = 0, stream: int = 0
) -> DeviceRegions:
    """Copy a pool's regions, (device address, length in bytes) in layout order, to a device."""
    for address, length in regions:
        if not 0 <= address <= address + length < 1 << 64 or not 0 <= length < 1 << 63:
            raise ConfigError(f"region at {address:#x} of {length} bytes leaves the address space")
    packed = np.array(
        [address for address, _ in regions] + [length for _, length in regions], np.uint64
    )
    return DeviceRegions(device, len(regions), _uploaded(packed, device, stream))


def descriptors(outline: DeviceOutline, *, stream: int = 0) -> DeviceRuns:
    """Enqueue the kernel that makes an outline's runs.

    Ids are read when the kernel runs. An id outside its pool gives a run of length 0 and a bad row.

    Returns: runs in memory of their own, the caller's to close.
    Raises:  CudaError.
    """
    rows = outline.rows
    memory = DeviceMemory(rows * (_RUN_BYTES + _WORD) + _WORD, outline.device)
    runs = DeviceRuns(outline.device, rows, outline.length_bytes, outline.longest_bytes, memory)
    try:
        memory.fill(0xFF, stream=stream)
        load_cuda().call(
            "descriptors",
            outline.device,
            stream,
            OutlineStruct(
                outline.entries,
                outline.spans,
                outline.source_ids,
                outline.destination_ids,
                outline.spans_count,
                rows,
            ),
            runs.runs,
            runs.staging_offsets,
            runs.first_bad,
        )
    except BaseException:
        memory.close()
        raise
    return runs


def gather(
    runs: DeviceRuns,
    regions: DeviceRegions,
    staging: Staging,
    *,
    rows: range | None = None,
    stream: int = 0,
) -> None:
    """Enqueue copies from the runs' source side in `regions` into staging.

    Args:    rows: those to copy, in steps of 1; None: all. They must lie in staging whole.
    Raises:  ConfigError: rows beyond the runs, or things of several devices. CudaError.
    """
    _copies("gather", runs, regions, staging, rows, stream)


def scatter(
    runs: DeviceRuns,
    regions: DeviceRegions,
    staging: Staging,
    *,
    rows: range | None = None,
    stream: int = 0,
) -> None:
    """Enqueue copies from staging to the runs' destination side in `regions`; see `gather`."""
    _copies("scatter", runs, regions, staging, rows, stream)


def _copies(
    function: str,
    runs: DeviceRuns,
    regions: DeviceRegions,
    staging: Staging,
    rows: range | None,
    stream: int,
) -> None:
    rows = range(runs.rows) if rows is None else rows
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= runs.rows:
        raise ConfigError(f"rows are {rows}; there are {runs.rows}, taken in steps of 1")
    if runs.device != regions.device:
        raise ConfigError(f"runs are on device {runs.device}, regions on {regions.device}")
    if not 0 <= staging.length_bytes < 1 << 63 or not 0 <= staging.first_byte < 1 << 63:
        raise ConfigError(
            f"staging holds {staging.length_bytes} bytes from byte {staging.first_byte} on; both "
            "must be 0 or more, and 63 bits"
        )
    copies = CopiesStruct(
        runs.runs + rows.start * _RUN_BYTES,
        runs.staging_offsets + rows.start * _WORD,
        len(rows),
        regions.memory.address,
        regions.memory.address + regions.count * _WORD,
        regions.count,
        staging.address,
        staging.length_bytes,
        staging.first_byte,
        runs.longest_bytes,
    )
    load_cuda().call(function, runs.device, stream, copies, runs.first_bad)


def _uploaded(
    array: NDArray[np.int64] | NDArray[np.uint64], device: int, stream: int
) -> DeviceMemory:
    memory = DeviceMemory(max(array.nbytes, _WORD), device)
    try:
        memory.upload(array, stream=stream)
    except BaseException:
        memory.close()
        raise
    return memory

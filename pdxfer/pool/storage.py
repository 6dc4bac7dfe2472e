"""The memory behind a layout, and strided tensors of it.

A host pool lies in one memfd that an agent maps too; anything else (a GPU) is one plain tensor.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdxfer.errors import ConfigError, ResourceError
from pdxfer.memory import MemoryRange, SharedMemory, allocate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdxfer.layout import KVLayout, Plane

REGION_ALIGN_BYTES: Final = 4096
"""Regions of a device pool that share a memory begin at multiples of it."""


class Storage:
    """Memory for every region of a layout, one after the other.

    Ownership: memory that was not given is this object's; `close` frees it. Tensors keep it mapped:
    `close` raises `BufferError` while one lives.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: str = "cpu",
        memory: SharedMemory | torch.Tensor | None = None,
        align_bytes: int = REGION_ALIGN_BYTES,
        pin: bool = False,
    ) -> None:
        """Take or make the memory, all zero where it is made.

        Args:
            layout: says how long its regions are.
            device: of the tensors.
            memory: to be used instead: shared memory of the host, or a uint8 tensor on `device`.
            align_bytes: regions begin at multiples of it.
            pin: register host memory with the GPU; nothing where there is none.

        Raises:
            ConfigError: `memory` is too small or not of this device.
            ResourceError: not enough memory, or it cannot be pinned.
        """
        self._lengths = [region.length_bytes for region in layout.regions]
        self._offsets, self.length_bytes = _place(self._lengths, align_bytes)
        self.device, kind = _checked_device(device)
        _check_memory(memory)
        self._owned = memory is None and kind == "cpu"
        self._memory = allocate(self.length_bytes) if self._owned else memory
        self._raw: torch.Tensor | None = None
        self._unpin: Callable[[], object] | None = None
        self.open()
        if pin:
            self._pin()

    @property
    def raw(self) -> torch.Tensor:
        """All bytes, uint8.

        Raises:  ConfigError: the memory was closed.
        """
        if self._raw is None:
            raise ConfigError("the pool is closed")
        return self._raw

    @property
    def pinned(self) -> bool:
        """Registered with the GPU."""
        return self._unpin is not None

    def open(self) -> None:
        """Make the tensor of all bytes."""
        memory, kind = self._memory, torch.device(self.device).type
        if memory is None:
            self._raw = self._device_memory()
            return
        if isinstance(memory, torch.Tensor):
            there, has = memory.device.type, memory.numel()
        else:
            there, has = "cpu", memory.length_bytes
        if there != kind or has < self.length_bytes:
            raise ConfigError(
                f"memory has {has} bytes of {there}; a pool on device={self.device} needs "
                f"{self.length_bytes} bytes there"
            )
        if isinstance(memory, SharedMemory):
            memory = torch.from_numpy(np.frombuffer(memory.buffer, np.uint8))
        self._raw = memory[: self.length_bytes]

    def ranges(self) -> tuple[MemoryRange, ...]:
        """One range a region, in order; no tensor, so `close` does not mind them."""
        if isinstance(self._memory, SharedMemory):
            return tuple(map(self._memory.range, self._offsets, self._lengths))
        base = self.raw.data_ptr()
        return tuple(
            MemoryRange(base + offset, length, self._raw)
            for offset, length in zip(self._offsets, self._lengths, strict=True)
        )

    def cells(self, plane: Plane, pages: int, dtype: torch.dtype) -> torch.Tensor:
        """The cells of a plane, `[pages, rows, heads, elements of a cell]` of `dtype`; a view.

        Raises:  ConfigError: an offset or stride that is no multiple of the element.
        """
        item = dtype.itemsize
        places = (
            plane.base,
            plane.page_stride,
            plane.row_stride,
            plane.head_stride,
            plane.cell_bytes,
        )
        if any(place % item for place in places):
            raise ConfigError(
                f"plane {plane.group}/{plane.part}/{plane.layer} has offset, strides and cell of "
                f"{places} bytes, which are no multiples of the {item} bytes of {dtype}"
            )
        shape = (pages, plane.rows, plane.heads, plane.cell_bytes // item)
        strides = (*(place // item for place in places[1:4]), 1)
        return self._view(dtype, (plane.region, plane.base), shape, strides)

    def block(self, region: int, base: int, stride: int, shape: tuple[int, int]) -> torch.Tensor:
        """Bytes `[pages, length]`, pages `stride` apart; a view."""
        return self._view(torch.uint8, (region, base), shape, (stride, 1))

    def strided(
        self,
        dtype: torch.dtype,
        offset_bytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        """A view of the memory; strides are in elements, which `offset_bytes` is a multiple of."""
        item = dtype.itemsize
        whole = self.raw[: self.length_bytes // item * item].view(dtype)
        return whole.as_strided(shape, strides, whole.storage_offset() + offset_bytes // item)

    def offset(self, region: int, base: int) -> int:
        """Where a byte of a region lies in the memory."""
        return self._offsets[region] + base

    def address(self, region: int, offset: int) -> int:
        """Address of a byte of a region, in this process."""
        return self.raw.data_ptr() + self.offset(region, offset)

    def close(self) -> None:
        """Let go of the memory; free it if it is this object's. Idempotent.

        Raises: BufferError while a tensor of it lives; nothing has changed then.
        """
        if self._raw is None:
            return
        self._raw = None
        pinned = self._unpin is not None
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._owned and isinstance(self._memory, SharedMemory):
            try:
                self._memory.close()
            except BufferError:
                self.open()
                if pinned:
                    self._pin()
                raise

    def _view(
        self,
        dtype: torch.dtype,
        place: tuple[int, int],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        """A view of a region; `place` is (region, offset in bytes), strides are in elements.

        Raises:  ConfigError: the region begins at no multiple of the element.
        """
        offset = self.offset(*place)
        if offset % dtype.itemsize:
            raise ConfigError(
                f"region {place[0]} has elements of {dtype} at byte {offset} of the memory, which "
                f"is no multiple of their {dtype.itemsize} bytes"
            )
        return self.strided(dtype, offset, shape, strides)

    def _device_memory(self) -> torch.Tensor:
        try:
            return torch.zeros(self.length_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"cannot allocate {self.length_bytes} bytes on device={self.device}: {error}; make "
                "the pool smaller"
            ) from error

    def _pin(self) -> None:
        if not isinstance(self._memory, SharedMemory) or not torch.cuda.is_available():
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.raw.data_ptr()
        status = int(runtime.cudaHostRegister(address, self.length_bytes, 0))
        if status != 0:
            raise ResourceError(
                f"cannot pin {self.length_bytes} bytes of host memory: CUDA error {status}; raise "
                "the locked-memory limit or pass pin_memory=False"
            )
        self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)


def _checked_device(device: object) -> tuple[str, str]:
    """The name and the kind of a device.

    Raises:  ConfigError: torch knows none of this name.
    """
    refusal = ConfigError(
        f"device={device!r}: must be the name of a device of torch, such as 'cpu' or 'cuda:0'"
    )
    if not isinstance(device, (str, torch.device)):
        raise refusal
    try:
        return str(device), torch.device(device).type
    except RuntimeError as error:
        raise refusal from error


def _check_memory(memory: object) -> None:
    if memory is not None and not isinstance(memory, (SharedMemory, torch.Tensor)):
        raise ConfigError(
            f"memory is {type(memory).__name__}; it must be what pdxfer.memory.allocate gives, a "
            "uint8 tensor on the pool's device, or None"
        )


def _place(lengths: list[int], align_bytes: int) -> tuple[list[int], int]:
    """Offsets of regions in one memory, and its length."""
    offsets, end = [], 0
    for length in lengths:
        start = -(-end // align_bytes) * align_bytes
        offsets.append(start)
        end = start + length
    return offsets, end

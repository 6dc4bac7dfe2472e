"""Torch tensors that lie in a memfd from the start: how an engine's own cache gets shared memory.

Not imported by the rest of this package: only those who use it need torch, and it is loaded first
when `shared_tensors` is called.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pdxfer.errors import ConfigError, ResourceError
from pdxfer.memory.available import check_available
from pdxfer.memory.shared import SEALS, MemoryRange, map_present

if TYPE_CHECKING:
    import torch

_FACTORIES = (
    "empty.memory_format",
    "empty_strided.default",
    "zeros.default",
    "ones.default",
    "full.default",
    *(f"new_{kind}.default" for kind in ("empty", "empty_strided", "zeros", "ones", "full")),
    *(f"{kind}_like.default" for kind in ("empty", "zeros", "ones", "full")),
)


class SharedTensors:
    """The tensors made inside one `shared_tensors` block, and the memfd that they lie in.

    Ownership: the memory of all of them lives until this object and its ranges are gone, and each
    tensor. A client that attached them needs this object, or a range, as long as it is open.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("pdxfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memfd, which is sealed when the block ends."""
        self.length_bytes = 0
        """Length of the memfd so far."""
        self.sealed = False
        self._places: list[tuple[int, mmap.mmap]] = []
        """For each tensor: where in the memfd it begins, and its mapping."""
        weakref.finalize(self, os.close, self.fd)

    def take(self, length_bytes: int) -> mmap.mmap:
        """A mapping of `length_bytes` more zero bytes, in pages of its own.

        Raises: ResourceError: there is not that much memory; nothing has changed then.
        """
        check_available(length_bytes)
        offset = self.length_bytes
        end = offset + length_bytes + -length_bytes % mmap.PAGESIZE
        try:
            os.ftruncate(self.fd, end)
            buffer = map_present(self.fd, length_bytes, offset)
        except OSError as error:
            os.ftruncate(self.fd, offset)
            raise ResourceError(
                f"a tensor of {length_bytes} bytes: cannot allocate shared memory: {error.strerror}"
            ) from error
        self.length_bytes = end
        self._places.append((offset, buffer))
        return buffer

    def seal(self) -> None:
        """End the block: from here on the memfd keeps its size. Idempotent."""
        if not self.sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.sealed = True

    def range(self, tensor: torch.Tensor) -> MemoryRange:
        """Where a tensor lies, from its lowest to its highest byte; a view of one made here too.

        Raises: ConfigError: it does not lie in this memory, has no bytes, or the block has not
            ended yet.
        """
        if not self.sealed:
            raise ConfigError(
                "this shared_tensors() block has not ended: its memory may still grow, and a "
                "daemon takes only what cannot; ask for ranges behind it"
            )
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        length = (last + 1) * tensor.element_size() if tensor.numel() else 0
        address = tensor.data_ptr()
        for start, buffer in self._places:
            offset = address - _address(buffer)
            if offset >= 0 and 0 < length <= len(buffer) - offset:
                return MemoryRange(address, length, self, self.fd, start + offset)
        raise ConfigError(
            f"a tensor of shape={tuple(tensor.shape)} dtype={tensor.dtype} device={tensor.device} "
            "does not lie in this shared memory: make it inside the block with torch.empty, zeros, "
            "ones or full, or their new_ and _like forms, on the CPU and not pinned; memory that "
            "exists gets a memfd by pdxfer.memory.adopt"
        )

    def ranges(self, tensors: Sequence[torch.Tensor]) -> list[MemoryRange]:
        """`range` of each: the `memory` of a cache whose layout has a region a tensor."""
        return [self.range(tensor) for tensor in tensors]


@contextlib.contextmanager
def shared_tensors() -> Iterator[SharedTensors]:
    """Inside the block, what torch makes anew on the CPU lies in a memfd that a daemon can map.

    For an engine's allocation of its cache, whose code is not ours to change:

        with shared_tensors() as made:
            tensors = engine.allocate_kv_cache()
        cache.memory = made.ranges(tensors)

    Made so are the results of `empty`, `empty_strided`, `zeros`, `ones`, `full` and of their `new_`
    and `_like` forms, of every shape, stride and dtype; all pages are present. All else is torch's
    as ever: results of arithmetic, copies, other devices, pinned memory. So keep the block to the
    allocation: what it makes stays in memory until all of it is gone. A forked child does not
    inherit the memory: it faults where it touches it.

    Raises: ResourceError, where a tensor is made that there is no memory for.

    Threads: only what the block's own thread makes is shared.
    """
    made = SharedTensors()
    try:
        with _mode(made):
            yield made
    finally:
        made.seal()


def _mode(made: SharedTensors) -> contextlib.AbstractContextManager[object]:
    """The torch mode that sees each operation of the block before torch does it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    names = (name.split(".") for name in _FACTORIES)
    factories = {getattr(getattr(torch.ops.aten, name), overload) for name, overload in names}

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            func: Callable[..., torch.Tensor],
            types: object,
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            options = dict(kwargs or {})
            if func in factories and _is_plain(args, options):
                shape = func(*args, **{**options, "device": "meta"})
                if shape.numel():
                    return _filled(_tensor(made, shape), str(func), args)
            return func(*args, **options)

    return cast("contextlib.AbstractContextManager[object]", Mode())  # type: ignore[no-untyped-call]


def _is_plain(args: Sequence[object], options: Mapping[str, object]) -> bool:
    """Whether the result would be dense and on the host, and not pinned there."""
    import torch

    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    device = options.get("device") or (like.device if like is not None else "cpu")
    layout = options.get("layout") or (like.layout if like is not None else torch.strided)
    return (
        torch.device(cast("str", device)).type == "cpu"
        and layout is torch.strided
        and not options.get("pin_memory")
    )


def _tensor(made: SharedTensors, shape: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros in shared memory, of the size, strides and dtype of `shape`."""
    import torch

    elements = 1 + sum((n - 1) * step for n, step in zip(shape.shape, shape.stride(), strict=True))
    buffer = made.take(elements * shape.element_size())
    # By numpy, which keeps the mapping exported: torch.frombuffer would not.
    flat = torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(shape.dtype)
    return flat.as_strided(shape.shape, shape.stride())


def _filled(tensor: torch.Tensor, factory: str, args: Sequence[object]) -> torch.Tensor:
    """Shared memory begins as zeros; what else was asked for is written."""
    if "full" in factory:
        tensor.fill_(cast("Any", args[-1]))
    elif "ones" in factory:
        tensor.fill_(1)
    return tensor


def _address(buffer: mmap.mmap) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)

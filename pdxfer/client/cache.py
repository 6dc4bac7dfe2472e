"""What a client attaches, and how its memory reaches the agent."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from pdxfer import limits
from pdxfer.errors import ConfigError
from pdxfer.local.messages import MemoryInfo
from pdxfer.memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdxfer.layout import KVLayout
    from pdxfer.memory import MemoryRange


class Cache(Protocol):
    """What a client attaches; a pool is one."""

    @property
    def layout(self) -> KVLayout:
        """What the bytes mean."""
        ...

    @property
    def memory(self) -> Sequence[MemoryRange]:
        """One range per region of the layout, in order."""
        ...


class EmbeddedAgent(Protocol):
    """An agent on a thread of this process."""

    @property
    def socket_path(self) -> str:
        """Where it listens, as a daemon would."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it has closed its lanes: it reads and writes no page any more."""
        ...


_HELD: weakref.WeakKeyDictionary[EmbeddedAgent, dict[int, list[object]]] = (
    weakref.WeakKeyDictionary()
)
"""Memory that an embedded agent may still write, by agent and client."""


def hold_cache(agent: EmbeddedAgent, client: object, cache: Cache) -> None:
    """Keep the memory of an embedded client mapped, since its agent writes that very mapping.

    Exports of shared memory are held too, so that closing it raises instead of leaving the agent
    with addresses of nothing. (A daemon has a mapping of its own.) Held until `release_cache`, or
    until the agent is gone.
    """
    owners = (part.owner for part in cache.memory)
    exports = [memoryview(owner.buffer) for owner in owners if isinstance(owner, SharedMemory)]
    _HELD.setdefault(agent, {})[id(client)] = [cache, *exports]


def release_cache(agent: EmbeddedAgent, client: object) -> None:
    """The client has closed, and no transfer of it was left."""
    _HELD.get(agent, {}).pop(id(client), None)


def describe_memory(cache: Cache, *, embedded: bool) -> tuple[list[MemoryInfo], list[int]]:
    """The cache's memory as the agent gets it, and the descriptors that go with it, each once.

    Raises: ConfigError when it does not fit the layout, or a daemon could not map it.
    """
    regions = cache.layout.regions
    if len(cache.memory) != len(regions):
        raise ConfigError(
            f"cache.memory has {len(cache.memory)} ranges, its layout {len(regions)} regions"
        )
    fds: list[int] = []
    infos = []
    for index, (part, region) in enumerate(zip(cache.memory, regions, strict=True)):
        if part.length_bytes < region.length_bytes:
            raise ConfigError(
                f"cache.memory[{index}] has {part.length_bytes} bytes, region {index} of its "
                f"layout {region.length_bytes}"
            )
        infos.append(_memory_info(index, part, region.length_bytes, fds, embedded=embedded))
    if len(fds) > limits.LOCAL_FDS_MAX:
        raise ConfigError(
            f"cache.memory lies in {len(fds)} memfds, at most {limits.LOCAL_FDS_MAX} can be handed "
            "over: put several regions into one pdxfer.memory.allocate"
        )
    return infos, fds


def _memory_info(
    index: int, part: MemoryRange, length_bytes: int, fds: list[int], *, embedded: bool
) -> MemoryInfo:
    if embedded:
        return MemoryInfo(kind="address", address=part.address, length_bytes=length_bytes)
    if part.fd < 0:
        raise ConfigError(
            f"cache.memory[{index}] is not in a memfd, so a daemon cannot map it: use memory from "
            "pdxfer.memory.allocate, tensors from pdxfer.memory.tensors, put a memfd under memory "
            "that exists with pdxfer.memory.adopt, or use an agent inside this process "
            "(pdxfer.embedded)"
        )
    if part.fd not in fds:
        fds.append(part.fd)
    return MemoryInfo(
        kind="memfd",
        length_bytes=length_bytes,
        offset_bytes=part.offset_bytes,
        fd_index=fds.index(part.fd),
    )

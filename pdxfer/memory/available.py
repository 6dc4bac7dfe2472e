"""How much memory there is to be had: of the host, and of the containers around this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdxfer.errors import ConfigError, ResourceError

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""What of a cgroup's memory the kernel takes back before it kills; shared memory is none of it."""


def available_bytes() -> int:
    """Bytes of memory that the kernel can give this process without swapping or killing it.

    What the host has, and no more than is left of the limit of any cgroup (version 2) around this
    process: that of its container.

    Raises:  ConfigError: the kernel does not say.
    """
    return min([_host_available_bytes(), *_cgroups_available_bytes()])


def _host_available_bytes() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        raise ConfigError(f"cannot read {_MEMINFO}: {error.strerror}") from error
    raise ConfigError(f"{_MEMINFO} does not say how much memory is available")


def _cgroups_available_bytes() -> Iterator[int]:
    """What is left of each limit; nothing where no limit can be read."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), "")
    place = _CGROUPS / own.lstrip("/")
    for folder in (place, *place.parents):
        if not folder.is_relative_to(_CGROUPS):
            return
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # the root has no limit, and a controller may be off
        if limit != "max":
            counts = dict(line.split() for line in stat)
            reclaimable = sum(int(counts.get(name, 0)) for name in _RECLAIMABLE)
            yield max(int(limit) - used + reclaimable, 0)


def check_available(length_bytes: int) -> None:
    """Refuses what would end in the kernel's killer while its pages are touched."""
    free = available_bytes()
    if length_bytes > free:
        raise ResourceError(
            f"length_bytes={length_bytes}: cannot allocate shared memory: {length_bytes} bytes are "
            f"needed, {free} are available. Make the cache smaller, end what else uses memory, or "
            "raise the memory limit of the container",
            fields={"length_bytes": str(length_bytes), "available_bytes": str(free)},
        )

"""Which machine and process namespace an agent is in, as far as the kernel tells."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """Equal only for processes of one boot that see each other's process ids.

    The boot id alone is equal in every container of a machine; a process id means something only
    within one pid namespace, and the cma lane writes by process id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"

"""A worker process that holds one transfer until it is killed.

Usage: `python -m tests.support.holder ROLE SOCKET ROOM [PREFILL]`.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from pdxfer.client import DecodeClient, PrefillClient
from tests.support.caches import PAGE, SeededCache, small


def main(role: str, socket_path: str, room: str, *prefill: str) -> None:
    """Attach, start the room's transfer, say so, sleep."""
    cache = SeededCache(small(), 1)
    if role == "prefill":
        client = PrefillClient(socket_path, cache, instance="holder")
        client.send(int(room), np.arange(1, 3), tokens=4 * PAGE, last=False)
        print(client.addresses[0], flush=True)
    else:
        decode = DecodeClient(socket_path, cache, instance="holder")
        decode.receive(int(room), prefill[0], np.arange(1, 5), tokens=4 * PAGE)
        print("received", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])

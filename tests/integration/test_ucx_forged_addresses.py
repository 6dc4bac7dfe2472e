"""Forged lane addresses with a good checksum, given to another process that holds a real engine.

Run as a script, this file is that process: it connects to each address that a line brings, and
answers `opened` or `error ...`.
"""

import random
import struct
import subprocess
import sys
import zlib

import pytest

from pdxfer.fabric.base import PathOpened
from pdxfer.fabric.ucx import UcxFabric
from pdxfer.fabric.ucx_loader import ucx_available

AVAILABLE, WHY = ucx_available()
pytestmark = [pytest.mark.ucx, pytest.mark.skipif(not AVAILABLE, reason=WHY)]
FORGED = 300
WORKER_AT = 20
"""Of a packed lane address: magic, checksum, UCX's major and minor, length; then UCX's bytes."""
KEPT_BYTES = 4
"""At the end of UCX's bytes on tcp: port and release. A forged port is somebody else's."""


def forge(address, rng):
    (length,) = struct.unpack_from("<I", address, WORKER_AT - 4)
    worker = bytearray(address[WORKER_AT : WORKER_AT + length - KEPT_BYTES])
    kept = address[WORKER_AT + length - KEPT_BYTES : WORKER_AT + length]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(worker)) if worker else 0
        match rng.randrange(4):
            case 0:
                worker[at : at + 1] = rng.randbytes(1)
            case 1:
                del worker[at:]
            case 2:
                del worker[at : at + 1]
            case _:
                worker[at:at] = rng.randbytes(rng.randrange(1, 9))
    said = bytes(worker) + kept
    body = address[8 : WORKER_AT - 4] + struct.pack("<I", len(said)) + said
    body += address[WORKER_AT + length :]
    return address[:4] + struct.pack("<I", zlib.crc32(body)) + body


def test_forged_addresses_do_not_end_the_process_that_is_told_them():
    rng = random.Random(1)
    receiver = UcxFabric("tcp", net_device="lo")
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address = receiver.open_receiver(b"P" * 16)
        answers = []
        for _ in range(FORGED):
            print(forge(address, rng).hex(), file=child.stdin, flush=True)
            answers.append(child.stdout.readline())
            assert answers[-1], f"it ended with {child.wait(10)}"
        assert sum("UCX worker address" in answer for answer in answers) > FORGED // 3
        receiver.close_receiver(b"P" * 16)
        print(receiver.open_receiver(b"P" * 16).hex(), file=child.stdin, flush=True)
        assert child.stdout.readline() == "opened\n"
    finally:
        child.kill()
        child.communicate()
        receiver.close()


def serve():
    sender = UcxFabric("tcp", net_device="lo")
    for number, line in enumerate(sys.stdin):
        forged = number < FORGED
        sender.connect(number.to_bytes(16, "little"), bytes.fromhex(line), 0.05 if forged else 10.0)
        opened = None
        while opened is None:
            sender.wait(1.0)
            opened = next((e for e in sender.take_events() if isinstance(e, PathOpened)), None)
        print(f"error {opened.error}" if opened.error else "opened", flush=True)


if __name__ == "__main__":
    serve()

"""Where UCX lanes listen: on the address that is bound, of its family, and nowhere else."""

import ipaddress
import os
import time

import pytest

from pdxfer.agent.config import AgentConfig
from pdxfer.agent.host import device_addresses
from pdxfer.agent.run import lanes_of
from pdxfer.fabric.base import PathOpened
from pdxfer.fabric.ucx_loader import ucx_available

AVAILABLE, WHY = ucx_available()
HAS_IPV6 = ("lo", ipaddress.ip_address("::1")) in device_addresses()
pytestmark = [pytest.mark.ucx, pytest.mark.skipif(not AVAILABLE, reason=WHY)]
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6 loopback address")
SENDER, RECEIVER = b"P" * 16, b"D" * 16


def listening():
    """Addresses on which sockets of this process listen for tcp."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            for fields in list(map(str.split, lines))[1:]:
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    words = bytes.fromhex(fields[1].partition(":")[0])
                    raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    found.append(str(ipaddress.ip_address(raw)))
    return found


def made(lane, bind, role="decode"):
    return lanes_of(AgentConfig(role=role, socket_path="none", bind=bind))(lane)


@pytest.mark.parametrize("lane", ["tcp", "cma"])
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_lanes_listen_on_the_address_that_is_bound(lane, host):
    bind = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
    before = listening()
    receiver, sender = made(lane, bind), made(lane, bind, "prefill")
    try:
        address = receiver.open_receiver(SENDER)
        added = listening()
        for one in before:
            added.remove(one)
        assert added == [host]
        sender.connect(RECEIVER, address, 10.0)
        assert opened(sender).error == ""
    finally:
        sender.close()
        receiver.close()


@needs_ipv6
def test_two_sides_of_different_families_are_told_so():
    receiver, sender = made("tcp", "tcp://[::1]:0"), made("tcp", "tcp://127.0.0.1:0", "prefill")
    try:
        sender.connect(RECEIVER, receiver.open_receiver(SENDER), 10.0)
        error = opened(sender).error
        assert "the peer's lane listens on inet6 and this one on inet;" in error
        assert "bind addresses of one family on both sides" in error
    finally:
        sender.close()
        receiver.close()


def opened(sender):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        sender.wait(0.5)
        for event in sender.take_events():
            if isinstance(event, PathOpened):
                return event
    raise AssertionError("no PathOpened")

"""Which machine, process namespace and network device an agent is on, as the kernel tells."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from functools import cache
from pathlib import Path

from pdxfer.errors import ConfigError

_SIOCGIFADDR = 0x8915


@cache
def host_id() -> str:
    """Equal only for processes of one boot that see each other's process ids.

    The boot id alone is equal in every container of a machine; a process id means something only
    within one pid namespace, and the cma lane writes by process id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def device_of(bind: str) -> str:
    """The network device that has the address of `bind` (`tcp://host:port`).

    Returns: its name; empty for a wildcard address: every device.

    Raises:
        ConfigError: no device has it.
    """
    host = bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("*", "0.0.0.0", "::", ""):
        return ""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"bind={bind!r}: {host} has no address: {error.strerror}") from error
    for _, _, _, _, endpoint in found:
        wanted = ipaddress.ip_address(str(endpoint[0]).partition("%")[0])
        if wanted.is_loopback:
            return "lo"
        for name, address in _addresses():
            if address == wanted:
                return name
    raise ConfigError(
        f"bind={bind!r}: no network device has the address of {host}; bind an address of this "
        "machine, or name the device with net_device"
    )


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # a device without an IPv4 address
            found.append((name, ipaddress.IPv4Address(answer[20:24])))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found

"""Which machine, process namespace and network device an agent is on, as the kernel tells."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pdxfer.errors import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_FAMILY = {4: "inet", 6: "inet6"}


@cache
def host_id() -> str:
    """Equal only for processes of one boot that see each other's process ids.

    The boot id alone is equal in every container of a machine; a process id means something only
    within one pid namespace, and the cma lane writes by process id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True, slots=True)
class LaneNetwork:
    """Where the UCX lanes of an agent listen."""

    device: str
    """Name of the network device; empty: every device."""
    family: str
    """`inet` or `inet6`; empty: the IPv4 address of a device, where it has one, else IPv6."""


def lane_network(bind: str, advertise: str = "", net_device: str = "") -> LaneNetwork:
    """Where the UCX lanes listen, so that it is the address that was bound or advertised.

    UCX listens on the first address of a family that a device has, and on no other.

    Args:
        bind: `tcp://host:port`.
        advertise: host told to peers where `bind` is a wildcard address; one that is of no device
            here (it may be translated on its way) changes nothing.
        net_device: a device that was named; another one than that of `bind` counts alone.

    Raises:
        ConfigError: no device has the address of `bind`, or it is not the first of its device.
    """
    setting, host = "bind", bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("*", "0.0.0.0", "::", ""):
        setting, host = "advertise", advertise.strip("[]")
    addresses = device_addresses()
    found = _find(host, addresses) if host else None
    if net_device:
        named = found is not None and found[0] == net_device
        return LaneNetwork(net_device, _FAMILY[found[1].version] if named and found else "")
    if found is not None:
        device, address = found
        _check_first(setting, host, address, device, addresses)
        return LaneNetwork(device, _FAMILY[address.version])
    if setting == "advertise":
        return LaneNetwork("", "")
    raise ConfigError(
        f"bind={bind!r}: no network device has the address of {host}; bind an address of this "
        "machine, or name the device with net_device"
    )


def _find(host: str, addresses: list[tuple[str, _Address]]) -> tuple[str, _Address] | None:
    """The device that has an address of `host`, and the address; IPv4 first, as the daemons."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return None
    wanted = [ipaddress.ip_address(str(endpoint[0]).partition("%")[0]) for *_, endpoint in found]
    for address in sorted(wanted, key=lambda one: one.version):
        device = next((name for name, one in addresses if one == address), "")
        if not device and address.is_loopback:
            device = "lo"  # which has all of 127.0.0.0/8
        if device:
            return device, address
    return None


def _check_first(
    setting: str, host: str, address: _Address, device: str, addresses: list[tuple[str, _Address]]
) -> None:
    of_family = [
        one
        for name, one in addresses
        if name == device
        and one.version == address.version
        and not (one.version == 6 and one.is_link_local)
    ]
    if of_family[:1] == [address]:
        return
    first = str(of_family[0]) if of_family else "missing"
    family = "IPv4" if address.version == 4 else "IPv6"
    raise ConfigError(
        f"{setting}={host!r}: the UCX lanes cannot listen on {address}: UCX listens on the first "
        f"{family} address of a device that is not link-local, which is {first} on {device}; use "
        f"{first if of_family else 'another address'}, or name the device with net_device, then "
        f"the lanes listen on its first address whatever {setting} is",
        fields={setting: host, "device": device, "first": first},
    )


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs`, down to the address."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def device_addresses() -> list[tuple[str, _Address]]:
    """(device, address) of this machine, in the order in which UCX looks for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"getifaddrs: {os.strerror(error)}")
    found: list[tuple[str, _Address]] = []
    try:
        entry = first
        while ctypes.cast(entry, ctypes.c_void_p).value:
            at = entry.contents
            family = (
                int.from_bytes(ctypes.string_at(at.address, 2), sys.byteorder) if at.address else 0
            )
            if family == socket.AF_INET:
                raw = ctypes.string_at(at.address, 8)[4:]
                found.append((at.name.decode(), ipaddress.IPv4Address(raw)))
            elif family == socket.AF_INET6:
                raw = ctypes.string_at(at.address, 24)[8:]
                found.append((at.name.decode(), ipaddress.IPv6Address(raw)))
            entry = at.next
    finally:
        libc.freeifaddrs(first)
    return found

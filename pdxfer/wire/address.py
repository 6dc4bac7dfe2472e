"""Addresses of prefill agents as clients pass them: `tcp://host:port`, maybe `#instance` behind it.

Pure. The part before the `#` is the control address; the part behind it names the model instance
whose workers are meant.
"""

from __future__ import annotations

import ipaddress


def canonical_address(address: str) -> str:
    """One spelling of a control address (`tcp://host:port`, maybe `#instance`).

    Two links to one prefill agent would take each other's place; names that need a name server are
    left as they are.
    """
    control, mark, instance = address.strip().partition("#")
    host, colon, port = control.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]").lower()
    if host in ("localhost", "ip4-localhost"):
        host = "127.0.0.1"
    try:
        numeric = ipaddress.ip_address(host)
    except ValueError:
        return f"tcp://{host}{colon}{port}{mark}{instance}"
    shown = f"[{numeric}]" if numeric.version == 6 else str(numeric)
    return f"tcp://{shown}:{port}{mark}{instance}"


def split_instance(address: str) -> tuple[str, str]:
    """The control address and the instance name of what a client passes as `prefill=`."""
    control, _, instance = address.partition("#")
    return control, instance

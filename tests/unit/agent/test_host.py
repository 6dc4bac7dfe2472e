"""What the kernel tells of this host."""

import asyncio
import ipaddress

import pytest

from pdxfer.agent import host
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.host import LaneNetwork, host_id, lane_network
from pdxfer.agent.run import run_agent
from pdxfer.errors import ConfigError
from pdxfer.wire.address import canonical_address


def test_host_id_is_stable_and_names_the_pid_namespace():
    assert host_id() == host_id()
    assert ":pid:[" in host_id()


@pytest.mark.parametrize(
    ("spelled", "canonical"),
    [
        ("tcp://127.0.0.1:7411", "tcp://127.0.0.1:7411"),
        ("tcp://localhost:7411#a", "tcp://127.0.0.1:7411#a"),
        ("tcp://LOCALHOST:7411", "tcp://127.0.0.1:7411"),
        ("tcp://[::1]:7411", "tcp://[::1]:7411"),
        ("tcp://[0:0:0:0:0:0:0:1]:7411#x", "tcp://[::1]:7411#x"),
        ("tcp://Node-1.cluster:7411", "tcp://node-1.cluster:7411"),
        (" tcp://10.0.0.1:1 ", "tcp://10.0.0.1:1"),
    ],
)
def test_one_spelling_of_an_address(spelled, canonical):
    assert canonical_address(spelled) == canonical


@pytest.fixture
def devices(monkeypatch):
    """A machine with two addresses of each family on a device."""
    table = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth0", "10.0.0.6"), ("lo", "::1")]
    table += [("eth0", "fe80::1"), ("eth0", "fd00::2"), ("eth0", "fd00::3"), ("eth1", "10.1.0.1")]
    found = [(name, ipaddress.ip_address(address)) for name, address in table]
    monkeypatch.setattr(host, "device_addresses", lambda: found)


@pytest.mark.parametrize(
    ("bind", "device", "family"),
    [
        ("tcp://127.0.0.1:0", "lo", "inet"),
        ("tcp://[::1]:0", "lo", "inet6"),
        ("tcp://localhost:1", "lo", "inet"),
        ("tcp://10.0.0.5:7411", "eth0", "inet"),
        ("tcp://[fd00::2]:7411", "eth0", "inet6"),
    ],
)
def test_the_lanes_listen_on_the_address_that_is_bound(devices, bind, device, family):
    assert lane_network(bind) == LaneNetwork(device, family)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_a_wildcard_is_every_device_unless_one_is_advertised(devices, bind):
    assert lane_network(bind) == LaneNetwork("", "")
    assert lane_network(bind, "10.0.0.5") == LaneNetwork("eth0", "inet")
    assert lane_network(bind, "[fd00::2]") == LaneNetwork("eth0", "inet6")
    # Translated on its way: nothing is known.
    assert lane_network(bind, "198.51.100.7") == LaneNetwork("", "")


@pytest.mark.parametrize(
    ("bind", "first"),
    [
        ("tcp://127.0.0.2:0", "127.0.0.1"),
        ("tcp://10.0.0.6:0", "10.0.0.5"),
        ("tcp://[fd00::3]:0", "fd00::2"),
        ("tcp://[fe80::1]:0", "fd00::2"),
    ],
)
def test_an_address_that_ucx_cannot_listen_on_is_refused_with_the_reason(devices, bind, first):
    with pytest.raises(
        ConfigError, match=f"cannot listen on .* which is {first} on .* use {first}"
    ):
        lane_network(bind)


def test_an_advertised_address_that_ucx_cannot_listen_on_is_refused_too(devices):
    with pytest.raises(ConfigError, match=r"advertise='10\.0\.0\.6': .* use 10\.0\.0\.5"):
        lane_network("tcp://*:0", "10.0.0.6")


def test_a_device_that_is_named_counts(devices):
    assert lane_network("tcp://127.0.0.2:0", net_device="eth1") == LaneNetwork("eth1", "")
    assert lane_network("tcp://10.9.9.9:0", net_device="eth1") == LaneNetwork("eth1", "")
    assert lane_network("tcp://[fd00::2]:0", net_device="eth0") == LaneNetwork("eth0", "inet6")
    assert lane_network("tcp://[fd00::3]:0", net_device="eth0") == LaneNetwork("eth0", "inet6")
    assert lane_network("tcp://*:0", net_device="eth1") == LaneNetwork("eth1", "")


def test_an_address_of_another_machine_is_refused_by_name(devices):
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        lane_network("tcp://198.51.100.7:1")


def test_this_machine_has_its_loopback_address():
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in host.device_addresses()


async def test_a_daemon_whose_lanes_would_listen_elsewhere_does_not_start(tmp_path):
    config = AgentConfig(role="decode", socket_path=str(tmp_path / "s"), bind="tcp://127.0.0.2:0")
    with pytest.raises(ConfigError, match=r"the UCX lanes cannot listen on 127\.0\.0\.2"):
        await run_agent(config, ready=lambda facts: None, stop=asyncio.Event())

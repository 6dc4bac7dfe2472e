"""What the kernel tells of this host."""

import pytest

from pdxfer.agent.host import device_of, host_id
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


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:1"])
def test_loopback_device(bind):
    assert device_of(bind) == "lo"


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_a_wildcard_is_every_device(bind):
    assert device_of(bind) == ""


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        device_of("tcp://198.51.100.7:1")

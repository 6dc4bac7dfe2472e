"""Addresses of agents, as settings and workers write them."""

import pytest

from pdxfer.control.socket import host_and_port
from pdxfer.errors import ConfigError


@pytest.mark.parametrize(
    "address", ["tcp://http://127.0.0.1:80", "tcp://host/path:80", "http://a:1"]
)
def test_what_is_no_host_and_port_is_told_the_form(address):
    with pytest.raises(ConfigError, match=r"prefill='.*: expected tcp://host:port"):
        host_and_port(address, "prefill")


def test_brackets_of_an_ipv6_host_are_taken_off():
    assert host_and_port("tcp://[::1]:80", "prefill") == ("::1", "80")

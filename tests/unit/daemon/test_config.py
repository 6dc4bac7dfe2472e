"""Settings: where a value comes from, which one wins, and what a wrong one is told."""

import pytest

from pdxfer.daemon import config
from pdxfer.errors import ConfigError


def write(tmp_path, text):
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    return file


def test_defaults_stand_where_nothing_is_given():
    settings = config.resolve("prefill", {}, {})
    assert settings.bind == config.DEFAULT_BIND
    assert settings.lanes == ("cma", "tcp")
    assert settings.socket_path == config.default_socket_path("prefill")


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path):
    file = write(tmp_path, 'ucx = "wheel"\nlanes = ["tcp"]\nnet_device = "lo"\n')
    environment = {"PDXFER_UCX": "system", "PDXFER_LANES": "cma"}
    settings = config.resolve("decode", {"ucx": "auto"}, environment, file)
    assert (settings.ucx, settings.lanes, settings.net_device) == ("auto", ("cma",), "lo")


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = write(tmp_path, "insecure = true\n")
    assert config.resolve("decode", {}, {"PDXFER_CONFIG": str(file)}).insecure is True


def test_lists_numbers_and_booleans_are_read_from_text():
    environment = {
        "PDXFER_LANES": "tcp, cma",
        "PDXFER_ALLOWED_UIDS": "0,1000",
        "PDXFER_DRAIN_DEADLINE_S": "2.5",
        "PDXFER_INSECURE": "true",
    }
    settings = config.resolve("prefill", {}, environment)
    assert settings.lanes == ("tcp", "cma")
    assert settings.allowed_uids == (0, 1000)
    assert settings.drain_deadline_s == 2.5
    assert settings.insecure is True


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("lane = ['tcp']", ["'lane'", "daemon.toml", "'lanes'"]),
        ("drain_deadline_s = 'soon'", ["drain_deadline_s", "'soon'", "daemon.toml"]),
        ("drain_deadline_s = -1", ["drain_deadline_s", ">= 0"]),
        ("lanes = []", ["lanes", "length"]),
        ("log_format = 'xml'", ["log_format", "'xml'", "json"]),
        ("server_key = 'x'", ["server_key", "pdxfer-decode"]),
        ("bind = [", ["daemon.toml"]),
        ("bind = tcp", ["daemon.toml", "line 1", "'bind = tcp'", "text stands in quotes"]),
        ("lanes = ['tcp', 'rdma']", ["lanes", "'rdma'", "daemon.toml", "take cma or tcp"]),
        ("advertise = 'tcp://10.0.0.5:7411'", ["advertise", "a host alone"]),
        ("client_keys = 'keys'", ["client_keys is 'keys'", "key_file is not set", "keygen"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, needles):
    with pytest.raises(ConfigError) as caught:
        config.resolve("prefill", {}, {}, write(tmp_path, text))
    assert all(needle in str(caught.value) for needle in needles), str(caught.value)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "bind", ["foo", "127.0.0.1:5", "tcp://127.0.0.1", "tcp://:5", "tcp://a:x", "ipc://x:1", ""]
)
def test_an_address_that_is_none_is_refused_by_both(role, bind):
    with pytest.raises(ConfigError) as caught:
        config.resolve(role, {"bind": bind}, {})
    assert str(caught.value).startswith(
        f"bind = {bind!r} (--bind): expected tcp://HOST:PORT, such as tcp://127.0.0.1:7411. It is: "
    )


@pytest.mark.parametrize("bind", ["tcp://*:7411", "tcp://[::1]:0", "tcp://node-1:7411"])
def test_addresses_of_any_host(bind):
    assert config.resolve("decode", {"bind": bind}, {}).bind == bind


@pytest.mark.parametrize(("role", "other"), [("prefill", "server_key"), ("decode", "client_keys")])
def test_known_keys_are_those_of_the_role(role, other, tmp_path):
    with pytest.raises(ConfigError) as caught:
        config.resolve(role, {}, {}, write(tmp_path, "zzzz = 1"))
    known = str(caught.value).partition("known are: ")[2].split(", ")
    assert known == sorted(row.name for row in config.settings_of(role))
    assert other not in known


def test_decode_shows_no_port_of_a_socket_that_it_does_not_open():
    settings = config.resolve("decode", {}, {})
    assert settings.bind == "tcp://127.0.0.1:0"
    [row] = [row for row in config.settings_of("decode") if row.name == "bind"]
    assert row.default == settings.bind
    assert "network device" in row.help


def test_a_server_key_without_a_key_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="server_key is 'x' and key_file is not set"):
        config.resolve("decode", {"server_key": "x"}, {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        config.resolve("prefill", {}, {}, tmp_path / "nowhere.toml")


def test_an_unknown_variable_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"PDXFER_LANE;.*PDXFER_LANES"):
        config.resolve("prefill", {}, {"PDXFER_LANE": "tcp"})


def test_a_variable_of_the_other_daemon_may_stand_in_a_shared_environment():
    settings = config.resolve("decode", {}, {"PDXFER_CLIENT_KEYS": "keys"})
    assert settings.client_keys == ""


def test_other_variables_are_not_ours():
    config.resolve("decode", {}, {"PATH": "/bin", "PDX": "1"})


def test_every_setting_has_help_a_flag_and_a_variable():
    for row in config.SETTINGS.values():
        assert len(row.help) > 10, row.name
        assert row.flag.startswith("--")
        assert row.variable == "PDXFER_" + row.name.upper()


def test_roles_see_their_own_settings():
    prefill = {row.name for row in config.settings_of("prefill")}
    decode = {row.name for row in config.settings_of("decode")}
    assert "client_keys" in prefill - decode
    assert "server_key" in decode - prefill


def test_the_agent_gets_every_setting_that_is_not_the_daemon_s_own():
    environment = {"PDXFER_LANES": "tcp", "PDXFER_KEY_FILE": "k", "PDXFER_CLIENT_KEYS": "c"}
    agent = config.agent_config("prefill", config.resolve("prefill", {}, environment))
    assert agent.role == "prefill"
    assert agent.lanes == ("tcp",)
    assert (agent.key_file, agent.client_keys) == ("k", "c")
    assert agent.socket_path == config.default_socket_path("prefill")

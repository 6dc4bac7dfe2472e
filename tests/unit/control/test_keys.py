"""CURVE key files: how they are made, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from pdxfer.control.keys import (
    PUBLIC_TAG,
    AllowList,
    generate,
    load_client_keys,
    load_pair,
    load_server_keys,
)
from pdxfer.errors import ConfigError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_two_files_of_one_line(tmp_path):
    directory = tmp_path / "keys"
    secret, public = generate(directory, "prefill")
    assert (secret.name, public.name) == ("prefill.key", "prefill.pub")
    assert mode(secret) == 0o600
    assert mode(directory) == 0o700
    tag, key, name = public.read_text().split()
    assert (tag, name, len(key)) == ("pdxfer-curve-public", "prefill", 40)
    pair = load_pair(secret)
    assert pair.public == key.encode() == zmq.curve_public(pair.secret)
    assert pair.secret.decode() not in repr(pair)


def test_the_mode_does_not_depend_on_the_umask(tmp_path):
    old = os.umask(0)
    try:
        assert mode(generate(tmp_path, "a")[0]) == 0o600
    finally:
        os.umask(old)


def test_keys_are_never_overwritten(tmp_path):
    secret, public = generate(tmp_path, "a")
    before = secret.read_text(), public.read_text()
    with pytest.raises(ConfigError, match=r"a\.key exists"):
        generate(tmp_path, "a")
    assert (secret.read_text(), public.read_text()) == before
    secret.unlink()
    with pytest.raises(ConfigError, match=r"a\.pub exists"):
        generate(tmp_path, "a")
    assert not secret.exists()  # no half of a pair is left


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "two words", "a\nb"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="key name"):
        generate(tmp_path, name)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="key file"):
        generate(tmp_path / "file" / "sub", "a")


@pytest.mark.parametrize("others", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path, others):
    secret, _ = generate(tmp_path, "a")
    secret.chmod(others)
    with pytest.raises(ConfigError, match=f"mode 0{others:o} .*chmod 600"):
        load_pair(secret)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "0 keys, expected 1"),
        ("# a comment\n\n", "0 keys"),
        ("pdxfer-curve-secret", "40 characters"),
        ("pdxfer-curve-secret short", "40 characters"),
        ("pdxfer-curve-secret " + "~" * 40, "40 characters"),
        ("pdxfer-curve-public " + "a" * 40 + " x", "other file of the pair"),
        ("-----BEGIN", "does not start with 'pdxfer-curve-secret'"),
        ("pdxfer-curve-secret " + "a" * 40 + "\n" + "pdxfer-curve-secret " + "b" * 40, "2 keys"),
        ("\u00e9", "not a text file of keys"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path, content, text):
    file = tmp_path / "bad.key"
    file.write_text(content, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=text):
        load_pair(file)


def test_missing_files_are_named_with_setting_value_and_remedy(tmp_path):
    secret, _ = generate(tmp_path, "a")
    missing = tmp_path / "missing"
    text = f"'{missing}': No such file or directory; "
    for call, told in (
        (lambda: load_pair(missing), f"key_file = {text}name the .key file of this daemon; `pdx"),
        (lambda: load_client_keys(secret, missing), f"server_key = {text}copy the .pub file of"),
        (lambda: load_server_keys(secret, missing), f"client_keys = {text}make the folder and "),
        (lambda: AllowList(missing), f"client_keys = {text}make the folder and copy the .pub"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(told)


def test_folders_in_place_of_files_are_named(tmp_path):
    secret, _ = generate(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"key_file = .*: Is a directory; name the \.key file"):
        load_pair(tmp_path)
    with pytest.raises(ConfigError, match=r"server_key = .*: Is a directory; copy the \.pub file"):
        load_client_keys(secret, tmp_path)


def test_a_setting_without_the_other_names_both(tmp_path):
    secret, _ = generate(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"key_file is .*a\.key' and client_keys is not set"):
        load_server_keys(secret, "")
    with pytest.raises(ConfigError, match=r"key_file is .*a\.key' and server_key is not set"):
        load_client_keys(secret, "")


def test_the_public_file_in_place_of_the_secret_is_told_so_before_its_mode(tmp_path):
    _, public = generate(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"key_file = .*other file of the pair"):
        load_pair(public)


def test_a_wrong_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "bad.pub").write_text("broken line\n")
    with pytest.raises(ConfigError) as caught:
        AllowList(tmp_path)
    text = f"client_keys = '{tmp_path}': bad.pub: key 1 does not start with 'pdxfer-curve-public'; "
    assert str(caught.value).startswith(text)


def test_client_keys_pin_the_server(tmp_path):
    secret, _ = generate(tmp_path, "decode")
    server_secret, server_public = generate(tmp_path, "prefill")
    keys = load_client_keys(secret, server_public)
    assert keys.server_public == load_pair(server_secret).public
    with pytest.raises(ConfigError, match="other file of the pair"):
        load_client_keys(secret, server_secret)


def test_an_allow_list_is_a_directory_or_a_file(tmp_path):
    secret, _ = generate(tmp_path, "server")
    directory = tmp_path / "allowed"
    _, one = generate(directory, "one")
    _, two = generate(directory, "two")
    file = tmp_path / "clients"
    file.write_text("# our nodes\n" + one.read_text() + "\n" + two.read_text())
    for path in (directory, file):
        keys = load_server_keys(secret, path)
        assert len(keys.allowed) == 2
        assert keys.allowed.name_of(one.read_text().split()[1].encode()) == "one"
        assert keys.allowed.name_of(b"x" * 40) is None


def test_an_allow_list_follows_its_files(tmp_path):
    directory = tmp_path / "allowed"
    _, one = generate(directory, "one")
    key = one.read_text().split()[1].encode()
    allowed = AllowList(directory)
    one.unlink()
    assert allowed.name_of(key) is None
    (directory / "other.pub").write_text(f"pdxfer-curve-public {key.decode()}\n")
    assert allowed.name_of(key) == "other"


def test_an_allow_list_that_breaks_lets_nobody_in(tmp_path, caplog):
    file = tmp_path / "clients"
    _, one = generate(tmp_path, "one")
    file.write_bytes(one.read_bytes())
    key = one.read_text().split()[1].encode()
    allowed = AllowList(file)
    assert allowed.name_of(key) == "one"
    file.write_text("broken line\n")
    assert allowed.name_of(key) is None
    [record] = caplog.records
    assert record.message == "allow_list_unreadable"
    assert record.reason.startswith(f"nobody may connect: client_keys = '{file}': key 1 does not")


def replaced(file, text):
    """Another file under the same name, of equal size and times."""
    old = file.stat()
    other = file.with_name("other.tmp")
    other.write_text(text)
    assert other.stat().st_size == old.st_size
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.rename(file)
    assert file.stat().st_mtime_ns == old.st_mtime_ns


def test_a_key_replaced_by_a_file_of_equal_size_and_time_is_let_in_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("pdxfer.control.keys._CLOCK_STEP_NS", -(10**15))  # nothing is read twice
    file = tmp_path / "one.pub"
    before, after = zmq.curve_keypair()[0], zmq.curve_keypair()[0]
    file.write_text(f"{PUBLIC_TAG} {before.decode()} one\n")
    allowed = AllowList(tmp_path)
    assert allowed.name_of(before) == "one"
    replaced(file, f"{PUBLIC_TAG} {after.decode()} one\n")
    assert allowed.name_of(before) is None
    assert allowed.name_of(after) == "one"


class Frozen(type(Path())):
    """A path whose stamps do not change, as within one step of the file system's clock."""

    def stat(self, **_):
        return self.now


def test_a_key_file_written_twice_within_one_step_of_the_clock_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "one.pub"
    before, after = zmq.curve_keypair()[0], zmq.curve_keypair()[0]
    file.write_text(f"{PUBLIC_TAG} {before.decode()} one\n")
    frozen = os.stat(file)
    monkeypatch.setattr(AllowList, "_files", lambda self: [Frozen(file)])
    monkeypatch.setattr(Frozen, "now", frozen, raising=False)
    allowed = AllowList(tmp_path)
    file.write_text(f"{PUBLIC_TAG} {after.decode()} one\n")
    assert allowed.name_of(before) is None
    assert allowed.name_of(after) == "one"

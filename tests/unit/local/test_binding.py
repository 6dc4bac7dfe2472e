"""Where an agent's socket cannot be made, the text says why and what to do."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from pdxfer.errors import ConfigError, ResourceError
from pdxfer.local.binding import bind


def refusal(path, kind):
    with pytest.raises(kind) as raised:
        bind(str(path), private=True)
    text = str(raised.value)
    assert text.startswith(f"socket_path={path}: ")
    assert "Success" not in text
    return text.removeprefix(f"socket_path={path}: ")


def test_a_folder_that_is_not_there(tmp_path):
    text = refusal(tmp_path / "none/agent.sock", ResourceError)
    remedy = f"there is no folder {tmp_path}/none; make it or choose another path"
    assert text == f"cannot listen: {remedy}"


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    text = refusal(tmp_path / "file/agent.sock", ConfigError)
    assert text == f"there is no folder {tmp_path}/file; make it or choose another path"


@pytest.fixture
def nobody():
    """Root may write anywhere: the test then runs as a user without rights."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_folder_without_the_right_to_write(nobody):
    with tempfile.TemporaryDirectory() as made:  # of that user, so in no folder of root's own
        folder = Path(made) / "closed"
        folder.mkdir(mode=0o500)
        text = refusal(folder / "agent.sock", ResourceError)
    assert text == (
        f"cannot listen: Permission denied in folder {folder}; give this user the right to write "
        "there"
    )


@pytest.mark.parametrize("full", [False, True])
def test_another_agent(tmp_path, full):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        others = []
        while full:
            others.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            full = others[-1].connect_ex(str(path)) == 0
        assert refusal(path, ResourceError) == (
            "another agent listens there; stop it or choose another path"
        )
        for other in others:
            other.close()
    bind(str(path), private=True).close()  # a dead one's is replaced


def test_what_is_no_socket(tmp_path):
    (tmp_path / "file").touch()
    assert "exists and is no socket; remove it" in refusal(tmp_path / "file", ConfigError)

"""The command line: every command has help, errors have exit codes."""

import pytest

from pdxfer.cli import demo
from pdxfer.cli import main as command_line
from pdxfer.cli.main import COMMANDS, main
from pdxfer.errors import ConfigError, PeerError


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"pdxfer {name}" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["transfer"])
    assert caught.value.code == 2


@pytest.mark.parametrize(("error", "code"), [(ConfigError("x = 1"), 2), (PeerError("away"), 1)])
def test_errors_are_told_in_one_line(error, code, capsys, monkeypatch):
    class Fails:
        def add_arguments(self, parser):
            pass

        def run(self, options):
            raise error

    monkeypatch.setattr(command_line, "_module", lambda name: Fails())
    assert main(["status"]) == code
    assert capsys.readouterr().err == f"pdxfer status: {error}\n"


def test_keygen_makes_a_pair(tmp_path, capsys):
    assert main(["keygen", "decode-1", "--directory", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-1.key", "decode-1.pub"]
    assert (tmp_path / "decode-1.key").stat().st_mode & 0o777 == 0o600
    assert main(["keygen", "decode-1", "--directory", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err


def test_the_negative_demo_needs_a_model_with_other_weights(capsys):
    assert main(["demo", "--model", "smollm2", "--negative"]) == 2
    assert "--negative" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--prefill-tp", "3"), "--prefill-tp is 3, and llama has 4 KV heads"),
        (("--model", "qwen3", "--decode-tp", "0"), "--decode-tp is 0, and qwen3 has 2 KV heads"),
        (("--page-size", "16:0"), "--page-size gives decode pages of 0 tokens. Take 1 or more"),
    ],
)
def test_a_demo_that_no_pool_can_be_made_for(flags, told, capsys):
    pytest.importorskip("transformers")
    assert main(["demo", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--page-size", "16"), ("--prefill-layout", "page-first"), ("--model", "gpt")]
)
def test_flags_of_the_demo_that_say_nothing(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *flags])
    assert flags[0] in capsys.readouterr().err


def test_the_demo_without_torch_names_the_checkout_and_no_package_of_an_index(capsys, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert "needs torch and transformers. In a checkout of pdxfer: make demo, or pip install" in err
    assert "'.[demo,ucx]'" in err
    assert "pdxfer[" not in err

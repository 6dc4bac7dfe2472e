"""What a process has loaded after importing a part of pdxfer."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "zmq", "uvloop", "pdxfer._ucx", "pdxfer.agent", "pdxfer.fabric"]


def loaded_by(module):
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_a_client_is_light():
    assert loaded_by("pdxfer.client").isdisjoint(HEAVY)


def test_layouts_need_numpy_and_the_core_only():
    assert loaded_by("pdxfer.layout").isdisjoint([*HEAVY, "msgspec", "msgpack"])


@pytest.mark.parametrize("module", ["pdxfer.cli.main", "pdxfer.demo.run"])
def test_a_command_starts_without_what_its_processes_load(module):
    assert loaded_by(module).isdisjoint(["torch", "transformers", "pdxfer._ucx"])


def test_an_agent_needs_no_torch():
    assert loaded_by("pdxfer.agent.run").isdisjoint(["torch", "pdxfer._ucx"])

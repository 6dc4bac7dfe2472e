"""Generated files are what their generator makes now."""

import pytest

from tests.repo import generated


@pytest.mark.parametrize("module", generated.STUBS)
def test_a_stub_says_what_the_module_has(module):
    written = (generated.ROOT / generated.STUBS[module]).read_text(encoding="utf-8")
    assert written == generated.stub(module), "run `make generated`"


def test_the_table_of_limits_is_the_limits():
    written = (generated.ROOT / "docs/limits.md").read_text(encoding="utf-8")
    assert written == generated.limits_table(), "run `make generated`"

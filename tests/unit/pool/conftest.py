import pytest


@pytest.fixture
def make():
    """Makes pools, and closes them at the end, last made first."""
    pools = []

    def build(kind, *positional, **options):
        pools.append(kind(*positional, **options))
        return pools[-1]

    yield build
    for pool in reversed(pools):
        pool.close()

"""Two processes of one group, for all tests of this folder."""

import pytest

from support.ranks import RankPool


@pytest.fixture(scope="package")
def ranks():
    pool = RankPool(2)
    yield pool
    pool.close()

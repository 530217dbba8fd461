"""Two processes of one group, for all tests of this folder."""

import pytest

from support.diffusion import ranks as told_to
from support.ranks import RankPool


@pytest.fixture(scope="package")
def ranks():
    pool = RankPool(2)
    pool.run(told_to.ready, timeout=120)
    yield pool
    pool.close()

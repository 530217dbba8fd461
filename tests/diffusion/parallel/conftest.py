"""Two processes of one group, for all tests of this folder."""

import pytest

from support.parallel import diffusion_ranks as told_to


@pytest.fixture(scope="package")
def ranks(rank_pool):
    pool = rank_pool(2)
    pool.run(told_to.ready, timeout=120)
    return pool

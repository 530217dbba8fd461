"""Schedulers advise on unusual settings; here they are quiet."""

import pytest


@pytest.fixture(autouse=True)
def no_chatter():
    import diffusers

    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    yield
    diffusers.utils.logging.set_verbosity(level)

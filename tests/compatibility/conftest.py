"""What the libraries log of odd models is kept quiet."""

import pytest


@pytest.fixture(autouse=True)
def quiet():
    import diffusers
    import transformers

    libraries = [library.utils.logging for library in (diffusers, transformers)]
    before = [logging.get_verbosity() for logging in libraries]
    for logging in libraries:
        logging.set_verbosity_error()
    yield
    for logging, level in zip(libraries, before, strict=True):
        logging.set_verbosity(level)

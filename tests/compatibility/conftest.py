"""What builds the models of the table and compares them; loaded only where this folder's tests run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


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

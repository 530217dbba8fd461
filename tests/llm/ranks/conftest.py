"""Two processes of one group, and saved models for them."""

import functools

import pytest

from support.llm.families import make
from support.llm.miniatures.family import EVEN_VOCAB


@pytest.fixture
def ranks(rank_pool):
    return rank_pool(2)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """(Folder, model) of a family, by its name; skips what this transformers does not have."""

    @functools.cache
    def save(name, **changes):
        changes = {"vocab_size": EVEN_VOCAB} | changes
        model, folder = make(name, **changes), str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folder)
        return folder, model

    return save

"""Folders of models that arrive quantized."""

import pytest

from support.llm.prequantized.models import saved_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return saved_folders(tmp_path_factory)

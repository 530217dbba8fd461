"""The pipeline that ships, and the reader of what it draws."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def model_folder():
    return HERE.parents[1] / "examples" / "models" / "tiny-sd-digits"


@pytest.fixture
def pipe(model_folder):
    """As a user loads it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(model_folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def digits():
    spec = importlib.util.spec_from_file_location("digits", HERE / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Managers over a toy engine, and what comes out of them."""

from types import SimpleNamespace

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from accel.llm.batching.manager import BatchManager
from support.llm.managers.fake_engine import VOCABULARY, FakeEngine

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5], [8, 9, 7, 9]]


class Chosen(SimpleNamespace):
    """Settings that know a temperature."""

    def request(self, prompt, max_new_tokens=None, eos_token_id=None, temperature=1.0, **unknown):
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not a setting of a request; temperature is")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: give a number of 0 or above")
        return temperature


class Model(torch.nn.Module):
    """What a manager asks of one."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(eos_token_id=None)
        self.words = torch.nn.Embedding(VOCABULARY, 2)

    def get_input_embeddings(self):
        return self.words


def make_manager(engine=None, config=None, model=None, **given) -> BatchManager:
    engine = FakeEngine() if engine is None else engine
    wanted = {"max_new_tokens": 6, "eos_token_id": -1} | given
    manager = BatchManager(
        Model() if model is None else model,
        GenerationConfig(**wanted),
        ContinuousBatchingConfig() if config is None else config,
        lambda: engine,
        lambda generation_config: Chosen(),
    )
    manager.toy = engine
    return manager


def collect(manager, count, timeout=10):
    """So many finished results, by id."""
    found = {}
    while len(found) < count:
        result = manager.get_result(timeout=timeout)
        assert result is not None, f"only {sorted(found)} came"
        if result.is_finished():
            found[result.request_id] = result
    return found

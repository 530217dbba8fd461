"""generate_batch on a GPU."""

from transformers import GenerationConfig

from support.llm.batching.engines import alone
from support.llm.gpu import replayed


def config_of(new: int, **given) -> GenerationConfig:
    return GenerationConfig(
        **({"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | given)
    )


def batch(model, prompts, new: int, **given) -> list[list[int]]:
    outputs = model.generate_batch(prompts, generation_config=config_of(new, **given))
    assert all(one.error is None for one in outputs.values())
    return [one.generated_tokens for one in outputs.values()]


def as_alone(ours, stock, prompts, new: int, times: int = 3) -> None:
    """Each request gets what stock says to it alone: eager, captured, replayed."""
    wanted = [alone(stock, prompt, new) for prompt in prompts]
    for _ in range(times):
        assert batch(ours, prompts, new) == wanted


def batched(model) -> list[dict]:
    """Rows of the report for steps of batches that are replayed."""
    return [row for row in replayed(model) if "batch" in row["inputs"].split(", ")]

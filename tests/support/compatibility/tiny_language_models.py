"""Language models of transformers, tiny and with random weights, and the calls in which they are compared."""

import inspect
from collections.abc import Callable

import torch

from support.compatibility.tiny_configs import tiny, tiny_of
from support.llm.random_weights import randomize

ROWS, TOKENS, STEPS, WORDS = 2, 11, 4, 80  # ids below WORDS mean nothing special


def build(model: str, section: str) -> torch.nn.Module:
    """model: a model_type, or the name of a class that belongs to none."""
    import transformers

    if hasattr(transformers, model):
        kind = getattr(transformers, model)
        config = tiny_of(kind.config_class)
    else:
        config = tiny(model)
        maps = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        kind = maps[section == "image-text"][type(config)]
        kind = kind[0] if isinstance(kind, tuple) else kind
    if not isinstance(config, kind.config_class):  # a decoder inside a larger model
        config = next((part for part in vars(config).values() if isinstance(part, kind.config_class)), config)
    torch.manual_seed(1)
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(1)
    heads = (model.get_output_embeddings(), model.get_input_embeddings())
    tied = None not in heads and getattr(heads[0], "weight", None) is getattr(heads[1], "weight", 0)
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        randomize(module, parameter.data, generator, 0.05 if tied else 1.0)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


def calls(model: torch.nn.Module) -> dict[str, Callable]:
    """A prompt padded on the left, steps with a cache, and a text."""
    known = inspect.signature(type(model).forward).parameters
    ids = torch.randint(3, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padding = {"attention_mask": mask} if "attention_mask" in known else {}
    if padding:
        mask[1, :4] = 0

    def prompt(model):
        found = logits(model(input_ids=ids, **padding))
        return found[mask.bool()] if found.shape[:2] == mask.shape else found

    def steps(model):
        output = model(input_ids=ids, use_cache=True)
        found = [logits(output)]
        for number in range(2):
            cache = output.past_key_values
            output = model(input_ids=ids[:, number : number + 1], past_key_values=cache, use_cache=True)
            found.append(logits(output))
        return found

    def text(model):
        return model.generate(ids, **padding, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)

    return {"prompt": prompt, "steps": steps, "text": text}


def logits(output) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output[0]

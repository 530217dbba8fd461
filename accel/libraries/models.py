"""Which objects are models and pipelines of diffusers and transformers, by names of base classes, without imports."""

from functools import lru_cache
from typing import Any

import torch

# What libraries call the dtype of what an embedding gives whose table is in fewer bits.
GIVEN = ("compute_dtype", "output_dtype", "dtype")


def is_model(obj: object) -> bool:
    """Whether obj is a model of diffusers or transformers, or of a class that somebody derived from theirs."""
    return _derives(obj, "diffusers", "ModelMixin") or _derives(obj, "transformers", "PreTrainedModel")


def is_pipeline(obj: object) -> bool:
    """Whether obj is a pipeline of diffusers, which has components."""
    return _derives(obj, "diffusers", "DiffusionPipeline", "ModularPipeline")


def pipelines_in(pipe: Any) -> list[Any]:
    """The pipeline, and those that it calls by itself, with models of its own."""
    return [pipe, *filter(is_pipeline, vars(pipe).values())]


def is_causal_lm(obj: Any) -> bool:
    """Whether obj continues text as models of transformers do: embeddings in, a head out, decoder only."""
    if not _derives(obj, "transformers", "PreTrainedModel"):
        return False
    if not obj.can_generate() or getattr(obj.config, "is_encoder_decoder", False):
        return False
    try:
        return obj.get_input_embeddings() is not None and obj.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError):  # as transformers says that there is no such place
        return False


def is_seq2seq(obj: Any) -> bool:
    """Whether obj writes a text by a decoder that looks at what an encoder gave."""
    if not _derives(obj, "transformers", "PreTrainedModel"):
        return False
    return bool(getattr(obj.config, "is_encoder_decoder", False)) and obj.can_generate()


def generates_by_itself(obj: Any) -> bool:
    """Whether obj is a language model, with an encoder or not, whose forward is a step of generate(): takes a cache."""
    if not (is_causal_lm(obj) or is_seq2seq(obj)):
        return False
    from accel.libraries.cache import cache_argument

    return cache_argument(type(obj).forward) is not None


def word_table(model: Any) -> Any:
    """The weight of a model's input embeddings, (words, width); of one in fewer bits a tensor without memory of its
    own, where it is and in the dtype that it gives.
    """
    table: Any = model.get_input_embeddings()
    held, known = getattr(table, "_parameters", {}), vars(table) if hasattr(table, "num_embeddings") else {}
    dtype = next((known[name] for name in GIVEN if isinstance(known.get(name), torch.dtype)), None)
    if dtype is None or ("weight" in held and held["weight"].is_floating_point()):
        return table.weight
    return next(table.parameters()).new_empty(1, dtype=dtype).expand(table.num_embeddings, table.embedding_dim)


def denoising_loops(pipe: Any) -> list[Any]:
    """The pipeline, or those of its blocks, that have a method `progress_bar` for their denoising loops."""
    if hasattr(type(pipe), "progress_bar"):
        return [pipe]
    found: list[Any] = []
    waiting = [getattr(pipe, "_blocks", None)]
    while waiting:
        block = waiting.pop()
        waiting += getattr(block, "sub_blocks", {}).values()
        if hasattr(type(block), "progress_bar"):
            found.append(block)
    return found


def _derives(obj: object, library: str, *names: str) -> bool:
    """Whether obj is of one of these classes of a library, or of one derived from it; imports nothing of it."""
    kind: Any = type(obj)  # mypy holds that a class has no hash
    return any(f"{library}.{name}" in _qualified_names(kind) for name in names)


@lru_cache(maxsize=256)  # whether a module is a model is asked for each, and again by every call of accel
def _qualified_names(kind: type) -> frozenset[str]:
    """The library and the name of a class and of all its bases."""
    return frozenset(f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in kind.__mro__)

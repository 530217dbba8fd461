"""Methods of a model that generate() calls: what says how a step follows from another, and hooks in their place."""

import inspect
from types import MappingProxyType

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from accel.libraries.generation import DECODING, LOOP, PREPARE, UNFINISHED, UPDATE
from accel.llm.generation.decoder import DecoderForward
from accel.patching.owner import InstanceMethod

STEPS = (LOOP, UPDATE)  # beside PREPARE, what says how a step follows another

# Another function put there later, for all models, is somebody's own.
AS_IMPORTED = MappingProxyType(
    {name: getattr(GenerationMixin, name) for name in (PREPARE, *STEPS, UNFINISHED, DECODING)}
)


def predictable(model: nn.Module) -> bool:
    """Whether the loop around this model is GenerationMixin's: one token more, one position, one 1 of the mask."""
    return stock_methods(model, PREPARE, *STEPS) and not any(name in vars(model) for name in STEPS)


def stock_methods(model: nn.Module, *names: str) -> bool:
    """Whether the model's class leaves these as GenerationMixin has them."""
    return all(getattr(type(model), name, None) is AS_IMPORTED[name] for name in names)


class MethodHook(InstanceMethod):
    """Stands in `vars(module)[name]`, in place of the method of its class."""

    def __init__(self, module: PreTrainedModel, forward: DecoderForward):
        self.module, self.forward = module, forward

    @property
    def owner(self) -> PreTrainedModel:
        return self.module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.module), self.name).__get__(self.module))

    def arguments(self, args: tuple, kwargs: dict) -> dict:
        return self.__signature__.bind(*args, **kwargs).arguments


def prepared_by_stock(model: nn.Module) -> bool:
    """Whether nobody has put a way of preparing inputs of his own over the hook."""
    return isinstance(vars(model).get(PREPARE), MethodHook)

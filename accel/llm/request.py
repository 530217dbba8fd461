"""The cache of one generate() call: a DynamicCache whose layers are a store of the size that was asked for."""

import inspect

from torch import nn

from accel.llm.cache import adopt
from accel.llm.decoder import DecoderForward

NAME = "_prepare_cache_for_generation"


class PrepareCache:
    """Stands in `vars(model)["_prepare_cache_for_generation"]`: does what the class does, then adopts the cache."""

    def __init__(self, module: nn.Module, forward: DecoderForward):
        self.module, self.forward = module, forward

    def __call__(self, *args, **kwargs):
        stock = getattr(type(self.module), NAME)
        result = stock(self.module, *args, **kwargs)
        given = inspect.signature(stock).bind(self.module, *args, **kwargs).arguments
        cache = given["model_kwargs"].get("past_key_values")
        config = given["generation_config"]
        if cache is not None and not (config.output_attentions or config.output_hidden_states):  # such calls run stock
            adopt(cache, self.forward.shapes(), wanted=given.get("max_cache_length", 0))
        return result

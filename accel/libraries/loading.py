"""How transformers loads a model: names and parts in its files, ways of quantization, ranks that divide it."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, convert_and_load_state_dict_in_model
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoQuantizationConfig,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["AutoQuantizationConfig", "no_tie_weights"]

# Of a configuration, what says nothing of what the model computes.
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config")


def own_name(model: PreTrainedModel) -> Callable[[str], str]:
    """A function from names in files to the model's names, some of which transformers has renamed."""
    renamings = [one for one in get_model_conversion_mapping(model) if type(one) is WeightRenaming]

    def found(name: str) -> str:
        for one in renamings:
            name = one.rename_source_key(name)[0]
        return name

    return found


def retied(model: PreTrainedModel) -> None:
    """Finds tied weights anew, by the present configuration."""
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


@contextmanager
def entered(before: Callable[[PreTrainedModel], None], after: Callable[[PreTrainedModel], None]) -> Iterator[str]:
    """Inside, transformers knows a quantization method by this name. before, after: of loading, with the model."""
    name = f"accel-{uuid.uuid4().hex}"

    class Method(QuantizationConfigMixin):
        def __init__(self, quant_method: str = name, **kwargs: Any) -> None:
            self.quant_method = quant_method

    class Loader(HfQuantizer):
        is_trainable = False

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
            before(model)

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> nn.Module:
            self.remove_quantization_config(model)
            after(model)
            return model

    AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name] = Method, Loader
    try:
        yield name
    finally:
        del AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name]


def among(ranks: int) -> DistributedConfig:
    """Told to `from_pretrained`, by which so many ranks divide a model as its class has planned it."""
    return DistributedConfig(tp_size=ranks, tp_plan="auto")


def distribute(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Makes the weights DTensors, as transformers does before it loads any."""
    if hasattr(model, "_resolve_parallel_plans"):
        apply_tensor_parallelism(model, mesh, model._resolve_parallel_plans(among(mesh.size()))[0])
    else:  # 5.17
        apply_tensor_parallelism(model, mesh)


def load_from(model: PreTrainedModel, tensors: Mapping[str, Any]) -> Any:
    """Loads lazy tensors by name into a model on the meta device; returns transformers' loading information."""
    mapping = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": "meta"}, dtype=model.dtype, weight_mapping=mapping)
    return convert_and_load_state_dict_in_model(model, tensors, config)[0]

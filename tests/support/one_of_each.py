"""One tiny model of each kind that is optimized, its inputs, and the name of its last layer."""

import torch

from support.diffusion.denoisers import given, transformer
from support.diffusion.tiny_models import make_unet, make_vae, unet_inputs
from support.llm.families import make, prompt


def unet():
    model = make_unet()
    return model, unet_inputs(model), "conv_out"


def vae():
    return make_vae(), {"sample": torch.randn(1, 3, 16, 16)}, "post_quant_conv"


def dit():
    return transformer("flux"), given("flux"), "proj_out"


def language_model():
    return make("llama"), {"input_ids": prompt()}, "lm_head"


MADE = (unet, vae, dit, language_model)


def run(call, inputs):
    with torch.no_grad():
        output = call(**inputs)
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))

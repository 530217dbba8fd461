"""Options that a model of images does not take: refused in words that say what it takes, the model as it was."""

import re

import pytest
from transformers import CLIPTextConfig, CLIPTextModel

import accel
from support.diffusion.tiny_models import make_unet, make_vae


def text_encoder():
    sizes = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    return CLIPTextModel(CLIPTextConfig(hidden_size=8, **sizes))


def half_unet():
    return make_unet(cross_attention_dim=16).half()


INTERVALS = (1, 0, -3, True, 2.5, "fast", "35", "0dB", "-4 dB", "100.5dB", "200dB", (3, 0))
REFUSED = [
    *(
        (make_unet, {"step_cache": one}, f"step_cache={one!r}: give None, an interval of 2 calls or more, or a quality")
        for one in INTERVALS
    ),
    (make_unet, {"step_cache": "35dB"}, "for a UNet2DConditionModel give an interval"),
    (make_vae, {"step_cache": 3}, "step_cache=3: there is no UNet and no diffusion transformer in this AutoencoderKL"),
    (
        make_vae,
        {"weights": "int8"},
        "for causal language models, encoders, and denoisers, such as UNets; a Auto",
    ),
    (make_vae, {"activations": "int8"}, "and denoisers, such as UNets; a AutoencoderKL"),
    (make_unet, {"weights": "int4"}, "weights='int4': for causal language models; a UNet2DConditionModel takes 'int8'"),
    (make_unet, {"weights": "fp8-head"}, "only causal language models have an output head; a UNet2DConditionModel ta"),
    (make_unet, {"activations": "int8"}, "and the UNet2DConditionModel holds none: give weights='int8' too"),
    (make_unet, {"weights": "int8-asym", "activations": "int8"}, "needs weights='int8', not 'int8-asym'"),
    (make_unet, {"activations": "fp8-static"}, "for causal language models; a UNet2DConditionModel takes 'fp8'"),
    (half_unet, {"weights": "fp8", "activations": "fp8"}, "is in float16; load it in bfloat16, or"),
    (make_unet, {"parallel": "ranks"}, "parallel='ranks' is not one of None, 'guidance', 'tiles'"),
    (text_encoder, {"parallel": "guidance"}, "parallel='guidance': for denoisers, such as UNets, and autoencoders"),
]


@pytest.mark.parametrize(("make", "options", "told"), REFUSED, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_refused(make, options, told, tiny):
    model = make()
    before = tiny.snapshot(model)
    with pytest.raises((ValueError, TypeError), match=re.escape(told)) as caught:
        accel.optimize(model, **options)
    of_another_type = options.get("step_cache") in (2.5, (3, 0)) or options.get("step_cache") is True
    assert (caught.type is TypeError) == of_another_type
    tiny.assert_same_state(before, tiny.snapshot(model))

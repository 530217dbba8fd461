"""The ways users call one and the same pipeline, and what they do between two steps of a call."""

from collections.abc import Callable

import torch


def embeddings(length: int, batch: int = 1, seed: int = 0) -> Callable:
    """Prompts given as embeddings of any length, as weighted and concatenated prompts are."""

    def call(pipe) -> dict:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape):
            return torch.randn(*shape, generator=generator).to(pipe.device, pipe.dtype)

        shape = (batch, length, pipe.unet.config.cross_attention_dim)
        given = {"prompt": None, "prompt_embeds": rand(*shape), "negative_prompt_embeds": rand(*shape)}
        if hasattr(pipe, "text_encoder_2"):
            pooled = (batch, pipe.text_encoder_2.config.projection_dim)
            given |= {"pooled_prompt_embeds": rand(*pooled), "negative_pooled_prompt_embeds": rand(*pooled)}
        return given

    return call


def latents(pipe) -> dict:
    size = (1, 4, 48 // pipe.vae_scale_factor, 48 // pipe.vae_scale_factor)
    given = torch.randn(*size, generator=torch.Generator().manual_seed(9)).to(pipe.device, pipe.dtype)
    return {"latents": given, "height": 48, "width": 48}


# Not among them: clip_skip, which fails in stock with transformers 5.23 (hidden_states is None).
CALLS = {
    "as-ever": {},
    "without-guidance": {"guidance_scale": 1.0},
    "much-guidance": {"guidance_scale": 12.0, "guidance_rescale": 0.7},
    "two-prompts": {"prompt": ["three", "a photo of the digit 2 written by hand"]},
    "three-images": {"num_images_per_prompt": 3},
    "wide": {"height": 48, "width": 80},
    "small": {"height": 32, "width": 32},
    "many-small": {"height": 32, "width": 32, "num_images_per_prompt": 5, "guidance_scale": 1.0},
    "empty-prompt": {"prompt": ""},
    "too-long-a-prompt": {"prompt": "a handwritten seven, " * 30},
    "negative-prompt": {"negative_prompt": "a handwritten one"},
    "embeddings-of-154-tokens": embeddings(154),
    "embeddings-of-one-token": embeddings(1, batch=2),
    "latents-given": latents,
    "latents-wanted": {"output_type": "latent"},
    "more-steps": {"steps": 5},
    "noise-at-every-step": {"eta": 1.0},
}


def arguments(call, pipe) -> dict:
    return call(pipe) if callable(call) else call


def at(number: int, action: Callable, inputs: tuple[str, ...] = ("latents",)) -> dict:
    """A callback that runs action(pipe, tensors) after this step alone; it may return other tensors."""

    def callback(pipe, step, timestep, tensors):
        made = action(pipe, tensors) if step == number else None
        return made if isinstance(made, dict) else tensors

    return {"steps": 4, "callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": list(inputs)}


def conditions(pipe) -> tuple[str, ...]:
    sdxl = ("add_text_embeds", "add_time_ids") if hasattr(pipe, "text_encoder_2") else ()
    return ("prompt_embeds", *sdxl)


def guidance_off(pipe, tensors):
    pipe._guidance_scale = 0.0
    return {name: tensor.chunk(2)[-1] for name, tensor in tensors.items()}


def interrupt(pipe, tensors):
    pipe._interrupt = True


def edit_weights(pipe, tensors):
    """Those that prompt and timestep go through, whose products are the same at every step until now."""
    for name, weight in pipe.unet.named_parameters():
        if name.endswith(("attn2.to_v.weight", "time_emb_proj.weight")):
            with torch.no_grad():
                weight.mul_(-1)


# name: function of (pipe, adapter), where adapter(pipe) loads a LoRA
BETWEEN_STEPS = {
    "guidance-off": lambda pipe, adapter: at(1, guidance_off, conditions(pipe)),
    "another-prompt": lambda pipe, adapter: at(
        1, lambda p, tensors: {"prompt_embeds": -tensors["prompt_embeds"]}, ("prompt_embeds",)
    ),
    "prompt-edited-in-place": lambda pipe, adapter: at(
        1, lambda pipe, tensors: tensors.update(prompt_embeds=tensors["prompt_embeds"].mul_(0.3)), ("prompt_embeds",)
    ),
    "latents-edited": lambda pipe, adapter: at(2, lambda p, tensors: {"latents": 0.9 * tensors["latents"]}),
    "weights-edited-in-place": lambda pipe, adapter: at(1, edit_weights),
    "lora-loaded": lambda pipe, adapter: at(1, lambda p, tensors: adapter(p)),
    "freeu": lambda pipe, adapter: at(1, lambda p, tensors: p.enable_freeu(0.9, 0.2, 1.3, 1.4)),
    "interrupted": lambda pipe, adapter: at(1, interrupt),
}

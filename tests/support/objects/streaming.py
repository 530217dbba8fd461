"""Models whose weights stream, with a piece of the host's memory in the place of a GPU's."""

import gc
import threading
import weakref

import torch
from diffusers import AutoencoderKLLTX2Audio, DiTTransformer2DModel, FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvModel,
    T5Config,
    T5ForConditionalGeneration,
)

from accel.encoders import encoder
from accel.libraries.hooks import why_elsewhere
from accel.llm.generation import decoder
from accel.offload import budget, call_hooks, hooks, placed_model, streamed_model
from accel.offload.blocks import sizes_of
from accel.offload.memory import HostBuffer
from accel.offload.placed_model import PlacedModel
from accel.offload.ring import Ring
from accel.planning import memory
from support.diffusion.tiny_models import make_unet, unet_inputs
from support.objects.emulated_card import THERE, Addresses


def emulate(monkeypatch):
    """Buffers of the ring are overwritten before they are filled, so that what is read too late shows. Returns a
    function that counts buffers on either side which are still there.
    """
    fill, made, living = Ring._fill, HostBuffer.__init__, weakref.WeakSet()

    def poisoned(self, i):
        self.buffers[i % len(self.buffers)].fill_(255)
        fill(self, i)

    def counted(self, nbytes):
        made(self, nbytes)
        living.add(self)

    def reserved(self, nbytes):
        living.add(found := Addresses(nbytes))
        return found

    def left():
        gc.collect()
        return len(living)

    def elsewhere(module):
        """Outside of calls the weights that stream are on the CPU, where a forward of another thread does not look."""
        held, here = call_hooks.streamed_model(module), threading.get_ident()
        apart = held is not None and not held.still and held.caller != here
        return "weights on several devices, or not loaded" if apart else why_elsewhere(module)

    monkeypatch.setattr(decoder, "why_elsewhere", elsewhere)
    monkeypatch.setattr(encoder, "why_elsewhere", elsewhere)
    monkeypatch.setattr(PlacedModel, "_reserve", reserved)
    monkeypatch.setattr(HostBuffer, "__init__", counted)
    monkeypatch.setattr(HostBuffer, "pin", lambda self, most=None, empty=False: None)
    monkeypatch.setattr(Ring, "_fill", poisoned)
    monkeypatch.setattr(memory, "card_of", lambda models: THERE)
    monkeypatch.setattr(memory, "GPUS", ("cpu",))
    monkeypatch.setattr(hooks, "GPUS", ("cpu",))
    monkeypatch.setattr(placed_model, "ROW", 32)
    monkeypatch.setattr(placed_model, "PART", 16)
    monkeypatch.setattr(streamed_model, "GRAIN", 256)
    monkeypatch.setattr(budget, "SLACK", 0)
    return left


def flux(layers=3):
    """A model, and a call of it with so many tokens of an image."""
    sizes = {"patch_size": 1, "in_channels": 4, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    model = FluxTransformer2DModel(num_layers=layers, num_single_layers=6, **sizes, **widths).eval()
    ids, text = torch.randn(64, 3), {"encoder_hidden_states": torch.randn(1, 8, 32), "txt_ids": torch.zeros(8, 3)}
    given = text | {"pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5])}
    image = torch.randn(1, 64, 4)
    return model, lambda model, size=16: model(image[:, :size], img_ids=ids[:size], **given).sample


def flux_on_card(layers=4, singles=8):
    """A larger one on a GPU, in bfloat16, and a call of it."""
    torch.manual_seed(0)
    widths = {"joint_attention_dim": 512, "pooled_projection_dim": 256, "num_attention_heads": 8}
    with torch.device("cuda"):
        model = FluxTransformer2DModel(num_layers=layers, num_single_layers=singles, **widths).bfloat16().eval()
        given = {"hidden_states": torch.randn(1, 1024, 64), "encoder_hidden_states": torch.randn(1, 64, 512)}
        given |= {"pooled_projections": torch.randn(1, 256), "timestep": torch.tensor([0.5])}
        given = {name: one.bfloat16() for name, one in given.items()}
        ids = {"img_ids": torch.randn(1024, 3), "txt_ids": torch.zeros(64, 3)}
    return model, lambda model: model(**{name: one.to(model.dtype) for name, one in given.items()}, **ids).sample


def llama(width=32):
    """A model, and a call of it that writes behind so many tokens."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=6, **sizes)).eval()
    ids, settings = torch.randint(0, 64, (2, 64)), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    return model, lambda model, size=9: model.generate(
        ids[:, :size], attention_mask=torch.ones_like(ids[:, :size]), **settings
    )


def t5():
    """A model whose bias of positions lies in its first block, and a call that gives logits of what it writes."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 5, "num_heads": 4, "decoder_start_token_id": 0}
    model, ids = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes)).eval(), torch.randint(2, 64, (3, 9))
    told = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    return model, lambda model: torch.stack(model.generate(ids, attention_mask=beginnings(ids), **told).logits)


def bert():
    """An encoder, and a call of it with texts of several lengths."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    model, ids = BertModel(BertConfig(vocab_size=64, **sizes)).eval(), torch.randint(1, 64, (3, 9))
    return model, lambda model: model(ids, attention_mask=beginnings(ids)).last_hidden_state


def levels():
    """An autoencoder whose blocks lie in modules that only hold them, and a call of it."""
    sizes = {"base_channels": 32, "ch_mult": (1, 1, 2), "num_res_blocks": 1, "resolution": 16, "latent_channels": 2}
    model, sound = AutoencoderKLLTX2Audio(**sizes).eval(), torch.randn(1, 2, 16, 16)
    return model, lambda model: model(sound).sample


def unet():
    """One in which keys and values of the prompt are computed together, with adapters on some, and a call of it."""
    model = make_unet("sdxl")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False), model)
    given = unet_inputs(model)
    return model.eval(), lambda model: model(**given).sample


def dit():
    """One that embeds classes by its first block, and once more by that after the last, and a call of it."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "sample_size": 4}
    model = DiTTransformer2DModel(num_layers=5, num_embeds_ada_norm=9, **sizes).eval()
    given = {"timestep": torch.tensor([5]), "class_labels": torch.tensor([1])}
    image = torch.randn(1, 4, 4, 4)
    return model, lambda model: model(image, **given).sample


def rwkv():
    """One that rescales weights of its later blocks, in place, before it calls the first one; and a call of it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "attention_hidden_size": 32, "num_hidden_layers": 5}
    model, ids = RwkvModel(RwkvConfig(vocab_size=64, rescale_every=2, **sizes)).eval(), torch.randint(0, 64, (1, 9))
    return model, lambda model: model(ids).last_hidden_state


def beginnings(ids):
    """A mask that shows fewer tokens in each row than in the one before."""
    return (torch.arange(ids.shape[1]) < ids.shape[1] - 2 * torch.arange(len(ids))[:, None]).long()


def stored(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, wanted):
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def aligning_hooks(model):
    """What accelerate's hooks do that bring weights to where they are read."""
    found = (one._hf_hook for one in model.modules() if hasattr(one, "_hf_hook"))
    held = [vars(one) for hook in found for one in getattr(hook, "hooks", (hook,))]
    return [(one["execution_device"], one["offload_buffers"], one["skip_keys"]) for one in held]


def within(model, share, room=0):
    """A budget in which about this share of what could stream has to, and so many bytes are left for calls."""
    sizes = sizes_of(model)
    return int(1.02 * sizes.total - share * sum(sizes.blocks) + 2 * max(sizes.blocks)) + budget.SLACK + room

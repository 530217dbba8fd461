"""What people hand over, each as a function that makes it around tiny models, and gives how it is called."""

import sys
import types
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from support.diffusion.tiny_models import make_unet, make_vae, unet_inputs
from support.llm.families import make, prompt

TARGETS: dict[str, tuple[int, Callable]] = {}
IDS = prompt()


def target(models: int = 1):
    """models: how many are in it."""

    def add(made):
        TARGETS[made.__name__.replace("_", " ")] = models, made
        return made

    return add


def text_encoder():
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=99, **sizes, bos_token_id=1, eos_token_id=2)).eval()


def written(model) -> list[torch.Tensor]:
    """Logits of a prompt, and a text."""
    text = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    return [model(input_ids=IDS).logits, text]


def drawn(unet) -> list[torch.Tensor]:
    return [unet(**unet_inputs(unet)).sample]


def encoded(model) -> list[torch.Tensor]:
    return [model(input_ids=IDS).last_hidden_state]


@target(3)
def single_components():
    return [make_unet(), make_vae(), text_encoder()], lambda obj: [
        *drawn(obj[0]),
        obj[1](torch.ones(1, 3, 16, 16)).sample,
        *encoded(obj[2]),
    ]


@target()
def adapter():
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(make("llama"), config).eval(), written


@target()
def data_parallel():
    return nn.DataParallel(make("llama")), lambda obj: [obj(input_ids=IDS).logits, *written(obj.module)]


@target()
def distributed_data_parallel():
    model = nn.parallel.DistributedDataParallel(make("llama")).eval()
    return model, lambda obj: [obj(input_ids=IDS).logits, *written(obj.module)]


class Embedder(nn.Sequential):
    """Built as `sentence_transformers.SentenceTransformer` is."""

    def forward(self, features):
        return super().forward(features)["sentence_embedding"]


class Encoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.auto_model = model

    def forward(self, features):
        return features | {"token_embeddings": self.auto_model(**features).last_hidden_state}


class Pooling(nn.Module):
    def forward(self, features):
        mask = features["attention_mask"][..., None]
        return features | {"sentence_embedding": (features["token_embeddings"] * mask).sum(1) / mask.sum(1)}


@target()
def sentence_transformer():
    features = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    return Embedder(Encoder(text_encoder()), Pooling()).eval(), lambda obj: [obj(features)]


class Drawing(nn.Module):
    """Models as children, in a list that torch does not know, and behind an attribute that is none of its own."""

    def __init__(self):
        super().__init__()
        self.encode, self.scale = text_encoder(), nn.Parameter(torch.tensor(2.0))
        self.others = [make_unet()]
        object.__setattr__(self, "writer", make("llama"))

    def forward(self):
        return [self.scale * one for one in (*encoded(self.encode), *drawn(self.others[0]))]


@target(3)
def module_of_his_own():
    return Drawing().eval(), lambda obj: [*obj(), *written(obj.writer)]


class Slots:
    __slots__ = ("__weakref__", "held", "itself", "nothing")

    def __init__(self, held):
        self.held, self.itself = held, self


class Service:
    def __init__(self):
        self._models = {"draw": make_unet(), 3: (text_encoder(), "a name")}
        self.more, self.count = Slots([make("llama")]), 7
        self.same = self._models

    def __call__(self):
        more = self._models[3][0]
        return [*drawn(self._models["draw"]), *encoded(more), *written(self.more.held[0])]


@target(3)
def object_of_his_own():
    return Service(), lambda obj: obj()


@target()
def one_model_in_two_places():
    model = make("llama")
    named = namedtuple("Named", ("chat", "judge"))
    return named(model, {"wrapped": nn.DataParallel(model), "inner": model.model}), lambda obj: written(obj.chat)


def around(text: dict):
    """BLIP-2: its own forward takes no cache; it hands an image and a text to the generate() of the model inside."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Blip2Config(
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        qformer_config=sizes | {"encoder_hidden_size": 32},
        text_config=sizes | {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | text,
        num_query_tokens=4,
        image_token_index=90,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((1, 4), 90), IDS], dim=1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.ones(1, 3, 16, 16)}
    return model, lambda obj: [obj.generate(**given, max_new_tokens=4, do_sample=False)]


@target(3)
def model_around_a_language_model():
    return around({"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64})


@target(3)
def model_around_one_with_an_encoder():
    return around({"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2})


@target()
def remote_code():
    """As trust_remote_code leaves it: the classes of a module that no package has."""
    import transformers.models.llama.modeling_llama as llama

    name = "transformers_modules.of_somebody.modeling_his"
    source = Path(llama.__file__).read_text().replace("from ...", "from transformers.")
    source = source.replace("from .configuration_llama", "from transformers.models.llama.configuration_llama")
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__ = llama.__file__
    exec(compile(source, llama.__file__, "exec"), vars(module))
    model = make("llama")
    twin = module.LlamaForCausalLM(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin, written


@target()
def text_pipeline():
    from transformers import pipeline

    from support.llm.calls import tokenizer

    pipe = pipeline("text-generation", model=make("llama"), tokenizer=tokenizer(), device="cpu")
    ids = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    return pipe, lambda obj: [torch.tensor(obj("abcdef", **ids)[0]["generated_token_ids"])]


def sd_pipeline():
    from support.diffusion.tiny_models import make_sdxl_pipeline

    return make_sdxl_pipeline()


def image(pipe) -> list[torch.Tensor]:
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "generator": torch.Generator().manual_seed(0)}
    return [torch.from_numpy(pipe("a", output_type="np", **call).images)]


@target(4)
def pipelines_that_share_a_model():
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

    pipe = sd_pipeline()
    other = StableDiffusionXLPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    assert StableDiffusionXLImg2ImgPipeline(**pipe.components).unet is pipe.unet
    return [pipe, other], lambda obj: [*image(obj[0]), *image(obj[1])]


@target(4)
def modular_pipeline():
    from diffusers import StableDiffusionXLModularPipeline

    pipe = StableDiffusionXLModularPipeline()
    parts = {name: part for name, part in sd_pipeline().components.items() if name in pipe._component_specs}
    pipe.update_components(**parts)
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "np", "output": "images"}

    def drawn(obj):
        image = obj(prompt="a", generator=torch.Generator().manual_seed(0), **call)
        return [torch.as_tensor(image)]

    return pipe, drawn


@target(4)
def pipeline_with_an_adapter_around_its_unet():
    import peft

    pipe = sd_pipeline()
    config = peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False)
    torch.manual_seed(0)
    pipe.unet = peft.get_peft_model(pipe.unet, config).eval()
    return pipe, image

"""Random changes of adapters on tiny models on a CPU, an unpatched copy beside accel: each result must be the copy's.

Adapters are loaded, switched, scaled, merged, trained, saved and unloaded; the model changes its dtype, its memory and
its weights, is restored and optimized again. Half of the calls read adapters from buffers, as CUDA graphs do, and
language models answer batches in which each prompt names its adapter.
"""

import copy
import gc
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import diffusers
import torch
import transformers
import typer
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, ContinuousBatchingConfig, GenerationConfig

import accel
from accel.bench.llm.tiny import SPECIAL, VOCABULARY, build_tiny, randomize
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.errors import reason_of
from accel.libraries.adapters import BASE, DOWN
from benchmarks.models.random_calls import tipped
from benchmarks.study import Study, words

TOLERANCE = 1e-4  # of the largest number, in float32
WORSE, ROUNDED = 2.5, 0.01  # in bfloat16: times stock's own distance from float32, and beside it
CONFIG = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
RANKS = (2, 4, 8, 16, 33, 64, 130)
UNET = {
    "sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 12,
    "attention_head_dim": 2, "norm_num_groups": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
XL = {
    "use_linear_projection": True, "attention_head_dim": [2, 4], "transformer_layers_per_block": [1, 2],
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 34,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
DIT = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
DENOISERS: dict[str, tuple[str, dict]] = {
    "sd15": ("UNet2DConditionModel", UNET),
    "sdxl": ("UNet2DConditionModel", UNET | XL),
    "flux": (
        "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "joint_attention_dim": 24, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        DIT | {"joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 16,
               "out_channels": 4, "pos_embed_max_size": 16},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        DIT | {"cross_attention_dim": 16, "caption_channels": 24, "out_channels": 8,
               "use_additional_conditions": False},
    ),
}  # fmt: skip
ENCODERS = {
    "clip": (
        "CLIPTextModel",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "eos_token_id": 2},
    ),
    "t5": (
        "T5EncoderModel",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu"},
    ),
}  # fmt: skip
TEXT = ("llama", "qwen3", "gemma", "gpt2", "qwen3_moe")
MODELS = (*DENOISERS, *ENCODERS, *TEXT)


class Case(NamedTuple):
    """An unpatched model, and what a call of it gives, in a list."""

    model: nn.Module
    call: Callable[[nn.Module], list[torch.Tensor]]


def main(
    out: Path,
    changes: Annotated[int, typer.Option(help="of all models together")] = 3000,
    seed: int = 0,
    models: Annotated[str, typer.Option(help="names, with commas")] = ",".join(MODELS),
) -> None:
    """Writes how many changes there were of each kind, what was wrong, and what was left behind."""
    torch.set_num_threads(1)
    study, names = Study("adapters soak", out, dtype=torch.float32, rows=[], seed=seed), words(models)
    for number, name in enumerate(names):
        share = changes * (number + 1) // len(names) - changes * number // len(names)
        study.add("rows", {"model": name} | Soak(name, random.Random(f"{seed} {name}")).run(share))
    raise SystemExit(any(row["wrong"] for row in study.body["rows"]))


def case_of(name: str) -> Case:
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    torch.manual_seed(1)
    if name in TEXT:
        model: Any = build_tiny(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]])
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return Case(model, said)
    if name in ENCODERS:
        kind = getattr(transformers, ENCODERS[name][0])
        model = kind(kind.config_class(**ENCODERS[name][1])).eval()
        randomize(model)
        ids = torch.randint(SPECIAL, VOCABULARY, (2, 9), generator=g)
        return Case(model, lambda one: [one(ids).last_hidden_state])
    kind, config = DENOISERS[name]
    heads = {} if kind.startswith("UNet") else {"num_attention_heads": 2}
    model = getattr(diffusers, kind)(**config, **heads).eval()
    for parameter in model.parameters():  # modulations that begin as zeros would hide mistakes
        parameter.data += 0.05 * torch.randn(parameter.shape)
    if not heads:
        given: dict[str, Any] = {"sample": rand(2, 4, 8, 8), "encoder_hidden_states": rand(2, 7, 12)}
        if name == "sdxl":
            given["added_cond_kwargs"] = {"text_embeds": rand(2, 10), "time_ids": rand(2, 6)}
    else:
        given = {"hidden_states": rand(2, 12, 16) if name == "flux" else rand(2, 4, 8, 6)}
        given["encoder_hidden_states"] = rand(2, 5, 24)
        if name == "pixart":
            given["added_cond_kwargs"] = dict.fromkeys(("resolution", "aspect_ratio"))
        else:
            given["pooled_projections"] = rand(2, 16)
    given["timestep"] = torch.tensor([0.017, 0.4] if name == "flux" else [17.0, 400.0])
    if name == "flux":
        given |= {"img_ids": torch.zeros(12, 3), "txt_ids": torch.zeros(5, 3)}

    def denoised(one: Any) -> list[torch.Tensor]:
        return [one(**in_dtype(given, one.dtype), return_dict=False)[0]]

    return Case(model, denoised)


def in_dtype(given: Any, dtype: torch.dtype) -> Any:
    if isinstance(given, dict):
        return {name: in_dtype(one, dtype) for name, one in given.items()}
    return given.to(dtype) if isinstance(given, torch.Tensor) else given


def said(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt, and of a token behind it."""
    ids = torch.randint(SPECIAL, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    prompt = model(ids, use_cache=True)
    return [prompt.logits, model(ids[:, :1], past_key_values=prompt.past_key_values, use_cache=True).logits]


def adapted(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if BASE in one._modules]


def names_of(model: nn.Module) -> list[str]:
    return sorted({name for layer in adapted(model) for name in layer._modules[DOWN]})


def load(model: Any, draw: random.Random) -> None:
    name = f"adapter {draw.randrange(5)}"
    if name in names_of(model):
        return
    found = {path.replace(f".{BASE}", "").rpartition(".")[2] for path, one in model.named_modules() if is_base(one)}
    kinds = sorted(found - {"lm_head"})
    targets = kinds if draw.random() < 0.5 else draw.sample(kinds, max(1, len(kinds) // 2))
    config = LoraConfig(
        r=draw.choice(RANKS), lora_alpha=draw.choice((2, 16)), target_modules=targets, init_lora_weights=False,
        use_rslora=draw.random() < 0.2, use_dora=draw.random() < 0.05, lora_dropout=draw.choice((0, 0, 0.1)),
        fan_in_fan_out=any(type(one).__name__ == "Conv1D" for one in model.modules()),
    )  # fmt: skip
    inject_adapter_in_model(config, model, adapter_name=name)


def is_base(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def switch(model: Any, draw: random.Random) -> None:
    names = names_of(model)
    chosen = draw.sample(names, draw.randint(1, len(names))) if names else []
    for layer in adapted(model):
        layer.set_adapter(chosen)


def scale(model: Any, draw: random.Random) -> None:
    factors = {name: draw.choice((0.0, 0.3, -0.7, 1.3)) for name in names_of(model)}
    for layer in adapted(model):
        for name in layer._modules[DOWN]:
            layer.set_scale(name, factors[name])


def merge(model: Any, draw: random.Random) -> None:
    for layer in adapted(model):
        if layer.merged:
            layer.unmerge()
        else:
            layer.merge()


def turn(model: Any, draw: random.Random) -> None:
    on = draw.random() < 0.6
    for layer in adapted(model):
        layer.enable_adapters(on)


def train(model: Any, draw: random.Random) -> None:
    factor, anew = draw.choice((-1.0, 0.7, 1.2)), draw.random() < 0.3
    for path, one in model.named_parameters():
        if "lora_" in path:
            one.data = one.data * factor if anew else one.data.mul_(factor)


def train_base(model: Any, draw: random.Random) -> None:
    found = [one for path, one in model.named_parameters() if "lora_" not in path]
    one, factor = draw.choice(found), 1 + draw.uniform(-0.1, 0.1)
    one.data = one.data * factor if draw.random() < 0.5 else one.data.mul_(factor)


def delete(model: Any, draw: random.Random) -> None:
    names = names_of(model)
    name = draw.choice(names) if names else None
    for layer in adapted(model):
        if name in layer._modules[DOWN]:
            layer.delete_adapter(name)
    getattr(model, "peft_config", {}).pop(name, None)


def unload(model: Any, draw: random.Random) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and BASE in child._modules:
                parent._modules[name] = child.get_base_layer()
    vars(model).pop("peft_config", None)
    vars(model).pop("_hf_peft_config_loaded", None)


def dtype(model: Any, draw: random.Random) -> None:
    half = next(model.parameters()).dtype == torch.float32
    model.to(torch.bfloat16 if half else torch.float32)
    if half and "moe" in type(model).__name__.lower():  # two nearly equal experts would be told apart by rounding
        model.to(torch.float32)


def move(model: Any, draw: random.Random) -> None:
    """As to another device and back: all weights lie elsewhere."""
    model._apply(lambda one: one.clone())


def save(model: Any, draw: random.Random) -> None:
    """And load what was saved."""
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})


CHANGES = (load, load, load, switch, switch, scale, merge, turn, train, train_base, delete, unload, dtype, move, save)


class Soak:
    """One model beside its unpatched copy."""

    def __init__(self, name: str, draw: random.Random):
        self.name, self.draw, self.case = name, draw, case_of(name)
        self.stock = self.case.model.requires_grad_(False)
        self.ours, self.buffers = copy.deepcopy(self.stock), AdapterBuffers()
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.fallbacks: set[str] = set()
        self.worst = 0.0
        self.optimize()

    def optimize(self) -> None:
        accel.optimize(self.ours, cpu="fuse")
        self.planned = weakref.WeakSet(adapted(self.ours))  # which a plan holds until the next

    def run(self, changes: int) -> dict[str, Any]:
        began = time.perf_counter()
        sites = sum(status == "patched" for _, _, status, _ in accel.report(self.ours).sites)
        for number in range(changes):
            kind = self.draw.choice(("restore", *CHANGES))
            told = kind if isinstance(kind, str) else kind.__name__
            try:
                self.change(kind)
                self.agree(told)
            except Exception as error:
                self.note(f"{told}: {reason_of(error)}")
            self.kinds[told] += 1
            self.wrong = [one if one.startswith("change ") else f"change {number}, {one}" for one in self.wrong]
        self.change(unload)
        self.agree("unload")
        self.restore()
        return {
            "changes": changes, "kinds": dict(self.kinds), "sites": sites, "worst": self.worst,
            "wrong": self.wrong, "fallbacks": sorted(self.fallbacks), "s": round(time.perf_counter() - began, 1),
        }  # fmt: skip

    def note(self, told: str) -> None:
        self.wrong.append(told)

    def change(self, kind: Any) -> None:
        seed = self.draw.randrange(2**31)
        if kind == "restore":
            self.restore()
            self.optimize()
            return
        before = [weakref.ref(one) for one in adapted(self.ours) if kind is unload and one not in self.planned]
        raised = []
        for model in (self.stock, self.ours):
            torch.manual_seed(seed)
            try:
                kind(model, random.Random(seed))
            except Exception as error:  # what peft refuses on both
                raised.append(type(error))
            model.requires_grad_(False).eval()
        if raised and (len(raised) < 2 or raised[0] is not raised[1]):
            self.note(f"{kind.__name__}: raised {raised} on one alone")
        if kind is unload:
            self.agree("unload")
            self.buffers.keep(self.ours.modules())
            gc.collect()
            if any(one() is not None for one in before):
                self.note("unload: layers of adapters are kept alive")

    def restore(self) -> None:
        self.fallbacks |= {f"{path}: {reason}" for path, reason, _ in accel.report(self.ours).fallbacks}
        accel.restore(self.ours)
        mine, theirs = self.ours.state_dict(), self.stock.state_dict()
        if mine.keys() != theirs.keys() or not all(torch.equal(one, theirs[name]) for name, one in mine.items()):
            self.note("restore: not to the bit")
        if any("forward" in vars(one) for one in self.ours.modules()):
            self.note("restore: something is left")

    @torch.no_grad()
    def agree(self, told: str) -> None:
        wanted = self.case.call(self.stock)
        by_buffers = self.draw.random() < 0.5
        call = lambda: self.case.call(self.ours)  # noqa: E731
        got = buffered(self.buffers, call) if by_buffers else call()
        self.kinds["calls by buffers"] += by_buffers and bool(self.buffers.groups)
        half = wanted[0].dtype == torch.bfloat16
        if half:
            exact = self.case.call(copy.deepcopy(self.stock).float())
            off, own = (distance(some, exact) for some in (got, wanted))
            most = WORSE * own + ROUNDED * distance(exact)
        else:
            parts = [(mine - theirs).abs().max() / theirs.abs().max() for mine, theirs in zip(got, wanted, strict=True)]
            off, most = float(max(parts)), TOLERANCE
            self.worst = max(self.worst, off)
        if not off <= most or [one.dtype for one in got] != [one.dtype for one in wanted]:
            where = "by buffers" if by_buffers else "as they lie"
            self.note(f"{told}: off by {off:.2e}, where {most:.2e} is allowed, {where}")
        if self.name in TEXT and not half and self.draw.random() < 0.15:
            self.batch(told)

    def batch(self, told: str) -> None:
        """Prompts with adapters of their own."""
        names = [self.draw.choice([None, *names_of(self.stock)]) for _ in range(4)]
        lengths = [self.draw.choice((3, 9, 66)) for _ in names]
        g = torch.Generator().manual_seed(self.draw.randrange(2))
        text = torch.randint(SPECIAL, VOCABULARY, (1, max(lengths)), generator=g)
        prompts = [text[:, :length] for length in lengths]
        config = GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
        given = {"generation_config": config, "continuous_batching_config": CONFIG, "adapter": names}
        try:
            found: Any = self.ours.generate_batch([one[0].tolist() for one in prompts], **given)  # type: ignore[operator]
        except ValueError as error:
            self.kinds[f"batch refused: {reason_of(error).partition(': its')[0][-40:]}"] += 1
            return
        self.kinds["batches by name"] += 1
        stock = copy.deepcopy(self.stock)
        for one, name, prompt in zip(found.values(), names, prompts, strict=True):
            for layer in adapted(stock):
                layer.set_adapter([name] if name else [])
            mask = torch.ones_like(prompt)
            theirs = stock.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
            mine = torch.cat([prompt, torch.tensor([one.generated_tokens], dtype=torch.int64)], 1)
            if one.error is not None or not (torch.equal(mine, theirs) or tipped(stock, mask, theirs, mine)):
                self.note(f"{told}: batch, adapter={name!r}, {prompt.shape[1]} tokens: {one.error}")


def distance(some: list[torch.Tensor], others: list[torch.Tensor] | None = None) -> float:
    """From others, or from zero, of all numbers."""
    pairs = zip(some, others or [torch.zeros(())] * len(some), strict=True)
    return float(sum((one.float() - other).square().sum() for one, other in pairs)) ** 0.5


def buffered(buffers: AdapterBuffers, call: Callable[[], Any]) -> Any:
    """The second of two calls, as a runner of CUDA graphs makes them."""
    with buffers.used():
        buffers.follow()
        found = call()
        if buffers.fresh:
            buffers.follow()
            found = call()
        buffers.asked.clear()
        buffers.fill(buffers.factor)
        buffers.advance()
        return call() if buffers.groups else found

"""Random changes of adapters on tiny models on a CPU, an unpatched copy beside accel: each result must be the copy's.

Adapters are loaded, switched, scaled, merged, trained, saved and unloaded; the model changes its dtype, its memory and
its weights, is restored and optimized again. Half of the calls read adapters from buffers, as CUDA graphs do, and
language models answer batches in which each prompt names its adapter. Some models hold their weights in a format of
another library's, or in fewer bits of ours.
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
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, ContinuousBatchingConfig, GenerationConfig

import accel
from accel.bench.adapters import linears_of_blocks
from accel.bench.formats import FORMATS
from accel.bench.llm.tiny import SPECIAL, VOCABULARY, build_tiny, randomize
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.errors import reason_of
from benchmarks.models.adapter_changes import CHANGES, adapted, dtype, names_of, unload
from benchmarks.models.buffered_calls import buffered
from benchmarks.models.tiny_denoisers import DITS, transformer
from benchmarks.models.tiny_denoisers import given as inputs_of
from benchmarks.study import Study, words

TOLERANCE = 1e-4  # of the largest number, in float32
NEAR = 2e-5  # of the largest logit: closer ones, the order of sums may tip
WORSE, ROUNDED = 2.5, 0.01  # in bfloat16: times stock's own distance from float32, and beside it
CONFIG = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
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
UNETS = {"sd15": UNET, "sdxl": UNET | XL}
OURS = ("int8", "int4-g32", "fp8")
HELD = (
    "llama nf4", "qwen3 Q8_0", "gemma int8", "qwen3_moe int4-g32", "llama fp8", "gpt2 int8", "flux Q8_0", "pixart nf4",
    "sdxl Q8_0", "sd15 nf4", "clip Q8_0", "qwen3 nf4",
)  # fmt: skip
MODELS = (*UNETS, *DITS, *ENCODERS, *TEXT, *HELD)


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
    """name: of a model, and of a format behind a space."""
    name, _, format = name.partition(" ")
    model, call = plain_case(name)
    if format in OURS:
        accel.quantize(model, format)
    elif format:
        FORMATS[format][1](model, linears_of_blocks(model))
    for one in model.modules():  # bitsandbytes packs 4 bits in another way at a call where a CPU has such products
        vars(one).update({name: False for name in ("support_avx512bf16_for_cpu",) if name in vars(one)})
    return Case(model, call)


def ggml_blocks(model: nn.Module) -> list[Any]:
    """Their linears have a dtype of their own, and know no copy."""
    return [one for one in model.parameters() if type(one).__name__ == "GGUFParameter"]


def copied(model: nn.Module) -> nn.Module:
    made = {id(one): type(one)(one.data.clone(), quant_type=one.quant_type) for one in ggml_blocks(model)}
    return copy.deepcopy(model, made)


def plain_case(name: str) -> Case:
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
    if name in DITS:
        model, given = transformer(name), inputs_of(name)
    else:
        model = diffusers.UNet2DConditionModel(**UNETS[name]).eval()
        given = {
            "sample": rand(2, 4, 8, 8),
            "encoder_hidden_states": rand(2, 7, 12),
            "timestep": torch.tensor([17, 400]),
        }
        if name == "sdxl":
            given["added_cond_kwargs"] = {"text_embeds": rand(2, 10), "time_ids": rand(2, 6)}

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


class Soak:
    """One model beside its unpatched copy."""

    def __init__(self, name: str, draw: random.Random):
        self.name, self.draw, self.case = name.partition(" ")[0], draw, case_of(name)
        self.stock = self.case.model.requires_grad_(False)
        self.ours, self.buffers = copied(self.stock), AdapterBuffers()
        self.changes = ["restore", *(one for one in CHANGES if one is not dtype or not ggml_blocks(self.stock))]
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
            kind = self.draw.choice(self.changes)
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
            exact = self.case.call(copied(self.stock).float())
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
        stock = copied(self.stock)
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


def tipped(stock: Any, mask: torch.Tensor, theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether every row parts from stock's at a token whose logit is as large as that of stock's, but for rounding."""
    if theirs.shape != mine.shape or len(theirs) != len(mask):
        return False
    mask = torch.cat([mask, mask.new_ones(len(mask), theirs.shape[1] - mask.shape[1])], 1).to(theirs.device)
    with torch.no_grad():
        logits = stock(theirs, attention_mask=mask, use_cache=False).logits
    for row in range(len(theirs)):
        apart = (theirs[row] != mine[row]).nonzero().flatten()
        if len(apart):
            at = int(apart[0])
            scores = logits[row, at - 1]
            gap = scores[theirs[row, at]] - scores[mine[row, at]]
            if not float(gap.abs() / scores.abs().max()) <= NEAR:
                return False
    return True

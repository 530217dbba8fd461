"""Without a GPU, kernels run in Triton's interpreter, which has to be chosen before their modules load."""

import dataclasses
import gc
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch  # noqa: F401 (before a test takes float64 for float32, which its tables would keep)
import torch

import accel.api
import accel.options


def fusing(*given):
    """What is fused is tested on a CPU too, whether or not it pays there; tests of cpu="auto" put `choose` back."""
    return dataclasses.replace(accel.options.choose(*given), cpu="fuse")


accel.api.choose = fusing

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Without a device these do nothing but format the whole stack and keep it, at every seed, until one comes.
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        absent.manual_seed_all = lambda seed: None


@pytest.fixture
def few_objects():
    """To look at every object is quick: those that are there already, of libraries and other tests, are set aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


GOLDEN = 0.6180339887  # its multiples, modulo 1, fall evenly whatever a table's rows repeat after


def pytest_collection_modifyitems(config, items):
    numbers, left = Counter(), []
    for item in items if not os.environ.get("ACCEL_TEST_EVERYTHING") else ():
        share = item.get_closest_marker("share")
        if share is not None:
            test = item.nodeid.partition("[")[0]
            if numbers[test] * GOLDEN % 1 >= 1 / share.args[0]:
                left.append(item)
            numbers[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        deselected = set(left)
        items[:] = [item for item in items if item not in deselected]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


# Triton's interpreter truncates to bfloat16 where the GPU rounds: one more unit in the last place.
TRUNCATION = {torch.bfloat16: 2**-8}
# fp32 sums in another order than torch's; relative to the largest output.
FLOOR = {torch.float32: 4e-6, torch.float16: 0.0, torch.bfloat16: 0.0}


def assert_as_good_as_torch(op, args, kwargs, dtype):
    """The kernel's largest error against float64 is at most twice the reference's own in this dtype."""

    def double(value):
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(double, value))
        if isinstance(value, torch.dtype):  # of the result
            return torch.float64
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1  # others are codes
        return value.double() if wide else value

    def many(output):
        return output if isinstance(output, tuple) else (output,)

    exact = many(op.reference(*map(double, args), **{name: double(value) for name, value in kwargs.items()}))
    torchs = many(op.reference(*args, **kwargs))
    ours = many(op.triton(*args, **kwargs))
    slack = FLOOR[dtype] + (0.0 if args[0].is_cuda else TRUNCATION.get(dtype, 0.0))
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        if truth is None:  # what the kernel makes besides; has a test of its own
            continue
        assert mine.dtype == dtype and mine.shape == truth.shape
        assert torch.isfinite(mine).all()
        peak = truth.abs().max().clamp_min(1e-3)
        error, allowed = (float((t.double() - truth).abs().max() / peak) for t in (mine, theirs))
        assert error <= 2 * allowed + slack, f"error {error:.2e}, torch's own {allowed:.2e}"


@pytest.fixture
def as_good_as_torch(monkeypatch):
    """The check of a kernel; fresh memory holds NaN meanwhile, so that an element no program wrote shows."""
    for name in ("empty", "empty_like"):

        def poisoned(*args, make=getattr(torch, name), **kwargs):  # noqa: B008 (torch's own, before it is replaced)
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)
    return assert_as_good_as_torch


SD = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
# What tells the families apart, in miniature: a new one is a line here.
UNETS = {
    "sd15": {},
    "sd21": {"use_linear_projection": True, "attention_head_dim": [2, 4], "upcast_attention": True},
    "sdxl": {
        "use_linear_projection": True,
        "attention_head_dim": [2, 4],
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 34,
    },
    "scale-shift": {"resnet_time_scale_shift": "scale_shift"},
    "only-cross": {"only_cross_attention": True},
    "inpainting": {"in_channels": 9},
    "scaled": {"mid_block_scale_factor": 2.0},
    "resample-in-resnet": {
        "down_block_types": ("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    },
}


def make_unet(family: str = "sd15", **changes):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(1)
    model = UNet2DConditionModel(**(SD | UNETS[family] | changes)).eval()
    for parameter in model.parameters():  # weights of ones and biases of zero would hide mistakes
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def make_vae(**changes):
    from diffusers import AutoencoderKL

    torch.manual_seed(2)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
    model = AutoencoderKL(**(sizes | blocks | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def unet_inputs(model, batch: int = 2, height: int = 8, width: int = 8, length: int = 7, seed: int = 0) -> dict:
    """Inputs of a tiny UNet; sizes need not be square, nor what the configuration says."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    inputs = {
        "sample": rand(batch, model.config.in_channels, height, width),
        "timestep": torch.tensor(17),
        "encoder_hidden_states": rand(batch, length, model.config.cross_attention_dim),
    }
    if model.config.addition_embed_type == "text_time":
        inputs["added_cond_kwargs"] = {"text_embeds": rand(batch, 10), "time_ids": rand(batch, 6)}
    return inputs


def snapshot(root: torch.nn.Module) -> dict:
    """What restore has to bring back: attributes by identity, containers by content, weights by value and stride."""
    state = {}
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            content = tuple(value.items()) if isinstance(value, dict) else None
            state[path, name] = (id(value), None if content is None else tuple((k, id(v)) for k, v in content))
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        state["tensor", name] = (id(tensor), tensor.stride(), tensor.storage_offset(), tensor.detach().clone())
    return state


def assert_same_state(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for key, wanted in before.items():
        if key[0] == "tensor":
            assert wanted[:3] == after[key][:3], key
            assert torch.equal(wanted[3], after[key][3]), key
        else:
            assert wanted == after[key], key


def differences(ours: object, stock: object) -> list[str]:
    """Names of attributes, weights and strides, on any module of the two, that are not the same in both."""
    found = []
    ours, stock = (dict(x.named_modules()) if isinstance(x, torch.nn.Module) else {"": x} for x in (ours, stock))
    for path in ours.keys() | stock.keys():
        pair = [vars(modules[path]) if path in modules else {} for modules in (ours, stock)]
        for name in pair[0].keys() | pair[1].keys():
            mine, theirs = (described(attributes.get(name)) for attributes in pair)
            if mine != theirs:
                found.append(f"{path}.{name}: {mine}, stock {theirs}")
    return found


def described(value, depth: int = 3):
    """A value in a form that can be compared between an object and its deep copy."""
    if isinstance(value, torch.Tensor):
        bits = None if value.is_meta else value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        where = (type(value).__name__, value.dtype, value.device, tuple(value.shape), value.stride())
        return where, None if bits is None else hash(bits.tobytes())
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    if isinstance(value, dict) and depth:
        keys = (number if isinstance(key, int) else str(key) for number, key in enumerate(value))  # hooks are numbered
        return {key: described(item, depth - 1) for key, item in zip(keys, value.values(), strict=True)}
    if isinstance(value, list | tuple) and depth:
        return [described(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "__func__"):  # the class's own forward, left by a hook, is as good as none
        return None if value.__func__ is type(value.__self__).forward else value.__func__.__qualname__
    return type(value).__qualname__


@pytest.fixture(scope="session")
def tiny():
    """Makers of tiny models and their inputs, and what tests ask about them."""
    from types import SimpleNamespace

    return SimpleNamespace(
        unet=make_unet,
        vae=make_vae,
        inputs=unet_inputs,
        families=tuple(UNETS),
        snapshot=snapshot,
        assert_same_state=assert_same_state,
        differences=differences,
    )


@pytest.fixture
def sdxl_pipe():
    """Tiny and random, built as SDXL is: two text encoders, conditions on sizes, a VAE that may not run in half.

    It predicts v, so that what its UNet says shows in the image: a random one's noise would drown in the latents'.
    """
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    tokenizer = Path(__file__).parents[1] / "examples" / "models" / "tiny-sd-digits" / "tokenizer"
    sizes = {"vocab_size": 601, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 599, "eos_token_id": 600, "pad_token_id": 600}
    small, large = (CLIPTextConfig(hidden_size=n, projection_dim=10, **sizes, **tokens) for n in (12, 20))
    torch.manual_seed(3)
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        sample_size=64,
        force_upcast=True,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=vae.eval(),
        text_encoder=CLIPTextModel(small).eval(),
        text_encoder_2=CLIPTextModelWithProjection(large).eval(),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizer),
        tokenizer_2=CLIPTokenizer.from_pretrained(tokenizer),
        unet=make_unet("sdxl", cross_attention_dim=32),
        scheduler=EulerDiscreteScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load(name: str):
    """What tests of both CPU and GPU need, and no fixture can hold; by the last of its name others can import it."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("live_adapters")
LIVE, CALLS = load("live_changes"), load("live_calls")
STEP_ORACLE = load("step_oracle").Oracle
for helper in ("families", "modes", "changes", "walks", "held_out", "quantized", "foreign", "rounded_cache"):
    load(f"llm/{helper}")
load("llm/prequantized_models")
load("llm/multimodal")
load("llm/live_bytes")
load("diffusion/denoisers")
load("gpu/device_memory")
load("kernels/warpgroups")
load("kernels/quantized_words")
if importlib.util.find_spec("triton"):
    load("kernels/code_kernel")


@pytest.fixture
def step_oracle():
    return STEP_ORACLE


@pytest.fixture
def live():
    return LIVE


@pytest.fixture
def calls():
    return CALLS


@pytest.fixture(params=LIVE.CHANGES, ids=lambda change: change.name)
def change(request):
    """Every change of the table in turn."""
    return request.param


@pytest.fixture(params=CALLS.BETWEEN_STEPS)
def between_steps(request):
    """Everything done between two steps in turn: a function of (pipe, adapter) that gives the keywords of a call."""
    return CALLS.BETWEEN_STEPS[request.param]

"""Blocks of a Flux of reduced size in 8 bits by 8: as near to the formula in full precision as the same products one by
one, from plans that round in their passes, and by kernels.
"""

import copy

import accel_kernels
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import accel
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.lowering import Pass
from accel.quantization.activations import RowProducts
from support.diffusion.oracles import oracle

CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "guidance_embeds": True,
}
SIZES = [(1, 1024, 128), (2, 500, 77)]  # images, tokens of an image, of a text
ROUNDED = {"double": (8, 12), "single": (4, 5)}  # inputs that are rounded, and products of them

pytestmark = pytest.mark.usefixtures("exact")


def flux():
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(**CONFIG).eval()
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape)
    return model.to("cuda", torch.bfloat16)


def given(batch: int, image: int, text: int, dtype: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(image)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs = {
        "hidden_states": rand(batch, image, 64),
        "encoder_hidden_states": rand(batch, text, 512),
        "pooled_projections": rand(batch, 256),
        "timestep": torch.linspace(0.25, 0.75, batch).bfloat16(),
        "guidance": torch.full((batch,), 3.5).bfloat16(),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(image / 4), torch.arange(4.0)),
        "txt_ids": torch.zeros(text, 3),
    }
    return tree_map(lambda tensor: tensor.to("cuda", dtype), inputs)


def called(model, inputs) -> torch.Tensor:
    return model(**inputs, return_dict=False)[0].double()


def apart(wanted, got) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture
def launched(monkeypatch):
    """How often kernels of 8-bit products were launched, and linears rounded rows by themselves."""
    counts = {"int8": 0, "fp8": 0, "apart": 0}

    def counting(run, name):
        def counted(*args, **kwargs):
            counts[name] += 1
            return run(*args, **kwargs)

        return counted

    for name in ("int8", "fp8"):
        op = getattr(accel_kernels, f"{name}_linear")
        monkeypatch.setitem(vars(op), "triton", counting(op.triton, name))
    monkeypatch.setattr(RowProducts, "rounded", counting(RowProducts.rounded, "apart"))
    return counts


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_blocks_in_8_bits_by_8(kind, graphs, launched):
    stock = flux()
    options = {"weights": kind, "activations": kind}
    ours = accel.optimize(copy.deepcopy(stock), **options, graphs=graphs)
    unfused = accel.optimize(copy.deepcopy(stock), **options, graphs=False)
    for module in unfused.modules():
        vars(module).pop("forward", None)
    truth, plain = oracle(copy.deepcopy(stock).double(), ours), copy.deepcopy(stock).double()
    for size in SIZES:
        inputs = given(*size, torch.bfloat16)
        wanted, whole = (called(model, given(*size, torch.float64)) for model in (truth, plain))
        own, lost = apart(wanted, called(unfused, inputs)), apart(whole, wanted)
        assert launched["apart"] > 0 and 1e-4 < lost < 0.3  # or nothing was rounded
        before = dict(launched)
        for _ in range(4):  # recorded, compared, then replayed
            assert apart(wanted, called(ours, inputs)) <= 2 * own
        assert launched[kind] > before[kind]
    stays_fast(ours, kind, launched)


def stays_fast(model, kind: str, launched: dict) -> None:
    """Every block ran from a plan that was compared, in which nothing rounds but passes."""
    assert accel.report(model).fallbacks == []
    blocks = [one for module in model.modules() if isinstance(one := vars(module).get("forward"), BlockForward)]
    assert len(blocks) == len(ROUNDED)
    for block, (rounded, products) in zip(blocks, ROUNDED.values(), strict=True):
        assert len(block.known) == len(SIZES)
        for plan in block.known.values():
            assert plan.compared and plan.executable is not None and not plan.reason
            units = plan.executable.units
            passes = [[op.name for op in unit.program.ops] for unit in units if isinstance(unit, Pass)]
            steps = [unit.step.name for unit in units if hasattr(unit, "step")]
            assert sum(f"numbers_{kind}" in ops for ops in passes) == rounded
            assert steps.count("rounded_product") == products and "quantized_linear" not in steps
    apart_before = launched["apart"]
    called(model, given(*SIZES[0], torch.bfloat16))
    assert launched["apart"] == apart_before


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_alone_and_all_given_back(kind):
    stock = flux()
    ours = accel.optimize(copy.deepcopy(stock), weights=kind)
    inputs = given(*SIZES[0], torch.bfloat16)
    truth = called(oracle(copy.deepcopy(stock).double(), ours), given(*SIZES[0], torch.float64))
    unfused = accel.optimize(copy.deepcopy(stock), weights=kind, graphs=False)
    for module in unfused.modules():
        vars(module).pop("forward", None)
    allowed = 2 * apart(truth, called(unfused, inputs))
    for _ in range(4):
        assert apart(truth, called(ours, inputs)) <= allowed
    assert accel.report(ours).fallbacks == []
    accel.restore(ours)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(list(ours.parameters())), stock.parameters(), strict=True))

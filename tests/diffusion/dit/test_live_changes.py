"""What users change between two calls of an optimized transformer: fast where it can be, stock and told where not."""

import copy
import pickle
import types
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_flux
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from support.compatibility.transformer_pair import FLUX, ROUNDING, SD3, WAN, TransformerPair, alike, first

either = pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
flux = pytest.mark.parametrize("pair", [FLUX], indirect=True)


def double(function):
    def doubled(*args, **kwargs):
        result = function(*args, **kwargs)
        return tuple(2 * one for one in result) if isinstance(result, tuple) else 2 * result

    return doubled


CODE = {
    "attention, of torch": (functional, "scaled_dot_product_attention"),
    "a norm, of torch": (functional, "layer_norm"),
    "a rotation beside the block": (transformer_flux, "apply_rotary_emb"),
    "how attention is dispatched": (transformer_flux, "dispatch_attention_fn"),
    "a class's forward": (nn.Linear, "forward"),
    "a processor": (transformer_flux.FluxAttnProcessor, "__call__"),
}


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_other_code_runs_as_it_is_and_is_told(pair):
    plain = pair.agree()
    for place, name in CODE.values():
        with mock.patch.object(place, name, double(getattr(place, name))):
            for _ in range(2):
                changed = pair.agree(fast=False, said=f"{name} was changed after accel.optimize")
        assert float((changed - plain).abs().max()) > 1e-3
        pair.agree()
    backends = attention_dispatch._AttentionBackendRegistry._backends
    native = attention_dispatch.AttentionBackendName.NATIVE
    with mock.patch.dict(backends, {native: double(backends[native])}):
        pair.agree(fast=False, said="NATIVE was changed after accel.optimize")
    pair.agree()


def test_attention_backends(monkeypatch):
    monkeypatch.setitem(ROUNDING, FLUX, 1e-6)  # a plan keeps its own kernel
    pair = TransformerPair(FLUX, monkeypatch)
    plain = pair.agree()
    with attention_dispatch.attention_backend("_native_math"):
        pair.agree()
        pair.agree()
    for name in ("_native_math", "native"):
        pair.change(lambda m, name=name: m.set_attention_backend(name))
        pair.agree()
        pair.agree()
    pair.change(lambda m: m.reset_attention_backend())
    assert torch.equal(pair.agree(), plain)


class Doubling:
    """A processor of the user's."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return double(self.inner)(*args, **kwargs)


@either
def test_changes_inside_of_one_block(pair):
    blocks = [pair.block(model) for model in (pair.ours, pair.stock)]

    def stock_in_one(said):
        for _ in range(2):
            before = {row[:2]: row[2] for row in pair.report().fallbacks}
            ran = pair.plans
            with torch.no_grad():
                ours, stock = (first(model(**pair.inputs)) for model in (pair.ours, pair.stock))
            alike(ours, stock)
            new = {row[1] for row in pair.report().fallbacks if row[2] != before.get(row[:2])}
            assert pair.plans - ran == pair.blocks - 1 and len(new) == 1 and said in new.pop()

    pair.agree()
    handles = [block.attn.to_q.register_forward_hook(lambda module, args, output: 2 * output) for block in blocks]
    stock_in_one("forward hooks inside")
    for handle in handles:
        handle.remove()
    pair.agree()
    for block in blocks:
        block.attn.to_q.forward = types.MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), block.attn.to_q)
    stock_in_one("a replaced forward")
    for block in blocks:
        del block.attn.to_q.forward
    pair.agree()
    processors = [block.attn.processor for block in blocks]
    for block in blocks:
        block.attn.set_processor(Doubling(block.attn.processor))
    stock_in_one("Doubling may keep state")
    for block, processor in zip(blocks, processors, strict=True):
        block.attn.set_processor(processor)
    pair.agree()
    for block in blocks:
        block.attn.to_out[1].p, block.attn.to_out[1].training = 0.5, True
    pair.plans = 0
    with torch.no_grad():
        pair.ours(**pair.inputs)
    assert pair.plans == pair.blocks - 1
    assert any("training mode inside" in reason for _, reason, _ in pair.report().fallbacks)
    for block in blocks:
        block.attn.to_out[1].training = False
    pair.agree()
    for block in blocks:
        block.norm2.eps = 0.5
        block.my_own_note = [1]  # nobody reads it
    pair.agree()
    rows = pair.inputs["hidden_states"]
    if pair.name == SD3:
        pair.agree(hidden_states=torch.cat([rows, rows], -1))


@either
def test_modes(pair):
    plain = pair.agree()
    pair.change(lambda m: m.train())
    pair.agree(fast=False, said="training mode")
    pair.change(lambda m: m.eval())
    with torch.autocast("cpu", torch.bfloat16):
        pair.agree(fast=False, said="autocast is on")
    with torch.enable_grad():
        pair.agree(fast=False, said="gradients are on")
    assert torch.equal(pair.agree(), plain)


@either
def test_hooks_on_all_modules_run_inside(pair):
    plain = pair.agree()
    handle = register_module_forward_hook(lambda module, args, out: out * 1.5 if type(module) is nn.Linear else None)
    try:
        hooked = pair.agree(fast=False, said="global module hooks")
    finally:
        handle.remove()
    assert not torch.equal(hooked, plain)
    assert torch.equal(pair.agree(), plain)


@either
def test_dtypes_sizes_and_other_weights(pair):
    plain = pair.agree()
    floats = {name: one.bfloat16() for name, one in pair.inputs.items() if one.is_floating_point()}
    for _ in range(2):
        pair.change(lambda m: m.to(torch.bfloat16))
        pair.agree(**floats)
        pair.change(lambda m: m.float())
        pair.agree()
    pair.agree(**{name: one[:1] if one.shape[0] == 2 else one for name, one in pair.inputs.items()})
    text = torch.randn(2, 11, 32)
    for tokens in (11, 0):
        ids = {"txt_ids": torch.zeros(tokens, 3)} if pair.name == FLUX else {}
        assert pair.agree(encoder_hidden_states=text[:, :tokens], **ids).shape == plain.shape
    pair.change(lambda m: m.load_state_dict({k: 1.1 * v for k, v in m.state_dict().items()}, assign=True))
    pair.agree()
    pair.change(lambda m: m.fuse_qkv_projections())
    pair.agree()
    pair.change(lambda m: m.unfuse_qkv_projections())
    pair.agree()


@pytest.mark.parametrize("pair", [FLUX, SD3, WAN], indirect=True)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(pair, copied):
    pair.agree()
    pair.ours = copied(pair.ours)
    assert pair.report().fallbacks == []
    pair.agree()
    pair.change(lambda m: pair.block(m).norm2.__setattr__("eps", 0.25))
    pair.agree()


@flux
def test_controlnets(pair):
    for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
        assert not torch.equal(pair.agree(**{name: [torch.randn(2, 16, 32)]}), pair.agree())


@either
def test_group_offload(pair):
    pair.agree()
    device = torch.device("cpu")
    pair.change(lambda m: m.enable_group_offload(device, device, offload_type="block_level", num_blocks_per_group=1))
    pair.agree()
    pair.agree()


@flux
def test_leaves_that_are_offloaded_run_stock(pair):
    pair.agree()
    device = torch.device("cpu")
    pair.change(lambda m: m.enable_group_offload(device, device, offload_type="leaf_level"))
    pair.agree(fast=False, said="a replaced forward")


@either
@pytest.mark.share(1)
def test_leaves_that_are_stored_in_fewer_bits(pair):
    plain = pair.agree()
    pair.change(lambda m: m.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32))
    for _ in range(2):
        assert not torch.equal(pair.agree(), plain)
    stored = [[one.view(torch.uint8) for one in m.parameters() if one.itemsize == 1] for m in (pair.ours, pair.stock)]
    assert stored[0] and all(map(torch.equal, *stored))


@flux
@pytest.mark.turns(4)
def test_compiled_blocks_are_stock_blocks(pair):
    pair.agree()
    pair.change(lambda m: m.compile_repeated_blocks(backend="eager"))
    ran = pair.plans
    with torch.no_grad():
        ours, stock = (first(model(**pair.inputs)) for model in (pair.ours, pair.stock))
    alike(ours, stock, 1e-6)
    assert pair.plans == ran
    torch.compiler.reset()


@flux
def test_caches_of_diffusers_around_blocks_and_inside(pair):
    from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig

    plain = pair.agree()
    pair.change(lambda m: m.enable_cache(FirstBlockCacheConfig(threshold=0.5)))
    ran = pair.plans
    for step in range(3):
        given = pair.inputs | {"timestep": pair.inputs["timestep"] - step / 100}
        with torch.no_grad():
            for model in (pair.ours, pair.stock):
                with model.cache_context("cond"):
                    given[model] = first(model(**{name: given[name] for name in pair.inputs}))
        alike(given[pair.ours], given[pair.stock])
    assert pair.blocks + 2 <= pair.plans - ran < 3 * pair.blocks  # the first block always, others where it says so
    pair.change(lambda m: m.disable_cache())
    inside = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1000),
        current_timestep_callback=lambda: 500,
    )
    pair.change(lambda m: m.enable_cache(inside))
    for _ in range(3):
        pair.agree(fast=False, said="a replaced forward")
    pair.change(lambda m: m.disable_cache())
    assert torch.equal(pair.agree(), plain)

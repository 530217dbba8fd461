"""`memory=`: blocks that come as they are called, with a piece of the host's memory in the place of a GPU's."""

import copy
import threading
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from diffusers import StableDiffusionXLPipeline
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from peft.tuners.lora import Linear

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.diffusion import tiling
from accel.fusion.stacked_linears import stacked_rows
from accel.offload.blocks import nbytes, sizes_of
from accel.offload.call_hooks import streamed_model as streamed
from accel.offload.ring import Ring
from support.diffusion.library_formats import in_blocks, quantized
from support.llm.families import make, padded
from support.noted import noted
from support.objects.seq2seq import OTHERS
from support.objects.streaming import (
    aligning_hooks,
    bert,
    dit,
    flux,
    levels,
    llama,
    rwkv,
    same,
    stored,
    t5,
    unet,
    within,
)

pytestmark = pytest.mark.usefixtures("streaming")


@pytest.mark.parametrize(("name", "weights"), [("llama", "int8"), ("llama", "int4"), ("deepseek-v3", "int8")])
@torch.no_grad()
def test_quantized_blocks_stream(name, weights):
    model = make(name, num_hidden_layers=4, **({"hidden_size": 128} if name == "llama" else {}))
    ids = torch.randint(0, 64, (2, 9))
    twin = accel.optimize(copy.deepcopy(model), weights=weights)
    wanted = twin(ids).logits
    accel.optimize(model, weights=weights, memory=within(twin, 0.9))
    for _ in range(3):
        assert torch.equal(model(ids).logits, wanted)
    attention = model.model.layers[0].self_attn
    if name == "llama":
        assert stacked_rows([attention.q_proj.data, attention.k_proj.data, attention.v_proj.data]) is not None
    assert streamed(model).streamed and not accel.report(model).fallbacks


@pytest.mark.parametrize("held", [partial(in_blocks, name="Q8_0"), partial(quantized, format="bitsandbytes-nf4")])
@torch.no_grad()
def test_blocks_in_the_formats_of_libraries_stream(held):
    def made():
        torch.manual_seed(0)
        model, call = flux()
        model = held(model, dtype=torch.float32)
        for linear in model.modules():
            linear.support_avx512bf16_for_cpu = False  # where a first call would pack weights
        return model, call

    (model, call), (fast, _) = made(), made()
    wanted, before = call(accel.optimize(fast)), stored(model)
    sizes = sizes_of(model)
    accel.optimize(model, memory=int(1.1 * sizes.total - sum(sizes.blocks) + 2 * max(sizes.blocks)))
    for _ in range(3):
        assert torch.equal(call(model), wanted)
        same(model, before)
    assert len(streamed(model).streamed) > 4 and not accel.report(model).fallbacks
    assert {type(one) for one in model.parameters()} > {torch.nn.Parameter}
    accel.restore(model)
    same(model, before)


@pytest.mark.parametrize("make", [flux, llama, t5, bert, levels, unet])
@pytest.mark.parametrize("share", [0.5, 1.0])
@torch.no_grad()
def test_blocks_stream_and_results_are_the_same(make, share):
    model, call = make()
    before, places = stored(model), [p.data_ptr() for p in model.parameters()]
    fast = accel.optimize(copy.deepcopy(model))
    wanted, stock = call(fast), call(copy.deepcopy(model))
    assert float((wanted - stock).abs().max()) < 1e-4
    accel.optimize(model, memory=within(fast, share))
    for _ in range(3):
        apart = float((call(model) - wanted).abs().max())
        assert apart < 2e-6 if make is t5 else apart == 0  # whose first token is stock's then
        same(model, before)  # outside of calls, all can be read
    blocks = len(sizes_of(model).blocks) if share == 1.0 else None
    found = streamed(model)
    assert 0 < len(found.streamed) <= len(found.order) and blocks in (None, len(found.streamed), len(found.order))
    assert share == 1.0 or len(found.streamed) < len(found.order)
    assert found.on_card <= found.budget.card
    assert not accel.report(model).fallbacks
    assert {where.split(",")[0] for _, rule, _, where in accel.report(model).sites if rule == "memory"} >= {"ring"}
    accel.restore(model)
    same(model, before)
    assert torch.equal(call(model), stock) and len(places) == len(list(model.parameters()))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("make", [dit, rwkv])
@pytest.mark.share(1)
@torch.no_grad()
def test_weights_of_a_block_that_others_read_stay(make):
    """They are brought where a first call shows them, and changes in place are kept."""
    model, call = make()
    twin = accel.optimize(copy.deepcopy(model))
    sizes, wanted = sizes_of(model), [call(twin) for _ in range(3)]
    accel.optimize(model, memory=sizes.on_card(range(5)) + (2 if make is dit else 5) * sizes.blocks[0] // 2)
    assert all(torch.equal(call(model), one) and streamed(model).streamed for one in wanted)
    assert streamed(model).reads.apart and not accel.report(model).fallbacks
    accel.restore(model)
    same(model, stored(accel.restore(twin)))


@pytest.mark.parametrize("name", ["gpt-neo", "longcat", "LongT5"])  # masks, lists, own code around attention in layers
@torch.no_grad()
def test_guards_of_layers_see_nothing_of_a_budget(name):
    model, (ids, mask) = OTHERS[name]().eval() if name in OTHERS else make(name), padded()
    ids = ids % 60
    told = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    wanted = copy.deepcopy(model).generate(ids, **told)
    accel.optimize(model, memory=int(1.5 * nbytes(model)))  # of which the first call streams every block
    assert (
        torch.equal(model.generate(ids, **told), wanted) and streamed(model).order and not accel.report(model).fallbacks
    )


@torch.no_grad()
@pytest.mark.turns(2)
def test_an_encoder_that_generate_calls_finds_its_blocks_on_the_way(monkeypatch):
    """And the decoder its own, in each step."""
    model, call = t5()
    accel.optimize(model, memory=within(model, 1.0))
    call(model)
    late, take = [], Ring.take
    monkeypatch.setattr(Ring, "take", lambda ring, i: (late.append(i not in ring.held), take(ring, i)))
    call(model)
    assert len(late) == 5 + 4 * 5 and not any(late)


@torch.no_grad()
def test_an_error_in_a_block_and_calls_of_another_thread_leave_it_in_order():
    model, call = flux()
    wanted = call(accel.optimize(copy.deepcopy(model)))
    accel.optimize(model, memory=within(model, 1.0))
    broken = model.single_transformer_blocks[2].register_forward_pre_hook(lambda *given: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            call(model)
    broken.remove()
    got = []
    threads = [threading.Thread(target=lambda: got.append(call(model))) for _ in range(3)]
    with torch.no_grad():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(call(model), wanted)
    assert len(got) == 3 and all(float((one - wanted).abs().max()) < 1e-5 for one in got)


def places_of(held, layer, name):
    """Of a layer's weight and its adapter: whether they are on the card."""
    start, tensors = held.arena.data_ptr(), (layer.base_layer.weight, layer.lora_B[name].weight)
    return {0 <= one.data_ptr() - start < held.arena.nbytes for one in tensors}


CHANGES = ["data", "loaded", "moved", "cast", "adapter", "merged, then off", "called, then merged", "copied"]
FOLLOWED = [(flux, one) for one in CHANGES]


@pytest.mark.parametrize(("make", "change"), [*FOLLOWED, (unet, "cast"), (unet, "copied")])
@torch.no_grad()
def test_what_changes_between_calls_is_followed(make, change, monkeypatch):
    model, call = make()
    twin = copy.deepcopy(model)
    accel.optimize(model, memory=within(model, 0.9))
    call(model)
    summed: list = []
    for one in (model, twin):
        if change == "data":
            one.single_transformer_blocks[0].proj_out.weight.data += 0.1
            one.proj_out.weight.data += 0.1
        elif change == "loaded":
            one.load_state_dict({name: value * 1.5 for name, value in stored(one).items()})
        elif change == "moved":
            one.x_embedder.weight.data = one.x_embedder.weight.data.clone()
            weight = one.transformer_blocks[1].attn.to_q.weight
            weight.data = weight.data.clone()
        elif change == "cast":
            one.to(torch.bfloat16).to(torch.float32)
        elif change in ("adapter", "merged, then off", "called, then merged"):
            torch.manual_seed(1)
            one.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        if change == "merged, then off":  # peft takes it out of the weight in the next call
            one.fuse_lora()
            one.disable_adapters()
        if change == "called, then merged":  # by now adapters are on the card, and what they belong to may not be
            call(one), call(one)
            with monkeypatch.context() as now:
                noted(now, Linear, "get_delta_weight", partial(places_of, streamed(model)), into=summed)
                one.fuse_lora()
    merged = change == "called, then merged"
    assert not merged or ({True} < set().union(*summed) and all(len(places) == 1 for places in summed))
    if change == "copied":
        model = copy.deepcopy(model)
    for _ in range(2):
        assert float((call(model) - call(twin)).abs().max()) < 2e-5
    with streamed(model).one_call():  # before which adapters are read for graphs
        assert all(torch.equal(one, stored(twin)[name]) for name, one in stored(model).items() if "lora" in name)
    accel.restore(model)
    assert not any("merge" in vars(one) for one in model.modules())
    same(model, stored(twin))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_a_part_called_by_itself_is_a_call(name):
    """As `generate` calls an encoder: weights are where they belong afterwards, and changes are followed."""
    model = make(name, num_hidden_layers=4)
    ids, twin = torch.randint(0, 64, (2, 9)), accel.optimize(copy.deepcopy(model))
    accel.optimize(model, memory=int(1.1 * sizes_of(twin).least()))
    weight = "model.layers.1.mlp.experts.down_proj" if name == "mixtral" else "model.layers.1.mlp.down_proj.weight"

    def exchange(one):
        one.get_parameter(weight).data = one.get_parameter(weight).data * 1.5

    for change in (exchange, lambda one: one.to(torch.bfloat16)):
        assert torch.equal(model.model(ids)[0], twin.model(ids)[0])
        assert len(streamed(model).streamed) == 4
        same(model, stored(twin))
        for one in (model, twin):
            change(one)
        assert torch.equal(model.model(ids)[0], twin.model(ids)[0])
    assert not streamed(model).lock.locked()
    accel.restore(model)
    same(model, stored(twin))


@torch.no_grad()
@pytest.mark.turns(2)
def test_models_of_a_pipeline_take_turns(sdxl_pipe, live, monkeypatch):
    monkeypatch.setattr(tiling, "PLANES", 0)  # what tiles would change
    twin, before = copy.deepcopy(sdxl_pipe), stored(sdxl_pipe.unet)
    wanted = live.draw(twin, 1)
    accel.optimize(sdxl_pipe, memory=int(0.6 * nbytes(sdxl_pipe.unet)), layout="keep")
    seen = []  # states of the model, of which each has graphs of its own

    def look(*given):
        if not (seen and seen[-1].holds() and seen[-1].reachable()):
            seen.append(Fingerprint(sdxl_pipe.unet))

    live.draw(sdxl_pipe, 1)
    watch = sdxl_pipe.unet.time_embedding.register_forward_pre_hook(look)
    for _ in range(2):
        assert live.rms(live.draw(sdxl_pipe, 1), wanted) < 1e-4
        assert streamed(sdxl_pipe.unet) is not None and streamed(sdxl_pipe.unet).arena is None
    watch.remove()
    assert len(seen) == 1 and not accel.report(sdxl_pipe).fallbacks
    accel.restore(sdxl_pipe)
    same(sdxl_pipe.unet, before)
    assert not any(hasattr(one, "_hf_hook") for one in sdxl_pipe.unet.modules())
    assert "forward" not in vars(sdxl_pipe.vae) and not {"_all_hooks", "_offload_device"} & set(vars(sdxl_pipe))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in sdxl_pipe.unet.modules())
    assert live.rms(live.draw(sdxl_pipe, 1), wanted) < 1e-4


class Combined(StableDiffusionXLPipeline):
    """Its models are those of a pipeline inside, which has the hooks, as Kandinsky's and Stable Cascade's are."""

    def enable_model_cpu_offload(self, gpu_id=None, device=None):
        self.inside.enable_model_cpu_offload(gpu_id=gpu_id, device=device)


class Chained(StableDiffusionXLPipeline):
    """It keeps the last of its hooks alone, as AudioLDM2 does."""

    def enable_model_cpu_offload(self, gpu_id=None, device=None):
        hook = None
        for model in (self.text_encoder, self.text_encoder_2, self.unet, self.vae):
            hook = cpu_offload_with_hook(model, torch.device(device), prev_module_hook=hook)[1]
        self.final_offload_hook = hook


@pytest.mark.parametrize("kind", [Combined, Chained])
@torch.no_grad()
def test_a_pipeline_with_a_switch_of_its_own(kind, sdxl_pipe, live, monkeypatch):
    monkeypatch.setattr(tiling, "PLANES", 0)
    wanted, pipe = live.draw(sdxl_pipe, 1), kind(**sdxl_pipe.components)
    drawing = pipe.inside = sdxl_pipe if kind is Combined else None
    before = set(vars(drawing or pipe))
    accel.optimize(pipe, memory=int(0.6 * nbytes(pipe.unet)), layout="keep")
    assert live.rms(live.draw(drawing or pipe, 1), wanted) < 1e-4 and streamed(pipe.unet)
    accel.restore(pipe)
    assert not {"_all_hooks", "final_offload_hook", "enable_model_cpu_offload"} & (set(vars(drawing or pipe)) - before)
    assert not any(hasattr(one, "_hf_hook") for one in pipe.unet.modules())


@pytest.mark.parametrize("memory", [None, 10**6])  # of its own
@pytest.mark.share(1)
@torch.no_grad()
def test_a_model_that_is_fused_while_its_pipeline_streams_it(memory, sdxl_pipe, tiny):
    """By now keys and values of all blocks are computed by the first of them, of weights that came with each."""
    model, given = sdxl_pipe.unet, tiny.inputs(sdxl_pipe.unet)
    wanted = copy.deepcopy(model)(**given).sample
    accel.optimize(sdxl_pipe, memory=int(0.6 * nbytes(model)), layout="keep")
    for change in (accel.restore, partial(accel.optimize, layout="keep", memory=memory)):
        change(model)  # other weights stay where they are
        assert float((model(**given).sample - wanted).abs().max()) < 1e-5
    assert streamed(model).streamed


@pytest.mark.parametrize("kind", ["sequential", "groups", "spread"])
@torch.no_grad()
def test_stocks_own_offload_is_taken_over_and_given_back(kind):
    model, call = llama() if kind == "spread" else flux()
    before, wanted = stored(model), call(accel.optimize(copy.deepcopy(model)))
    if kind == "spread":
        layers = {f"model.layers.{i}": "cpu" for i in range(6)}
        others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        dispatch_model(model, others | layers, main_device="cpu", skip_keys="cache", force_hooks=True)
    elif kind == "sequential":
        cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    else:
        apply_group_offloading(model, torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    kinds, hooks = [set(vars(one)) for one in model.modules()], aligning_hooks(model)
    accel.optimize(model, memory=within(model, 0.5))
    assert torch.equal(call(model), wanted) and streamed(model).streamed
    same(model, before)
    accel.restore(model)
    assert [set(vars(one)) for one in model.modules()] == kinds and aligning_hooks(model) == hooks
    assert float((call(model) - wanted).abs().max()) < 1e-5

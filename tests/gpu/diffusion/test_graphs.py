"""CUDA graphs of denoisers: never stale, never aliased, and as near to the truth as stock."""

import copy

import pytest
import torch

import accel
from accel.cuda_graphs.runner import PATIENCE
from support.diffusion.gpu import close, graphs, on_gpu, warmed
from support.diffusion.outputs import run


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_error_against_fp32_is_at_most_twice_stock(tiny, family, dtype):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    reference = tiny.unet(family).cuda()
    inputs = on_gpu(tiny.inputs(reference, height=24, width=16), dtype)
    exact = run(copy.deepcopy(reference).double(), on_gpu(inputs, torch.float64))
    model = reference.to(dtype)
    stock = run(model, inputs)
    accel.optimize(model, graphs=True)
    for _ in range(3):  # eager, capture, replay
        ours = run(model, inputs)
        error, allowed = (float((t.double() - exact).abs().max()) for t in (ours, stock))
        assert error <= 2 * allowed + 1e-6
    assert graphs(model)
    accel.restore(model)
    assert torch.equal(run(model, inputs), stock)


def test_outputs_are_never_aliased(pair, tiny):
    model, twin = pair
    first, second = (on_gpu(tiny.inputs(model, seed=seed)) for seed in (1, 2))
    warmed(model, first)
    a = run(model, first)
    kept = a.clone()
    b = run(model, second)
    assert torch.equal(a, kept)
    close(b, run(twin, second))


def test_numbers_as_timesteps_share_one_graph(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    for step in (999, 500, 20, 3.5, 7.25, 1.0):
        close(run(model, inputs | {"timestep": step}), run(twin, inputs | {"timestep": step}))
    assert len(graphs(model)) == 2  # integers and floats


def doubled(kind):
    class Doubled(kind):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    return Doubled


def adapted(unet):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))


def processed(unet):
    attention = block_of(unet).attn1
    inner = attention.processor
    attention.set_processor(lambda *args, **kwargs: 2 * inner(*args, **kwargs))


def block_of(unet):
    return unet.mid_block.attentions[0].transformer_blocks[0]


def weight_of(unet):
    return unet.mid_block.resnets[0].conv1.weight


CHANGES = {
    "in place": lambda unet: weight_of(unet).data.mul_(-1),
    "new data": lambda unet: setattr(weight_of(unet), "data", -weight_of(unet).data),
    "lora": adapted,
    "processor": processed,
    "freeu": lambda unet: unet.enable_freeu(0.9, 0.2, 1.3, 1.4),
    "dtype": lambda unet: unet.to(torch.bfloat16),
    "hook": lambda unet: unet.mid_block.register_forward_hook(lambda module, args, output: 2 * output),
    "class": lambda unet: setattr(block_of(unet), "__class__", doubled(type(block_of(unet)))),
    "part": lambda unet: setattr(unet.mid_block.resnets[0], "nonlinearity", torch.nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_never_replays_the_old_graph(pair, tiny, change):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    before = run(model, inputs)
    for unet in (model, twin):
        CHANGES[change](unet)
    if change == "dtype":
        inputs = on_gpu(inputs, torch.bfloat16)
    wanted = run(twin, inputs)
    for _ in range(3):
        close(run(model, inputs), wanted, 4e-2 if change == "dtype" else 4e-3)
    assert not torch.equal(wanted.to(before.dtype), before)


def test_a_processor_that_keeps_state_is_never_captured(pair, tiny):
    model, _ = pair
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn1
    seen = []

    def storing(attn, hidden_states, *args, inner=attention.processor, **kwargs):
        seen.append(1)
        return inner(attn, hidden_states, *args, **kwargs)

    attention.set_processor(storing)
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model)
    for _ in range(4):
        run(model, inputs)
    assert len(seen) == 4 and not graphs(model)
    assert any("may keep state" in reason for _, reason, _ in accel.report(model).fallbacks)


def test_inference_mode_and_no_grad_share_graphs(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    with torch.inference_mode():
        for _ in range(3):
            got = model(**inputs).sample
    close(got, run(twin, inputs))
    close(run(model, inputs), run(twin, inputs))
    assert len(graphs(model)) == 1


def test_moving_away_and_back(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    model.to("cpu")
    torch.cuda.empty_cache()
    model.to("cuda")
    for _ in range(3):
        close(run(model, inputs), run(twin, inputs))


def test_no_layout_copy_kernels_in_a_replay(tiny):
    model = tiny.unet("sdxl").cuda().half()
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(model, inputs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names and not [name for name in names if "nchwToNhwc" in name or "nhwcToNchw" in name]


def test_a_vae_in_half_precision(tiny):
    vae = tiny.vae().cuda().half()
    twin = copy.deepcopy(vae)
    accel.optimize(vae, graphs=True)
    latent = torch.randn(1, 4, 16, 12, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        for _ in range(3):
            close(vae.decode(latent).sample, twin.decode(latent).sample)
    assert [row["path"] for row in graphs(vae)] == ["decoder"]


def test_what_is_made_of_the_prompt_is_kept_for_a_loop_and_never_longer(pair, tiny):
    """The same tensor, refilled in place, freed and made anew, with other weights in a new loop, without versions."""
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    loop = vars(model)["forward"].loop
    wide = sum("attn2.to_" in name for name, _ in model.named_parameters())

    def check(mode=torch.no_grad, **changed):
        inputs.update(changed)
        with mode():
            for _ in range(3):
                inputs["sample"] = torch.randn_like(inputs["sample"])
                close(model(**inputs).sample, twin(**inputs).sample)

    loop.begin()
    check()
    assert wide and [row for row in graphs(model) if "prompt kept" in row["inputs"]]
    inputs["encoder_hidden_states"].mul_(-1)
    check()
    for seed in range(3):  # likely in the memory of the one before
        shape = inputs.pop("encoder_hidden_states").shape
        torch.manual_seed(seed)
        check(encoder_hidden_states=torch.randn(shape, device="cuda", dtype=torch.float16))
    for unet in pair:
        for name, parameter in unet.named_parameters():
            if "attn2.to_v" in name:
                parameter.data.mul_(-2)  # seen by no version
    loop.begin()
    check()
    with torch.inference_mode():
        prompt = inputs["encoder_hidden_states"].clone()
    check(torch.inference_mode, encoder_hidden_states=prompt)
    with torch.inference_mode():
        prompt.mul_(-1)
    check(torch.inference_mode)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))


def test_what_one_size_settled_serves_the_next(pair, tiny):
    """Calls of new sizes run while their kernels are chosen, and are captured soon; all are right."""
    model, twin = pair
    accel.optimize(model, graphs=True)
    for calls, (height, width) in ((2, (16, 16)), (PATIENCE + 1, (24, 16)), (PATIENCE + 1, (12, 20))):
        inputs = on_gpu(tiny.inputs(model, height=height, width=width))
        for _ in range(calls):
            close(run(model, inputs), run(twin, inputs))
    assert len(graphs(model)) == 3 and not accel.report(model).fallbacks


def test_adapters_are_switched_without_another_capture(pair, tiny):
    peft = pytest.importorskip("peft")
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))

    def change(function):
        for unet in (model, twin):
            torch.manual_seed(3)
            function(unet)
            unet.requires_grad_(False).eval()
        return run(twin, inputs)

    def put(name, rank):
        config = {"target_modules": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj"], "init_lora_weights": False}
        return lambda unet: unet.add_adapter(peft.LoraConfig(r=rank, **config), adapter_name=name)

    change(put("style", 4))
    warmed(model, inputs)
    runner = vars(model)["forward"].runner
    close(run(model, inputs), change(lambda unet: None))
    captured = [entry.graph for entry in runner.entries.values()]
    for function in (
        put("detail", 8),
        lambda unet: unet.set_adapters(["style", "detail"], [0.5, -1.0]),
        lambda unet: unet.set_adapters(["style"], [0.7]),  # of more stock itself is off by 0.7 %
        lambda unet: unet.disable_adapters(),
        lambda unet: unet.enable_adapters(),
        lambda unet: [p.data.mul_(0.5) for name, p in unet.named_parameters() if "lora_B" in name],
    ):
        wanted = change(function)
        for _ in range(2):
            close(run(model, inputs), wanted)
        assert [entry.graph for entry in runner.entries.values()] == captured
    wanted = change(put("wide", 24))  # more than the buffers hold
    for _ in range(4):
        close(run(model, inputs), wanted)
    assert graphs(model) and captured[0] not in [entry.graph for entry in runner.entries.values()]

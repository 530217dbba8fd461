"""Routers on a GPU: stock's choices and shares, a product and one kernel each, inside the graphs of a step."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import accel
from support.llm.families import prompt
from support.llm.gpu import decode_graphs, new_pair, talk
from support.llm.near_ties import assert_routed_alike, now, routers

NAMES = ("mixtral", "qwen2-moe", "qwen3-moe", "granite-moe", "gpt-oss", "glm4-moe", "ernie-moe", "deepseek-v3")
MOST_KERNELS = 3  # cuBLAS may split a product and add the parts in a second

pytestmark = pytest.mark.usefixtures("exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_choices_and_shares_of_stock(name, dtype):
    ours, _ = new_pair(name, dtype)
    found = routers(ours)
    assert found
    for forward in found.values():
        for tokens in (1, 5, 70, 600):
            x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to("cuda", dtype)
            # Products in another order put 16 bits one digit off: of four experts two may be as good.
            least = 1.0 if dtype == torch.float32 else 0.8 if tokens > 5 else 0.0
            assert_routed_alike(forward(x), forward.stock(x), least)
    assert not [row for row in accel.report(ours).fallbacks if row[0] in found]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "glm4-moe"])
def test_a_product_and_one_kernel(name):
    ours, _ = new_pair(name, torch.bfloat16)
    for forward in routers(ours).values():
        x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
        assert 2 in now(forward).dims
        forward(x)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            forward(x)
            torch.cuda.synchronize()
        kernels = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
        assert len(kernels) <= MOST_KERNELS and sum("route_kernel" in kernel for kernel in kernels) == 1, kernels


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "glm4-moe"])
def test_in_the_graph_of_a_step(name):
    ours, stock = new_pair(name)
    ids = prompt(2, 9).cuda()
    wanted = talk(stock, ids)
    for _ in range(3):  # eager, capture, replay
        for step, logits in talk(ours, ids).items():
            torch.testing.assert_close(logits, wanted[step], rtol=1e-3, atol=1e-3)
    assert decode_graphs(ours) and not accel.report(ours).fallbacks

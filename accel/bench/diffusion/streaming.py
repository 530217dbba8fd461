"""What a budget of memory costs: calls of a model within several, beside the model that lies on the card as a whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import FORMATS
from torch import nn

import accel
from accel.bench.adapters import plain_subject
from accel.bench.budgets import Figures, within_each
from accel.bench.doctor import bandwidth, bus_rates, product_rates
from accel.bench.memory import device_bytes, device_peak, release
from accel.bench.timing import Clock, synchronize
from accel.diffusion.linears import projected_together
from accel.libraries.experts import experts_of_a_token
from accel.offload.blocks import sizes_of
from accel.offload.budget import predicted_seconds, room_for_weights, streamed_blocks
from accel.options import bytes_of
from accel.quantization.scheme import Scheme

Call = Callable[[nn.Module, int], Any]
STEPS = 4  # timed, as of a distilled model's image
WARM = 4  # before them: the first tells what a call needs, then kernels are chosen and a graph is captured


@torch.no_grad()
def measure_budgets(
    name: str, device: torch.device, budgets: list[str], weights: str | None = None, stock: bool = True
) -> Figures:
    """Seconds of STEPS calls on the card, within each budget, and by stock's model and group offload, each once it is
    known. weights: as of accel.optimize; stock's are in 16 bits.

    error: of the largest element, against the optimized model on the card; 0 is equal to the bit. Peaks are of the
    whole device, above what it had in use before the model. Raises KeyError for an unknown name.
    """
    release(device)
    before = device_bytes(device)
    model, call = plain_subject(name, device)
    if stock:
        yield "stock, on the card", _timed(model, call, device, before, warm=1)[0]
    accel.optimize(model, weights=weights)
    row, wanted = _timed(model, call, device, before)
    yield "accel, on the card", row
    for key, row, got in within_each(model, budgets, {"weights": weights}, lambda: _timed(model, call, device, before)):
        yield key, row if got is None else row | {"error": _apart(got, wanted)}
    if not stock:
        return
    accel.restore(model)
    with _model_offload(model, device) as offload:
        yield "stock, model offload", _timed(model, call, device, before, warm=1, end=offload)[0]
    with _group_offload(model, device):
        yield "stock, group offload", _timed(model, call, device, before, warm=1, steps=1)[0]


def _timed(
    model: nn.Module,
    call: Call,
    device: torch.device,
    before: int,
    warm: int = WARM,
    steps: int = STEPS,
    end: Callable[[], object] = tuple,
) -> tuple[dict, torch.Tensor]:
    for _ in range(warm):
        call(model, 0)
    end()
    release(device)
    with device_peak(device) as peak:
        clock = Clock()
        for i in range(steps):
            result = call(model, i)
        end()
        synchronize(device)
        took = clock.taken()
        result = call(model, 0)
    return {"s": round(took / steps * STEPS, 3), "peak_gb": round((peak[0] - before) / 1e9, 2)}, result


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@contextmanager
def _model_offload(model: nn.Module, device: torch.device) -> Iterator[Callable[[], object]]:
    """Inside, a call brings all of the model to the card, as a pipeline's does; what is given takes it off again."""
    import accelerate

    _, hook = accelerate.cpu_offload_with_hook(model, device)
    hook.offload()
    yield hook.offload
    hook.remove()


@contextmanager
def _group_offload(model: nn.Module, device: torch.device) -> Iterator[None]:
    from diffusers.hooks import apply_group_offloading

    model.to("cpu")
    release(device)
    streams = device.type == "cuda"
    apply_group_offloading(model, device, num_blocks_per_group=1, use_stream=streams, low_cpu_mem_usage=streams)
    yield


def speeds(device: torch.device) -> dict[str, float]:
    """Of this card, by short runs, a second: bytes from pinned memory, bytes within its own, operations in 16 bits."""
    bus, rates = dict(bus_rates(device)), dict(product_rates(device))
    rate = max(rates.get(kind, 0.0) for kind in ("float16", "bfloat16"))
    return {"bus": bus.get("pinned to device", bus["pageable to device"]), "memory": bandwidth(device), "rate": rate}


def in_fewer_bits(model: nn.Module, weights: str) -> None:
    """Gives matrices in lists of layers of a model without values the sizes that they have in this scheme."""
    scheme = Scheme.parse(weights)
    bits = FORMATS[scheme.weight_dtype].bits + (16 / scheme.group if scheme.group else 0)
    layers = (one for one in model.modules() if isinstance(one, nn.ModuleList))
    for matrix in {id(p): p for one in layers for p in one.parameters() if p.dim() > 1}.values():
        matrix.data = matrix.data[..., : -(-matrix.shape[-1] * int(bits * 64) // 1024)]


def on_paper(model: nn.Module, flops: float, beside: int | None, memory: str, known: dict[str, float]) -> dict:
    """What `memory=` would do with a model without values: blocks, bytes, seconds a call, of experts for one token.

    flops: of a call. beside: bytes that it needs beside the weights, taken for a tenth of the budget where None. known:
    as `speeds`.
    """
    sizes, budget = sizes_of(model, projected_together(model)), bytes_of("memory", memory)
    room = room_for_weights(budget, beside if beside is not None else budget // 10)
    streamed = streamed_blocks(sizes, room)
    copies, share, left = sizes.copies(streamed, room), 1.0, 1.0  # left: of what is read, off the card
    if sizes.experts:
        share = (experts_of_a_token(model) or sizes.experts) / sizes.experts
        left = 1 - copies / sizes.experts
    read = sizes.rest + share * sum(sizes.blocks)
    compute = max(flops * read / sizes.total / known["rate"], read / known["memory"])
    moved = share * left * sizes.moved(streamed)
    took = predicted_seconds(sizes, streamed, compute, known["bus"], 1.0)
    return {
        "weights_gb": sizes.total / 1e9,
        "fits": sizes.on_card(streamed) <= room,
        "blocks": len(sizes.blocks),
        "streamed": len(streamed),
        "experts": f"{copies} of {sizes.experts}" if sizes.experts and streamed else "-",
        "on_card_gb": sizes.on_card(streamed, copies) / 1e9,
        "moved_gb": moved / 1e9,
        "resident_s": compute,
        "seconds": compute + moved / known["bus"] if sizes.experts else took,
    }

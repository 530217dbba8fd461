"""What a budget of memory costs: calls of a model within several, beside the model that lies on the card as a whole."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import FORMATS
from torch import nn
from torch.nn.modules.conv import _ConvNd

import accel
from accel.bench.adapters import plain_subject
from accel.bench.budgets import Figures, within_each
from accel.bench.doctor import bandwidth, bus_rates, product_rates
from accel.bench.memory import device_bytes, device_peak, release
from accel.bench.timing import Clock, synchronize
from accel.diffusion.linears import denoises, projected_together, sensitive_linears
from accel.libraries.experts import experts_of_a_token
from accel.offload.blocks import sizes_of
from accel.offload.budget import WeightSizes, predicted_seconds, room_for_weights, streamed_blocks
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


def left_as_they_are(model: nn.Module, weights: str) -> set[nn.Module]:
    """Parts of a model without values that `accel.optimize(weights=)` does not quantize, in lists of layers too."""
    scheme = Scheme.parse(weights)
    shapes = ((part, one.shape) for part in model.modules() for one in part.parameters(recurse=False))
    odd = {part for part, shape in shapes if len(shape) > 1 and scheme.refuses(shape[-1]) is not None}
    return odd | sensitive_linears(model).keys() if denoises(model) else odd


def in_fewer_bits(model: nn.Module, weights: str, kept: Container[nn.Module] = ()) -> None:
    """Gives the matrices of linears and experts in lists of layers of a model without values, but for those kept, the
    sizes that they have in this scheme.
    """
    scheme = Scheme.parse(weights)
    bits = FORMATS[scheme.weight_dtype].bits + (16 / scheme.group if scheme.group else 0)
    layers = (part for one in model.modules() if isinstance(one, nn.ModuleList) for part in one.modules())
    held = (one for one in layers if one not in kept and not isinstance(one, nn.Embedding | _ConvNd))
    found = {id(one): one for part in held for one in part.parameters(recurse=False) if one.dim() > 1 < one.shape[0]}
    for matrix in found.values():
        matrix.data = matrix.data[..., : ceil(matrix.shape[-1] * int(bits * 64) / (512 * matrix.itemsize))]


def on_paper(
    model: nn.Module, flops: float, beside: int | None, memory: int, known: dict[str, float], whole: bool = False
) -> dict:
    """What `memory=` would do with a model without values: blocks, bytes, seconds a call, of experts for one token.

    flops: of a call. beside: bytes that it needs beside the weights, taken for a tenth of the budget where None. known:
    as `speeds`. memory: bytes of the budget. whole: it comes in one piece.
    """
    sizes = sizes_of(model, projected_together(model))
    sizes = WeightSizes(sizes.total, ()) if whole else sizes
    room = room_for_weights(memory, beside if beside is not None else memory // 10)
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

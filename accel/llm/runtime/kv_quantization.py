"""Which layers' keys and values may be kept in 8 bits: those whose scores stay what they were.

One scale a token and head serves all channels. Where a projection has a bias, a few channels of the keys can be
constants a hundred times larger than what tells tokens apart (Qwen2.5). The step that fits those leaves nothing of
the others. A constant is no use to attention, but the size of the keys hides that: measured is what the rounding does
to scores, against how much the scores of different tokens at one position differ.
"""

from collections.abc import Iterable

import torch
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.device import Feature, lacks

from accel.errors import Refused
from accel.llm.attention.attention import AttentionSpec
from accel.llm.attention.latent_attention import LatentSpec
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.recording.record import LayerRecord
from accel.parallel.ranks import Ranks

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Decibels of the scores. Keys without outliers keep 42 in int8 and 31 in fp8. At 18 a score is off by an eighth of what
# scores differ by. Of one layer of the shipped text model, with a bias planted, 21.5 dB cost 0.03 % of perplexity, 13.5
# cost 0.2 % and 1 cost 1.7 %: docs/measurements/quantization.md.
LEAST = 18.0
HARMLESS = 0.01  # off by which (root mean square) a score changes its weight by one percent: whatever the decibels


def kv_dtype_for(kind: str, device: torch.device) -> torch.dtype:
    """The dtype of kv_cache=kind. Raises ValueError where the device cannot convert it."""
    if kind == "fp8" and (reason := lacks(device, Feature.FLOAT8)) is not None:
        raise Refused(f"kv_cache='fp8' on {reason}, which came with compute capability 8.9; give 'int8' or None")
    return KV_DTYPES[kind]


def key_decibels(
    query: torch.Tensor, keys: torch.Tensor, scale: float, kv_dtype: torch.dtype, harmless: float = HARMLESS
) -> float:
    """What rounding leaves of the scores of the worst head; inf where it changes none by more than `harmless`.

    query: (rows, heads, tokens, D), keys: (rows, kv heads, tokens, D), of at least two different rows. Signal is the
    difference between the keys of two rows at the same position: what depends on the position alone cancels.
    """
    wide = torch.float64
    rounded_keys = restored(*rounded(keys, kv_dtype), wide)
    query, keys = query.to(wide) * scale, keys.to(wide)
    groups = query.shape[1] // keys.shape[1]

    def power(other: torch.Tensor) -> torch.Tensor:
        """(heads,): mean square of the products of all queries with these keys."""
        q, k = (t.transpose(0, 1).flatten(1, 2) for t in (query, other.repeat_interleave(groups, dim=1)))
        return (q @ k.mT).square().mean((1, 2))

    noise, signal = power(rounded_keys - keys), power(keys - keys.roll(1, 0)) / 2
    found = torch.where(noise.sqrt() <= harmless, torch.inf, 10 * torch.log10(signal / noise))
    return float(found.min())


def choose_kv_dtypes(
    kind: str, device: torch.device, layers: Iterable[tuple[LayerRecord, AttentionSpec]], ranks: Ranks | None = None
) -> tuple[dict[int, torch.dtype | None], list[str]]:
    """Every layer's 8-bit dtype, by its place in the cache; None, with a reason, for one that stays as it is.

    layers: as a stock run on random tokens was recorded. ranks: that hold other heads of them; the worst head of all
    counts.
    """
    kv_dtype, left = kv_dtype_for(kind, device), []
    chosen: dict[int, torch.dtype | None] = {}
    for layer, spec in layers:
        if isinstance(spec, LatentSpec):
            found = _latent_decibels(layer, spec, kv_dtype)
        elif isinstance(spec, SoftmaxSpec):
            query, scale = _queries(layer, spec)
            found = key_decibels(query, layer.cached.keys, scale, kv_dtype)
        else:  # it keeps states, which are not rounded
            chosen[spec.index] = None
            continue
        if ranks is not None:
            found = -float(ranks.largest(torch.tensor(-found, dtype=torch.float64, device=device)))
        chosen[spec.index] = kv_dtype if found >= LEAST else None
        if chosen[spec.index] is None:
            left.append(f"{layer.path}: {found:.0f} dB")
    return chosen, left


def _queries(layer: LayerRecord, spec: SoftmaxSpec) -> tuple[torch.Tensor, float]:
    """Queries as the layer has them, (rows, heads, tokens, D), and the scale of their scores."""
    rows, _, tokens, dim = layer.cached.keys.shape
    if layer.attended is not None:
        given = layer.attended.options.get("scaling")
        return layer.attended.query, dim**-0.5 if given is None else given
    # An attention of the model's own shows none: any will do.
    query = torch.randn(rows, spec.heads, tokens, dim, generator=torch.Generator().manual_seed(0), device="cpu")
    return query.to(layer.cached.keys), spec.scale


def _latent_decibels(layer: LayerRecord, spec: LatentSpec, kv_dtype: torch.dtype) -> float:
    """The least of what rounding leaves of scores and of values, as `key_decibels`, both products with latents."""
    assert layer.attended is not None
    query, latents, given = layer.attended.query, layer.cached.keys, layer.attended.options.get("scaling")
    keys, values = (product.double() for product in spec.products(layer.layer))
    absorbed = query[..., : spec.nope].double() @ keys
    scale = query.shape[-1] ** -0.5 if given is None else given
    of_values = key_decibels(values[None], latents, 1.0, kv_dtype, harmless=0.0)
    return min(key_decibels(absorbed, latents, scale, kv_dtype), of_values)


def described(kind: str, shapes: tuple, left: list[str]) -> str:
    """For the report: what a token takes, and which layers are left as they are."""
    now, before = (sum(s.size for s in some) for some in (shapes, [shape.exact for shape in shapes]))
    if now == before and not left:
        return f"nothing in {kind}: states stay as they are"
    text = f"keys and values in {kind}: {now} bytes a token instead of {before}"
    if not left:
        return text
    return f"{text}; in {rounding_loss(left, shapes[0].dtype)}"


def rounding_loss(left: list[str], dtype: torch.dtype) -> str:
    """For the report: where keys stay in a dtype, as rounded ones would lose too much."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} where rounded keys leave scores less than {LEAST:.0f} dB: {', '.join(left)}"

"""Which encoder-decoder models have their steps run over a cache at fixed addresses, and the trial that says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accel_kernels.attention.math_attention import math_attention
from torch.utils._python_dispatch import TorchDispatchMode

from accel.comparison import relative_rms
from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.rule import graph_obstacle
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Unfit, reason_of
from accel.libraries.cache import ENCODED, ENCODER_MASK, MASK, TOKENS, DynamicCache, DynamicLayer, cache_of, encoded
from accel.libraries.models import is_seq2seq
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import model_side_effects, resting
from accel.patching.fast_forward import as_written
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import meta_weights, placement, side_effects
from accel.seq2seq.decoder import Seq2SeqForward
from accel.tolerances import LOGITS, bound

ROWS, BEGUN, STEPS, FRAMES = 2, 3, 2, 12  # of a trial: tokens of the decoder before its steps, and of the encoder
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


def match_seq2seq(site: Site, context: Context) -> Match | Skip | None:
    """The model that generates."""
    model: Any = site.module
    if site.path or not is_seq2seq(model):
        return None
    if context.options.graphs is False:
        return Skip("graphs=False, and its steps gain by them alone")
    forward = Seq2SeqForward(model, site.path, context.kernels, context.log, runner=None)
    reason = "weights are not loaded (meta device)" if meta_weights(model) else None
    reason = reason or side_effects(model) or model_side_effects(model)
    try:
        if reason is None:
            _try(forward)
    except NotUnderstood as error:
        reason = str(error)
    if reason is not None:
        # With strict=True its encoder, and norms, count as nothing left out.
        return None if context.options.strict else Skip(f"its steps run stock: {reason}")
    keep = context.options.graphs is True
    forward.runner = GraphRunner(model, "", context.of(GraphPool), context.log, graph_obstacle, keep)
    device = placement(model)[0].type
    waits = "" if device == "cuda" else f"; CUDA graphs wait for CUDA; the model is on {device}"
    return Match(
        forward, covers=(), note=f"steps of the decoder in one graph; the encoder and the first tokens as stock{waits}"
    )


class Waits(TorchDispatchMode):
    """Sees what a step asks the device for, which no graph can. found: the first such operation."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.name().partition(".")[0] in WAITS:
            self.found = self.found or func.name()
        return func(*args, **(kwargs or {}))


def _try(forward: Seq2SeqForward) -> None:
    """Compares small texts with stock, and finds out which masks it reads. Raises NotUnderstood where they differ."""
    model = forward.module
    device, dtype = placement(model)
    generator = torch.Generator().manual_seed(0)
    width = getattr(getattr(model.get_encoder(), "config", None), "hidden_size", None)
    words = getattr(model.get_decoder().get_input_embeddings(), "weight", None)
    if not isinstance(width, int) or words is None:
        raise NotUnderstood("its encoder's width, or its decoder's table of words, is in another place")
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.get_decoder().config).layers):
        raise NotUnderstood("its cache keeps other things than keys and values of all tokens")  # as of a window
    hidden = torch.randn(ROWS, FRAMES, width, generator=generator, device="cpu").to(device, dtype)
    ids = torch.randint(words.shape[0], (ROWS, BEGUN + STEPS), generator=generator, device="cpu").to(device)
    mask = torch.ones(ROWS, FRAMES, dtype=torch.int64, device=device)
    mask[1, FRAMES // 2 :] = 0
    padding = torch.ones_like(ids)
    padding[1, : BEGUN - 1] = 0
    with resting(model), math_attention(), _alone(forward):
        try:
            with as_written():
                plain, hiding = (_run(forward, hidden, ids, given) for given in ({}, {ENCODER_MASK: mask}))
            forward.output = type(plain[0])
            forward.masked = not (_same(plain, hiding) and _ignores_masks(forward, hidden, ids, plain))
            _compare(forward, hidden, ids, {}, plain)
            _compare(forward, hidden, ids, {ENCODER_MASK: mask}, hiding)
        except (NotUnderstood, Unfit):
            raise
        except Exception as error:  # whatever a forward may raise
            raise NotUnderstood(f"the trial raised {reason_of(error)}") from error
        if MASK in forward.names:
            forward.padded = True
            try:
                with as_written():
                    wanted = _run(forward, hidden, ids, {MASK: padding})
                _compare(forward, hidden, ids, {MASK: padding}, wanted)
            except Exception as error:  # stock refuses it, or takes it in another way
                reason_of(error)
                forward.padded = False


def _same(these: list, those: list) -> bool:
    return all(torch.equal(one.logits, other.logits) for one, other in zip(these, those, strict=True))


def _ignores_masks(forward: Seq2SeqForward, hidden: torch.Tensor, ids: torch.Tensor, plain: list) -> bool:
    """Whether a mask of the encoder's tokens may be of any form, as nobody reads it."""
    try:
        with as_written():
            return _same(plain, _run(forward, hidden, ids, {ENCODER_MASK: ids.new_ones(ROWS, FRAMES + 1)}))
    except Exception as error:  # as its sizes are those of no tokens
        reason_of(error)
        return False


@contextmanager
def _alone(forward: Seq2SeqForward) -> Iterator[None]:
    """After it the forward holds nothing of what it was tried on."""
    try:
        yield
    except Unfit as unfit:
        raise NotUnderstood(str(unfit)) from unfit
    finally:
        forward.renew()


def _run(
    forward: Seq2SeqForward, hidden: torch.Tensor, ids: torch.Tensor, more: dict, waits: Waits | None = None
) -> list:
    """What the steps behind the first tokens return; stock's without `waits`."""
    found: list[Any] = []
    cache = None
    for end in range(BEGUN, BEGUN + STEPS + 1):
        given = {TOKENS: ids[:, :end] if cache is None else ids[:, end - 1 : end], ENCODED: encoded(hidden), **more}
        given |= {MASK: more[MASK][:, :end]} if MASK in more else {}
        given |= {forward.cache_name: cache, "use_cache": True, "return_dict": True}
        if cache is None or waits is None:
            result = forward.stock(**given)
        else:
            with waits:
                result = forward.fast(**given)
        found += [] if cache is None else [result]
        cache = cache_of(result)
    return found


def _compare(forward: Seq2SeqForward, hidden: torch.Tensor, ids: torch.Tensor, more: dict, wanted: list) -> None:
    """Raises NotUnderstood."""
    waits = Waits()
    got = _run(forward, hidden, ids, more, waits)
    for ours, theirs in zip(got, wanted, strict=True):
        if list(ours) != list(theirs):
            raise NotUnderstood("its output has other fields")
        off = relative_rms(ours.logits, theirs.logits)
        if not off <= bound(LOGITS, theirs.logits.dtype):
            raise NotUnderstood(f"a step computes something else: logits are off by {off:.1e}")
    if waits.found is not None:
        raise NotUnderstood(f"a step asks the device for a number ({waits.found})")

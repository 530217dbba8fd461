"""Linears of diffusion transformers that stay in 16 bits: what they get wrong, every token gets wrong.

A modulation gives the scales, shifts and gates of a whole block, from one row an image: an error of it is the same for
all tokens and does not even out. Embedders and the last projection read and write what no other layer corrects. All of
them multiply few rows or are small, so that 8 bits would save memory, and no time.
"""

from collections.abc import Iterator

from torch import nn

from accel.diffusion.dit.block import innermost_blocks
from accel.libraries.adapters import BASE
from accel.quantization.linears import inside

MODULATES = "stays in 16 bits: it modulates its block, one row for all tokens of an image"
OUTSIDE = "stays in 16 bits: it is in no block, and embeds, modulates or projects the latents"


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By path, those of a diffusion transformer: lists of nothing but blocks. None of a UNet, whose lists hold resnet
    blocks and convolutions beside them.
    """
    if any(isinstance(module, nn.GroupNorm) for module in model.modules()):
        return {}
    blocks = dict(innermost_blocks(model))
    lists = {path.rpartition(".")[0] for path in blocks}
    mixed = (child not in blocks.values() for path in lists for child in model.get_submodule(path).children())
    return {} if any(mixed) else blocks


def sensitive_linears(model: nn.Module) -> dict[nn.Module, str]:
    """Those of a diffusion transformer, and why. None of another model."""
    blocks = transformer_blocks(model)
    if not blocks:
        return {}
    within = {part for block in blocks.values() for part in block.modules()}
    found: dict[nn.Module, str] = {linear: OUTSIDE for linear in _linears(model) if linear not in within}
    for block in blocks.values():
        found |= dict.fromkeys(modulations(block), MODULATES)
    return found


def modulations(block: nn.Module) -> list[nn.Linear]:
    """The linears of a block that make its scales, shifts and gates: what lies beside its attentions, and is no
    feed-forward. A part in which attentions lie is looked into.

    A modulation is a part whose last linear is its only one, or gives more than any before it and not as much as the
    first takes. A feed-forward, and an attention whose code is its own, give back what they take. A linear of the block
    itself modulates where it neither takes nor gives vectors as wide as those that the first attention takes.
    """
    attention = next((part for part in block.modules() if _attends(part)), None)
    width = None if attention is None else next((one.in_features for one in _linears(attention)), None)
    found: list[nn.Linear] = []
    parts = [] if attention is block else list(block.children())
    while parts:
        part = parts.pop(0)
        linears = list(_linears(part))
        if _is_linear(part):
            found += [one for one in linears if width not in (None, one.in_features, one.out_features)]
        elif not any(map(_attends, part.modules())):
            found += linears if _makes_several(linears) else []
        elif not _attends(part):
            parts += part.children()
    return found


def _makes_several(linears: list[nn.Linear]) -> bool:
    if len(linears) < 2:
        return True
    *before, last = linears
    return last.out_features > max(one.out_features for one in before) and last.out_features != linears[0].in_features


def _attends(module: nn.Module) -> bool:
    return "processor" in vars(module)


def _is_linear(module: nn.Module) -> bool:
    """Also in an adapter."""
    return isinstance(module, nn.Linear) or BASE in module._modules


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    """Without those of adapters."""
    return (part for _, part in inside(module, "", set()) if isinstance(part, nn.Linear))

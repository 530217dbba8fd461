"""What an encoder is given: text, images or sound, and small examples of each."""

import inspect
import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.errors import reason_of
from accel.libraries.code import comes_from
from accel.libraries.models import is_seq2seq
from accel.llm.recording.inputs import ROWS, example_ids, few
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.llm.recording.resting import resting
from accel.patching.structure import placement

INTERPOLATED = "interpolate_pos_encoding"
SHAPES = "spatial_shapes"
SHOWN = "patch_attention_mask"  # (batch, height, width), of patches
PLACES = "pixel_position_ids"  # (batch, patches, 2), of each patch; of padding -1
GRIDS, SIZES = "grid_thw", "image_sizes"  # of images whose patches all lie in one row: in patches, in pixels
MERGES = "merge_sizes"  # beside grids: by how many patches each is made smaller behind the layers, which orders them
TARGETS = "target_sizes"  # in patches, of images that lie side by side
LENGTHS = "feature_lens"  # of sounds whose frames lie side by side
HEARD = "input_features_mask"  # (batch, frames)
WIDE = 33  # patches, more than windows have in a row
SOUNDS = ("input_features", "input_values")
FRAMES = 12  # tokens of a sound of an example
SIDES = (16, 56, 96)  # patches of larger examples, as of windows that are halved three times
MOST_FIXED = 2048  # patches of the one size that a model takes
MOST = 256  # patches of an image of an example: it runs several times, on a CPU too


class Inputs(NamedTuple):
    """Names of arguments. main: of what is encoded; mask: of what shows padding, (batch, length) or as `SHOWN` or
    `PLACES`, "" for none; others: of what may be given beside. in_one_row: whether images or sounds of any size are one
    row of tokens.
    """

    main: str
    mask: str
    others: frozenset[str]
    in_one_row: bool = False

    def shown(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """What an argument of this name shows, (batch, length) or as `SHOWN`."""
        return (mask != -1).any(-1) if mask is not None and self.mask == PLACES else mask


TYPES = "token_type_ids"
BESIDE_TEXT = frozenset(("inputs_embeds", TYPES, "position_ids", "use_cache", "bbox"))
TEXT = Inputs("input_ids", "attention_mask", BESIDE_TEXT)
IMAGES = Inputs("pixel_values", "pixel_attention_mask", frozenset(("bool_masked_pos", INTERPOLATED, SHAPES)))


def inputs_of(module: nn.Module) -> Inputs | None:
    """Of a model of transformers with layers, and for images with patches; None for any other module."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return None
    if not any(type(one) is nn.ModuleList for one in module.modules()):
        return None
    names = inspect.signature(type(module).forward).parameters
    if TEXT.main in names:
        return TEXT if TEXT.mask in names else None
    if (sound := next((one for one in SOUNDS if one in names), None)) is not None:
        return Inputs(sound, "", frozenset((LENGTHS, "aftercnn_lens", HEARD)), LENGTHS in names)
    sizes = next((one for one in (GRIDS, SIZES, TARGETS) if one in names), None)
    patches = {SHAPES, PLACES} & names.keys() or sizes == GRIDS or patch_convolution(module) is not None
    main = next((one for one in (IMAGES.main, "hidden_states") if one in names), None)
    if main is None or not patches or getattr(module.config, "is_encoder_decoder", False):
        return None
    if sizes is not None:
        return Inputs(main, "", frozenset((sizes, MERGES, "use_vit_merger")), True)
    if main != IMAGES.main:
        return None
    return IMAGES._replace(mask=next((one for one in (SHOWN, PLACES) if one in names), IMAGES.mask))


def patch_convolution(model: nn.Module) -> Any:
    """The first of a model over images or video whose windows lie side by side; None for none."""
    found: Iterator[Any] = (
        one for one in model.modules() if isinstance(one, nn.Conv2d | nn.Conv3d) and one.kernel_size == one.stride
    )
    first = next((one for one in found if max(one.kernel_size) > 1), None)
    return _unfolded(model) if first is None else first


def _unfolded(model: nn.Module) -> nn.Conv2d | None:
    """The convolution that a model's first unfolding is with the linear behind it."""
    parts = [one for one in model.modules() if type(one) in (nn.Unfold, nn.Linear)]
    for unfold, linear in pairwise(parts):
        if isinstance(unfold, nn.Unfold) and isinstance(linear, nn.Linear):
            (height, width), strides = _sides(unfold.kernel_size), _sides(unfold.stride)
            channels, rest = divmod(linear.in_features, height * width)
            if strides == (height, width) and channels and not rest:
                return nn.Conv2d(channels, 1, strides, strides, device="meta")
    return None


def _sides(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, tuple) else (size, size)
    return height, width


def encoders_in(root: nn.Module) -> dict[str, nn.Module]:
    """The innermost models that are given something of a kind, by path."""
    every = {path: inputs for path, one in root.named_modules() if (inputs := inputs_of(one)) is not None}

    def holds_another(path: str, inputs: Inputs) -> bool:
        before = f"{path}." if path else ""
        return any(one != path and one.startswith(before) and found == inputs for one, found in every.items())

    return {path: root.get_submodule(path) for path, inputs in every.items() if not holds_another(path, inputs)}


def encoder_stacks(root: nn.Module) -> tuple[str, ...]:
    """The paths of the stacks of layers of a model that encodes; none of one with a decoder, or of any other."""
    if is_seq2seq(root) or not comes_from(type(root), "transformers"):
        return ()
    found = []
    for path, model in encoders_in(root).items():
        with suppress(NotUnderstood):
            found.append(".".join(filter(None, (path, decoder_layers(cast(Any, model))[0]))))
    return tuple(found)


def pad_token(root: Any) -> int | None:
    """The token that its configuration says padding is; None where it is of several texts, or does not say."""
    with suppress(ValueError):
        return getattr(root.config.get_text_config(), "pad_token_id", None)
    return None


def small_call(model: Any, inputs: Inputs) -> dict[str, Any]:
    """Arguments of a small call without padding. Raises NotUnderstood where none is known that the model takes."""
    if inputs is TEXT:
        return {TEXT.main: example_ids(model, few(model))}
    reason = "inputs of another kind"
    for call in (_sounds if inputs.main in SOUNDS else _images)(model, inputs):
        try:
            with resting(model), within_tables():
                type(model).forward(model, **call)
        except Exception as error:  # images of one size, as position embeddings are for
            reason = f"could not be examined: {reason_of(error)}"
        else:
            return call
    raise NotUnderstood(reason)


def _sounds(model: Any, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Of a few tokens each; then of the length that the configuration says."""
    device, dtype = placement(model)
    names = inspect.signature(type(model).forward).parameters
    kinds, modules = ((nn.Conv2d,), (nn.Linear, nn.Conv1d)), list(model.modules())
    first: Any = next((one for kind in kinds for one in modules if type(one) in kind), None)
    steps = math.prod(one.stride[0] for one in model.modules() if type(one) is nn.Conv1d)
    longest = getattr(model.config, "max_source_positions", None)
    length, bins = (getattr(model.config, name, 0) for name in ("max_length", "num_mel_bins"))
    window, shapes = 2 * getattr(model.config, "n_window", FRAMES), list[tuple]()
    if LENGTHS in names:
        shapes = [(bins, 3 * window)]
    elif isinstance(first, nn.Conv2d):
        shapes = [(1, length, bins), (1, first.in_channels, bins, bins), (ROWS, bins, 3 * window)]
        steps = math.prod(one.stride[0] for one in model.modules() if type(one) is nn.Conv2d)
        shapes.append((ROWS, (FRAMES + 2) * steps, bins))
    elif isinstance(first, nn.Conv1d):
        rows = ROWS if HEARD in names else 1
        lengths = (ROWS, (FRAMES + 2) * steps), *([(rows, longest * steps)] if isinstance(longest, int) else [])
        for rows, length in lengths:
            sized = [(rows, first.in_channels, length), (rows, length, first.in_channels)]
            shapes += [(rows, length), sized[0]] if first.in_channels == 1 else sized
    elif first is not None:
        shapes = [(ROWS, one, first.in_features) for one in {FRAMES, FRAMES * steps, (FRAMES + 2) * steps}]
    for shape in shapes:
        generator, more = torch.Generator().manual_seed(0), [dict[str, Any]()]
        if LENGTHS in names:
            more = [{LENGTHS: torch.tensor([2 * window + 9, window - 9], device=device)}]
        elif HEARD in names:
            more = [{HEARD: torch.ones(shape[0], one, dtype=torch.int64, device=device)} for one in {*shape[1:]}]
        for one in more:
            yield {inputs.main: torch.randn(shape, generator=generator, device="cpu").to(device, dtype), **one}


def _images(model: Any, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Of a few patches each; then of the size that the configuration says."""
    device, dtype = placement(model)
    generator = torch.Generator().manual_seed(0)
    names = inspect.signature(type(model).forward).parameters

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    if GRIDS in names:  # the first as wide as several windows, then frames of a video where it takes such
        first = next(one for one in model.modules() if type(one) in (nn.Linear, nn.Conv2d, nn.Conv3d))
        convolution, grids = patch_convolution(model), ([2, 4, 8], [1, 4, 16])
        shapes = dict.fromkeys(one.weight.shape[1:] for one in (first, convolution) if one is not None)
        more: dict[str, Any] = {MERGES: torch.tensor([2, 1], device=device)} if MERGES in names else {}
        forms = [form for one in shapes for form in ((144, one.numel()), (144, *one), (1, 144, *one))]
        for form, other in product(forms, grids):
            yield {inputs.main: random(*form), GRIDS: torch.tensor([[1, 4, 20], other], device=device), **more}
        return

    convolution = patch_convolution(model)
    if TARGETS in names:
        height, width = convolution.kernel_size
        sizes = torch.tensor([[4, 12], [8, 4]], device=device)
        yield {IMAGES.main: random(1, convolution.in_channels, height, 80 * width), TARGETS: sizes}
        return
    if SHAPES in names or PLACES in names:
        patches: Any = next((one for one in model.modules() if hasattr(one, "in_features")), None)
        if PLACES in names and patches is not None:  # of as many as windows of 2 and of 3 a side fill
            grid = torch.cartesian_prod(torch.arange(6, device=device), torch.arange(12, device=device))
            yield {IMAGES.main: random(ROWS, 72, patches.in_features), PLACES: torch.stack([grid, grid.flip(1)])}
        elif patches is not None:
            sizes = torch.tensor([[2, 3], [3, 2]], device=device)
            shown = torch.ones(ROWS, 6, dtype=torch.int64, device=device)
            yield {IMAGES.main: random(ROWS, 6, patches.in_features), SHAPES: sizes, IMAGES.mask: shown}
        return
    height, width = convolution.kernel_size[-2:]
    kind = type(convolution)
    channels = next((one.in_channels for one in model.modules() if type(one) is kind), convolution.in_channels)
    more = {INTERPOLATED: True} if INTERPOLATED in names else {}
    if SIZES in names:
        more[SIZES] = torch.tensor([[2 * height, 3 * width], [2 * height, width]], device=device)
    if SHOWN in names:
        more[SHOWN] = torch.ones(ROWS, 2, 3, dtype=torch.bool, device=device)
    if convolution.weight.dim() == 4:
        yield {IMAGES.main: random(ROWS, channels, 2 * height, 3 * width), **more}
    size, frames = (getattr(model.config, name, None) for name in ("image_size", "num_frames"))
    size = (size, size) if isinstance(size, int) else size
    if isinstance(size, list | tuple) and len(size) == 2:
        few = math.prod(size) <= MOST * height * width
        if few and convolution.weight.dim() == 4:
            yield {IMAGES.main: random(ROWS, channels, *size)}
        most = MOST * math.prod(convolution.kernel_size)
        # A video of full size is seconds of a CPU, several times.
        if isinstance(frames, int) and (device.type != "cpu" or frames * math.prod(size) <= most):
            yield {IMAGES.main: random(ROWS, frames, channels, *size)}
    if convolution.weight.dim() != 4:
        return
    for side in SIDES:
        yield {IMAGES.main: random(ROWS if side**2 <= MOST else 1, channels, side * height, side * width)}
    if isinstance(size, list | tuple) and len(size) == 2 and math.prod(size) <= MOST_FIXED * height * width:
        yield {IMAGES.main: random(1, channels, *size)}


def masked_sound(model: Any, inputs: Inputs, example: dict[str, Any]) -> Inputs:
    """With the mask of what its sounds consist of, (batch, length), if the model reads one."""
    masked = inputs._replace(mask=HEARD if HEARD in example else TEXT.mask)
    try:
        with within_tables():
            given, plain = (
                tensors_of(type(model).forward(model, **example | more))
                for more in ({masked.mask: random_mask(masked, example)}, {})
            )
    except Exception as error:  # an argument that it does not take
        reason_of(error)
        return inputs
    return inputs if all(torch.equal(one, given[name]) for name, one in plain.items()) else masked


def wide_call(model: Any, inputs: Inputs, example: dict[str, Any]) -> list[dict[str, Any]]:
    """A call of one image of many patches side by side, or of a long sound, which shows windows; none where the model
    takes no such. Of what all lies in one row, of the first, or with the half of each sound.
    """
    images = example[inputs.main]
    if inputs.in_one_row:
        first = {name: one[:1] for name, one in example.items()}
        if GRIDS in example:
            first[inputs.main] = images.narrow(int(len(images) == 1), 0, int(example[GRIDS][0].prod()))
        elif LENGTHS in example:
            first[inputs.main] = images[:, : int(example[LENGTHS][0])]
        elif TARGETS in example:
            first[inputs.main] = images[..., : int(example[TARGETS][0].prod()) * images.shape[-2]]
        return [example | {HEARD: _half(torch.zeros_like(example[HEARD]))} if HEARD in example else first]
    sound = inputs.main in SOUNDS
    if (images.dim() != 4 and not sound) or SHOWN in example or (not sound and len(images) < ROWS):
        return []
    height, width = images.shape[-2] // (1 if sound else 2), images.shape[-1] // 3 * WIDE
    shape = (1, width) if images.dim() == 2 else (1, *images.shape[1:-2], height, width)
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu")
    call = example | {inputs.main: wide.to(images)}
    try:
        with resting(model), within_tables():  # blocks of windows remember the smallest picture, which may be this one
            type(model).forward(model, **call)
    except Exception as error:  # images of one size
        reason_of(error)
        return []
    return [call]


def unread(model: Any, example: dict[str, Any], inputs: Inputs, names: Collection[str]) -> frozenset[str]:
    """Names of what processors and tokenizers give beside images and texts, and the model does nothing with."""
    images = example[inputs.main]
    mask = _half(images.new_zeros(images.shape[0], *(images.shape[2:] or images.shape[1:]), dtype=torch.int64))
    beside = [("pixel_mask", mask), (TYPES, torch.ones_like(mask[..., :1].flatten(1))), ("use_cache", True)]
    if inputs == TEXT:
        beside = [(TYPES, torch.ones_like(images))] if TYPES not in names else []
    elif inputs.main in SOUNDS:  # whose frames may be either
        beside += [("is_longer", mask.new_ones(len(images), 1, dtype=torch.bool))]
        beside += [(TEXT.mask, _half(mask.new_zeros(len(images), size))) for size in images.shape[1:]]
    plain, same = tensors_of(type(model).forward(model, **example)) if beside else {}, dict[str, bool]()
    for name, one in beside:
        try:
            with within_tables():
                given = tensors_of(type(model).forward(model, **example, **{name: one}))
        except Exception as error:  # an argument that it does not take
            reason_of(error)
        else:
            alike = given.keys() == plain.keys() and all(torch.equal(given[key], plain[key]) for key in plain)
            same[name] = same.get(name, True) and alike
    return frozenset(name for name, alike in same.items() if alike)


def _half(mask: torch.Tensor) -> torch.Tensor:
    """It, with ones in the first half of each row."""
    mask[..., : mask.shape[-1] // 2] = 1
    return mask


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """All in an output, by their paths in it."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    tensors = ((path, one) for path, one in leaves if isinstance(one, torch.Tensor))
    return {".".join(str(getattr(key, "key", key)) for key in path): one for path, one in tensors}


def random_mask(inputs: Inputs, example: dict[str, Any], left: bool = False) -> torch.Tensor:
    """(B, L), for (B, L, ...), without the last tokens of all rows but the first, or the first ones. Of patches (B,
    height, width), without the last column, or the last row. Of `PLACES` these, with padding.
    """
    like = example.get(inputs.mask, example[inputs.main])
    if inputs.mask == SHOWN:
        shown = torch.ones_like(like)
        shown[1:].narrow(1 if left else 2, -1, 1).zero_()
        return shown
    shown = torch.ones(like.shape[:2], dtype=torch.int64, device=like.device)
    shown[1:, : like.shape[1] // 2] = 0
    shown = shown if left else shown.flip(1)
    return like.masked_fill(shown[..., None] == 0, -1) if inputs.mask == PLACES else shown

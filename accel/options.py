"""Every keyword of `accel.optimize`, validated before anything is touched."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

# What an editor offers for a keyword, and what is valid.
Attention = Literal["auto", "cudnn", "flash", "efficient", "xformers", "triton", "matmul", "sdpa"]
Layout = Literal["auto", "channels_last", "keep"]
KvCache = Literal["int8", "fp8"]
Activations = Literal["int8", "int8-outliers", "fp8", "int8-static", "int8-outliers-static", "fp8-static"]
Cpu = Literal["auto", "fuse"]
Parallel = Literal["guidance", "tiles"]
Padding = Literal["stock", "zeros"]

ATTENTION: tuple[str, ...] = get_args(Attention)
LAYOUT: tuple[str, ...] = get_args(Layout)
SCHEMES = (
    "int8", "int8-asym", "int4", "int4-asym", "int4-g64", "int4-g64-asym", "int4-g32", "int4-g32-asym", "fp8",
)  # fmt: skip
HEAD = "-head"  # behind one of them: the output head too
WEIGHTS = (*SCHEMES, *(scheme + HEAD for scheme in SCHEMES))
KV_CACHE: tuple[str, ...] = get_args(KvCache)
ACTIVATIONS = ("int8", "int8-outliers", "fp8")
STATIC = ("int8-static", "int8-outliers-static", "fp8-static")  # what only calibration gives, see `accel.quantize`
METHODS = ("rtn", "gptq", "awq", "smoothquant")  # of `accel.quantize`; the first needs no calibration data
MOST_DECIBELS = 100  # of PSNR; as far from each other are images of a loop that only rounds otherwise, in float32
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt]i?|)b|(%))", re.IGNORECASE)
DECIBELS = re.compile(r"(\d+(?:\.\d+)?) ?dB", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """Options of `accel.optimize`; wrong values raise TypeError or ValueError naming the valid ones.

    attention: "auto" measures the backends on this GPU beside the first calls of a shape and remembers the choice; or
        a backend's name.
    layout: "auto" stores convolution weights channels-last while the model is on a GPU; "channels_last" does on a CPU
        too, where torch's own group norm over such images, in code that is not fused, is wrong far from zero; "keep"
        leaves the layout alone.
    graphs: "auto" replays a CUDA graph per input shape where that is faster; True keeps it even where it is not;
        False never captures.
    graph_memory_gb: bound on the memory that captured graphs may hold, in GiB; None is a quarter of the GPU.
    step_cache: lossy. The deep layers of UNets, and the blocks of diffusion transformers after the first, run in every
        n-th call of a denoising loop only; give n, 2 or more, or a quality such as "35dB", up to 100: the largest n
        whose images keep that PSNR, measured when a text-to-image pipeline is optimized; where none does, every call is
        computed whole, as the report says, and as with None.
    weights: lossy, for causal language models, encoders and denoisers. The linear layers inside the layers, the blocks
        and embeddings of a UNet, or the blocks of a diffusion transformer but for those that modulate them, are stored
        in fewer bits, rounded to nearest: "int8" and "fp8" (float8_e4m3fn) with a scale a row; for the former two also
        "int4" with one for 128 columns of a row, "int4-g64" and "int4-g32" for 64 and 32; "-asym" behind it lets the
        numbers cover least to largest instead of being symmetric. "-head" behind any of these, as in "int4-g64-head",
        keeps the output head of a language model in 8 bits too: as the layers, or by "int8" where these have 4. Experts
        of a mixture are stored so too, where their formula is known. None leaves them as they are.
    activations: lossy, for the same models. Products of more than 64 rows, as of a prompt or of an
        image, multiply 8 bits by 8 bits: each token is rounded as it comes, by a scale of its own, to "int8" or "fp8",
        whichever the weights are (fp8: not for denoisers in float16). "int8-outliers" keeps those columns of a token's
        channels in 16 bits in which any value of the call is above 6 (LLM.int8()), or all where more than one in 16 is
        so. Up to 64 rows keep all their bits; so do those of the prompt in a denoiser's cross-attention. It needs
        weights="int8" or "fp8", or a model whose weights are so already. "int8-static" and "fp8-static" are for models
        whose linear layers hold one scale for all of their inputs, as `accel.quantize` fixes them by calibration. None
        rounds none but what the model itself says it rounds, see `accel.quantize`. "int8-outliers-static": the same of
        columns, those above 6 there.
    keep_original: the weights that `weights` replaces wait on the CPU, for `accel.restore`. False frees them when the
        model is ready: `restore` then leaves the quantized ones in place.
    kv_cache: lossy, for causal language models and encoder-decoders. Keys and values are kept in 8 bits with one scale
        a token and head, "int8" or "fp8" (float8_e4m3fn; GPUs of compute capability 8.9 and later): half the memory of
        16 bits. Of an encoder-decoder those of what the encoder gave, the decoder's own are not. Layers whose keys
        would lose too much, as measured when the model is optimized, keep theirs (all, if one of an encoder-decoder's
        does), see the report. None keeps them in the dtype of the model.
    cpu: "auto" runs models stock on a CPU, but for a language model of which a token, timed for a moment when it is
        optimized there, takes less time fused; the same object runs fused once it is on a GPU. "fuse" runs fused on a
        CPU too. So do options that are lossy, and strict.
    parallel: work is divided among the processes that torchrun has started, one a card, each of which runs the same
        script with the same seeds. "guidance": of diffusion pipelines. Each rank computes its share of the rows of a
        denoiser's batch, as the two halves of classifier-free guidance, and all get the result; and what "tiles" says.
        "tiles": each rank decodes its share of the tiles of an autoencoder that has tiling on. Calls that cannot be
        divided are computed whole on every rank, as the report says. None divides nothing by itself: models that
        transformers or diffusers have divided are optimized as they are.
    memory: of a GPU, that a model or a pipeline may take with all that it computes (not the driver's own, about
        half a GB): a size such as "12GB" or "12GiB", a number of bytes, or a share such as 0.5. Models of a pipeline
        come to the GPU for their turn; of a model that is too large some blocks stay there, the others come from the
        CPU's memory as they are called. Results are the same. None leaves models where they are.
    host_memory: with memory, how much of the CPU's memory may be pinned, in the same form; None for all of it. Weights
        beyond that are copied by the CPU, which is slower.
    padding: of text encoders. "stock": rows of padding are computed where somebody may see them, as who calls the bare
        encoder does. "zeros": they come back as zeros there too, for callers who leave them out by the mask. A head or
        a pooling inside of the model that does not look at them needs neither: none are computed.
    strict: a skipped site raises ValueError, and nothing is changed.
    """

    attention: Attention = "auto"
    layout: Layout = "auto"
    graphs: bool | Literal["auto"] = "auto"
    graph_memory_gb: float | None = None
    step_cache: int | str | None = None
    weights: str | None = None
    activations: Activations | None = None
    keep_original: bool = True
    kv_cache: KvCache | None = None
    cpu: Cpu = "auto"
    parallel: Parallel | None = None
    padding: Padding = "stock"
    memory: int | float | str | None = None
    host_memory: int | float | str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        _one_of("attention", self.attention, ATTENTION)
        _one_of("layout", self.layout, LAYOUT)
        _one_of("graphs", self.graphs, ("auto", True, False))
        _one_of("weights", self.weights, (None, *WEIGHTS))
        _one_of("activations", self.activations, (None, *ACTIVATIONS, *STATIC))
        check_activations(self.activations, self.weights)
        if self.activations in STATIC and self.weights is not None:
            raise ValueError(f"activations={self.activations!r}: {calibrate(self.activations)}")
        _one_of("keep_original", self.keep_original, (True, False))
        _one_of("kv_cache", self.kv_cache, (None, *KV_CACHE))
        _one_of("cpu", self.cpu, get_args(Cpu))
        _one_of("parallel", self.parallel, (None, *get_args(Parallel)))
        _one_of("padding", self.padding, get_args(Padding))
        _one_of("strict", self.strict, (True, False))
        memory = self.graph_memory_gb
        if memory is not None:
            if isinstance(memory, bool) or not isinstance(memory, int | float):
                raise TypeError(f"graph_memory_gb={memory!r}: give a number of GiB or None")
            if not memory > 0:
                raise ValueError(f"graph_memory_gb={memory!r}: give a number above 0, or graphs=False")
        for name in ("memory", "host_memory"):
            if getattr(self, name) is not None:
                bytes_of(name, getattr(self, name))
        if self.memory is not None and self.parallel is not None:
            raise ValueError(f"memory={self.memory!r}: for one process, not with parallel={self.parallel!r}")
        _step_cache(self.step_cache)

    @property
    def lossy(self) -> str | None:
        """The options chosen that change results by more than rounding, or None."""
        chosen = {name: getattr(self, name) for name in ("step_cache", "weights", "activations", "kv_cache")}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None) or None


def bytes_of(name: str, value: object, whole: int | None = None) -> int:
    """Bytes of a size as text, an integer, or a share of the whole. Raises ValueError naming the option and its value.

    whole: None while it is not known; a share is checked then, and 0 returned.
    """
    size, share = 0.0, 0.0
    if isinstance(value, str) and (found := SIZE.fullmatch(value.strip())):
        number = float(found[1])
        size, share = (0.0, number / 100) if found[3] else (number * UNITS[found[2].lower()], 0.0)
    elif isinstance(value, Real) and not isinstance(value, bool):
        size, share = float(value), 0.0 if isinstance(value, Integral) else float(value)
    if 2 <= size < math.inf:
        return int(size)
    if 0 < share <= 1:
        return int(share * (whole or 0))
    valid = "give a size such as '12GB' or '12 GiB', a number of bytes, or a share such as 0.5 or '50%'"
    raise ValueError(f"{name}={value!r}: {valid}")


def choose(options: Options | None, keywords: Mapping[str, Any], unknown: Mapping[str, object]) -> Options:
    """The options that a call gives: an object, or keywords.

    keywords: among others a value for every field of Options, which is its default where the call does not give it.
    Raises TypeError for unknown names, listing the valid ones, for an object of another class, and for keywords beside
    one, naming them: those that ask for something else than the default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise TypeError(f"unknown option {names}; valid options: {', '.join(defaults)}")
    given = {name: keywords[name] for name in defaults}
    if options is None:
        return Options(**given)
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r}: give an accel.Options, or its fields as keywords")
    beside = [f"{name}={value!r}" for name, value in given.items() if not _same(value, defaults[name])]
    if beside:
        raise TypeError(f"{', '.join(beside)} beside options: give either; dataclasses.replace changes an Options")
    return options


def calibrate(activations: str) -> str:
    """What to call for scales, or columns, that are fixed."""
    kind = activations.partition("-")[0]
    return (
        f"its {'columns' if 'outliers' in activations else 'scales'} of inputs are fixed by calibration: "
        f"accel.quantize(model, {kind!r}, calibration=..., activations={activations!r}), then accel.optimize(model)"
    )


def check_activations(activations: str | None, weights: str | None) -> None:
    """Raises ValueError for activations that weights of this scheme cannot be multiplied with; None fits all."""
    if activations is None or weights is None:
        return
    kind = activations.partition("-")[0]
    if weights.removesuffix(HEAD) != kind:
        raise ValueError(f"activations={activations!r} needs weights={kind!r}, not {weights!r}")


def _same(value: object, other: object) -> bool:
    """Whether both are one value of one type: 1 is not True."""
    return type(value) is type(other) and value == other


def _one_of(name: str, value: object, valid: tuple) -> None:
    if not any(_same(value, choice) for choice in valid):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, valid))}")


def decibels(quality: str) -> float:
    """35.0 of "35dB". Raises ValueError for another form, for 0, and for more than rounding leaves of an image."""
    found = DECIBELS.fullmatch(quality)
    if found is None or not 0 < float(found[1]) <= MOST_DECIBELS:
        raise ValueError(f"{quality!r} is no quality in decibels, such as '35dB'")
    return float(found[1])


def _step_cache(value: object) -> None:
    valid = f"give None, an interval of 2 calls or more, or a quality above 0 and up to {MOST_DECIBELS} dB, as '35dB'"
    if value is None:
        return
    if isinstance(value, str):
        try:
            decibels(value)
        except ValueError:
            raise ValueError(f"step_cache={value!r}: {valid}") from None
    elif type(value) is not int:
        raise TypeError(f"step_cache={value!r}: {valid}")
    elif value < 2:
        raise ValueError(f"step_cache={value!r}: {valid}")
